"""Define the messages between hosts and the controller, as JSON and as values that pickle supports."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps, loads  # by name: a test may put something else in its place
from pathlib import Path
from typing import Any

import pytest

from emulate.pytest_plugin.others import CoverageMeasurement

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
    category = _category(event["module"], event["kind"])
    message = warnings.WarningMessage(
        message=category(event["text"]), category=category, filename=event["filename"], lineno=event["lineno"]
    )
    location = tuple(event["location"]) if event["location"] else None
    return {"warning_message": message, "when": event["when"], "nodeid": event["nodeid"], "location": location}


def _category(module: str, kind: str) -> Any:
    try:
        category = getattr(importlib.import_module(module), kind) if module in ("builtins", "pytest") else UserWarning
        category("a text")
    except (AttributeError, TypeError):
        return UserWarning
    return category
