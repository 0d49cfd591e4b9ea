"""Define the messages between hosts and the controller, and process what hosts report while they run a test.

Messages are JSON, and values that pickle supports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps, loads  # by name: a test may put something else in its place
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulate.pytest_plugin import upstream
from emulate.pytest_plugin.merge import PHASES, HostRun, has_raised
from emulate.pytest_plugin.third_party_plugins import CoverageMeasurement

if TYPE_CHECKING:
    from emulate.cluster import HostResult, Lease

# Events of a host.
REPORT = "gpudist-report"
WARNING = "gpudist-warning"
OUTPUT = "gpudist-output"
CAPTURED = "gpudist-captured"
READY = "gpudist-ready"
LIMIT = "gpudist-limit"
LEAVING = "gpudist-leaving"


@dataclass(frozen=True)
class SessionPlan:
    """Hold what a host needs to start a pytest like the directing one.

    Attributes:
        options: The values of all options.
        args: What was to be collected.
        path: The file whose tests run on these hosts.
        temporary: An existing folder for the folders of `tmp_path`.
        worker: What `config.workerinput` has besides the host's own name.
        markers: The marks that are known.
        measured: How pytest-cov measures the run, if it does.
    """

    options: dict[str, Any]
    args: list[str]
    path: Path
    temporary: Path
    worker: dict[str, Any]
    markers: list[str]
    measured: CoverageMeasurement | None = None


@dataclass(frozen=True)
class TestPlan:
    """Describe one test, as every host of a topology gets it.

    Attributes:
        session: For a host that has no pytest yet.
        nodeid: The test.
        next_nodeid: The next test of these hosts; None where it is not known.
        is_last: Whether no other test follows on these hosts.
        strategy: The kind of strategy that it gets.
        shared: A folder for all hosts, made when it is used.
        seed: What everything is seeded with.
    """

    session: SessionPlan
    nodeid: str
    next_nodeid: str | None
    is_last: bool
    strategy: str | None
    shared: Path
    seed: int

    __test__ = False  # not a test, whatever its name


@dataclass(frozen=True)
class Ended:
    """Hold what a host returns after a test.

    Attributes:
        exit_reason: What `pytest.exit` was called with, or that Ctrl-C was raised; None where neither was.
        exit_code: The exit code that it was given.
        stop: Why the host's session should stop, where it said so.
        failed_in_tensorflow: Whether TensorFlow raised: a collective that failed may break all later ones of its host.
    """

    exit_reason: str | None = None
    exit_code: int | None = None
    stop: str = ""
    failed_in_tensorflow: bool = False


@dataclass
class Received:
    """Hold what arrived from one host.

    Attributes:
        reports: The reports of the test's phases, in order.
        subtests: Those of its subtests.
        late: Reports of an earlier test, torn down now.
        captured: The files with what the host's pytest has captured of its present phase.
    """

    reports: list[pytest.TestReport] = field(default_factory=list)
    subtests: list[pytest.TestReport] = field(default_factory=list)
    late: list[pytest.TestReport] = field(default_factory=list)
    captured: list[Path] = field(default_factory=list)


def dump_report(config: pytest.Config, report: pytest.TestReport) -> dict[str, Any]:
    """Return a report as an event."""
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    return {"event": REPORT, "report": dumps(data, default=repr)}


def load_report(config: pytest.Config, event: Mapping[str, Any]) -> pytest.TestReport:
    """Return the report in an event. JSON has no tuples."""
    data = loads(event["report"])
    data["location"] = tuple(data["location"])
    data["sections"] = [tuple(section) for section in data["sections"]]
    data["user_properties"] = [tuple(pair) for pair in data["user_properties"]]
    if isinstance(data["longrepr"], list):
        data["longrepr"] = tuple(data["longrepr"])
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
    return report


def dump_warning(message: warnings.WarningMessage, when: str, nodeid: str, location: Any) -> dict[str, Any]:
    """Return a recorded warning as an event."""
    return {
        "event": WARNING,
        "module": message.category.__module__,
        "kind": message.category.__qualname__,
        "text": str(message.message),
        "filename": message.filename,
        "lineno": message.lineno,
        "when": when,
        "nodeid": nodeid,
        "location": location,
    }


def load_warning(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `pytest_warning_recorded`."""
    category: Any = UserWarning
    with contextlib.suppress(AttributeError, TypeError):
        if event["module"] in ("builtins", "pytest"):
            own = getattr(importlib.import_module(event["module"]), event["kind"])
            own("a text")
            category = own
    message = warnings.WarningMessage(
        message=category(event["text"]), category=category, filename=event["filename"], lineno=event["lineno"]
    )
    location = tuple(event["location"]) if event["location"] else None
    return {"warning_message": message, "when": event["when"], "nodeid": event["nodeid"], "location": location}


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
            # Once, also if several hosts have it.
            key = json.dumps(event)
            if key not in self._warnings:
                self._warnings.add(key)
                self._config.hook.pytest_warning_recorded.call_historic(kwargs=load_warning(event))
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
        if report.nodeid != upstream.nodeid_of(self._item):
            self.received[host].late.append(report)
        elif upstream.subtest_name(report) is not None:
            self.received[host].subtests.append(report)  # its host goes on after it
        else:
            self.received[host].reports.append(report)
            if has_raised(report):
                self._hurry()

    def _hurry(self) -> None:
        """Give the other hosts a short time after one has failed or left: they may wait for it forever."""
        if len(self.received) > 1:
            self._lease.hurry()

    def run_of(self, host: int, result: HostResult) -> HostRun:
        """Return how the test ended on one host."""
        said = self.received[host]
        phases = tuple(phase for phase in PHASES if phase != "call" or not self._config.getoption("setuponly", False))
        captured = []
        for path in said.captured if result.status != "returned" else ():  # what it had written in its last phase
            with contextlib.suppress(OSError):  # not every way of capturing has files
                if text := path.read_text(encoding="utf-8", errors="replace"):
                    captured.append((f"Captured {path.suffix.removeprefix('.')}", text))
        return HostRun(host, self._lease.names[host], said.reports, result, captured, said.subtests, phases)

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
