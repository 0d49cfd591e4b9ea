"""Process what hosts report while they run a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulate.pytest_plugin import upstream
from emulate.pytest_plugin.merge import PHASES, HostRun
from emulate.pytest_plugin.wire import (
    CAPTURED,
    LEAVING,
    LIMIT,
    OUTPUT,
    READY,
    REPORT,
    WARNING,
    Received,
    load_report,
    load_warning,
)

if TYPE_CHECKING:
    from emulate.pool import HostResult, Lease


START_SECONDS = 60.0
"""Extra seconds for hosts to start pytest and to import the test module."""


class EventsOfTest:
    """Receive the events of one test.

    Args:
        config: Pytest's.
        lease: The hosts.
        item: The test.
        deadline: The seconds it has once all hosts are ready for it.

    Attributes:
        received: What each host said.
        deadline: The seconds it has, when hosts were told of fewer too.
    """

    def __init__(self, config: pytest.Config, lease: Lease, item: pytest.Item, deadline: float) -> None:
        self.deadline = deadline
        self._config = config
        self._lease = lease
        self._item = item
        self._warnings: set[str] = set()
        self._num_hosts = lease.topology.num_stepping_hosts
        self._reset()

    def _reset(self) -> None:
        self._ready: set[int] = set()
        self.received = [Received() for _ in self._lease.names]

    def take(self, host: int, event: dict[str, Any]) -> None:
        """Process an event. Call it for each event."""
        kind = event["event"]
        if kind == "restarted":
            self._reset()
        elif kind == REPORT:
            self._take_report(host, load_report(self._config, event))
        elif kind == WARNING:
            self._take_warning(event)
        elif kind == CAPTURED:
            self.received[host].captured = [Path(path) for path in event["paths"]]
        elif kind == READY:
            # The time of a test starts when every host that runs it has started pytest and found it.
            self._ready.add(host)
            self._allow()
        elif kind == LIMIT:
            # pytest-timeout gives the test so much time.
            self.deadline = min(self.deadline, event["seconds"])
            self._allow()
        elif kind == LEAVING:
            self._hurry()
        elif kind == OUTPUT:
            print("".join(f"[{self._lease.names[host]}] {line}\n" for line in event["text"].splitlines()), end="", flush=True)

    def _allow(self) -> None:
        self._lease.allow(self.deadline if len(self._ready) == self._num_hosts else self.deadline + START_SECONDS)

    def _take_report(self, host: int, report: pytest.TestReport) -> None:
        if report.nodeid != self._nodeid:
            self.received[host].late.append(report)
            return
        if upstream.subtest_name(report) is not None:
            self.received[host].subtests.append(report)  # its host goes on after it
            return
        self.received[host].reports.append(report)
        raised = report.failed or (report.skipped and hasattr(report, "wasxfail"))
        if raised:
            self._hurry()

    def _hurry(self) -> None:
        """Give the other hosts a short time after one has failed or left: they may wait for it forever."""
        if len(self.received) > 1:
            self._lease.hurry()

    @property
    def _nodeid(self) -> str:
        assert self._item.parent is not None
        return f"{self._item.parent.nodeid}::{self._item.name}"

    def _take_warning(self, event: dict[str, Any]) -> None:
        """Report the warning once, also if several hosts have it."""
        key = json.dumps(event)
        if key not in self._warnings:
            self._warnings.add(key)
            self._config.hook.pytest_warning_recorded.call_historic(kwargs=load_warning(event))

    def run_of(self, host: int, result: HostResult) -> HostRun:
        """Return how the test ended on one host."""
        said = self.received[host]
        phases = tuple(phase for phase in PHASES if phase != "call" or not self._config.getoption("setuponly", False))
        captured = self._captured(host, result)
        return HostRun(host, self._lease.names[host], said.reports, result, captured, said.subtests, phases)

    def _captured(self, host: int, result: HostResult) -> list[tuple[str, str]]:
        """Return what an unfinished host had written in its last phase, as sections of a report."""
        if result.status == "returned":
            return []
        names = [f"Captured {path.suffix.removeprefix('.')}" for path in self.received[host].captured]
        texts = [_read(path) for path in self.received[host].captured]
        return [(name, text) for name, text in zip(names, texts, strict=True) if text]

    def late_reports(self, *, everything: bool = False) -> list[pytest.TestReport]:
        """Return the failures of later teardowns of earlier tests, each once."""
        failures: dict[str, pytest.TestReport] = {}
        for name, received in zip(self._lease.names, self.received, strict=True):
            for report in received.late + (received.reports if everything else []):
                key = f"{report.nodeid} {report.longrepr}"
                if report.failed and key not in failures:
                    report.location = (*report.location[:2], f"{report.location[2]} on {name}")
                    failures[key] = report
        return list(failures.values())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not every way of capturing has files
        return ""
