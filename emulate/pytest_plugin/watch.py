"""What hosts say while they run a test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from emulate.pytest_plugin.wire import OUTPUT, REPORT, WARNING, Received, load_report, load_warning

if TYPE_CHECKING:
    from emulate.pool import Lease


class Watch:
    """Takes the events of one test.

    Args:
        config: Pytest's.
        lease: The hosts.
        item: The test.

    Attributes:
        received: What each host said.
    """

    def __init__(self, config: pytest.Config, lease: Lease, item: pytest.Item) -> None:
        self._config = config
        self._lease = lease
        self._item = item
        self._warnings: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self.received = [Received() for _ in self._lease.names]

    def take(self, host: int, event: dict[str, Any]) -> None:
        """To be called with each event."""
        kind = event["event"]
        if kind == "restarted":
            self._reset()
        elif kind == REPORT:
            self._take_report(host, load_report(self._config, event))
        elif kind == WARNING:
            self._take_warning(event)
        elif kind == OUTPUT:
            self._show(host, event["text"])

    def _take_report(self, host: int, report: pytest.TestReport) -> None:
        if report.nodeid != self._nodeid:
            self.received[host].late.append(report)
            return
        self.received[host].reports.append(report)
        raised = report.failed or (report.skipped and hasattr(report, "wasxfail"))
        if raised and len(self.received) > 1:
            self._lease.hurry()  # the others may wait for this host for ever

    @property
    def _nodeid(self) -> str:
        assert self._item.parent is not None
        return f"{self._item.parent.nodeid}::{self._item.name}"

    def _take_warning(self, event: dict[str, Any]) -> None:
        """Once, however many hosts have it."""
        key = json.dumps(event)
        if key not in self._warnings:
            self._warnings.add(key)
            self._config.hook.pytest_warning_recorded.call_historic(kwargs=load_warning(event))

    def _show(self, host: int, text: str) -> None:
        """Output of a host while it runs, for `-s`."""
        print("".join(f"[{self._lease.names[host]}] {line}\n" for line in text.splitlines()), end="", flush=True)

    def late_reports(self, *, everything: bool = False) -> list[pytest.TestReport]:
        """What went wrong when earlier tests were torn down, each once."""
        found: dict[str, pytest.TestReport] = {}
        for name, received in zip(self._lease.names, self.received, strict=True):
            for report in received.late + (received.reports if everything else []):
                key = f"{report.nodeid} {report.longrepr}"
                if report.failed and key not in found:
                    report.location = (*report.location[:2], f"{report.location[2]} on {name}")
                    found[key] = report
        return list(found.values())
