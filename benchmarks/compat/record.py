"""A pytest plugin that writes down each test's outcome as it ends, and leaves out what has passed before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE, SOURCE, KEEP = "GPUDIST_COMPAT_RECORD", "GPUDIST_COMPAT_SOURCE", "GPUDIST_COMPAT_KEEP"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the last outcome of each test; under an empty name, what was collected."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {line.pop("test"): line for line in map(json.loads, lines)}


def pytest_configure(config: pytest.Config) -> None:
    """Record this run."""
    config.pluginmanager.register(_Record(Path(os.environ[FILE])))


class _Record:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = read(file)
        self._failed: dict[str, str] = {}
        self._skipped: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect what has passed with the same sources."""
        self._write("", collected=[item.nodeid for item in items])
        done = [item for item in items if self._has_passed(item.nodeid)]
        items[:] = [item for item in items if not self._has_passed(item.nodeid)]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test down once it is torn down."""
        if report.failed:
            self._failed.setdefault(report.nodeid, report.longreprtext)
        if report.skipped:
            self._skipped[report.nodeid] = _reason(report.longrepr)
        if report.when == "teardown":
            why = self._failed.pop(report.nodeid, None)
            skip = self._skipped.pop(report.nodeid, None)
            outcome = "failed" if why is not None else "skipped" if skip is not None else "passed"
            self._write(report.nodeid, outcome=outcome, why=why or skip or "")

    def _has_passed(self, test: str) -> bool:
        before = self._before.get(test, {})
        is_kept = os.environ[KEEP] == "1" or before.get("source") == os.environ[SOURCE]
        return is_kept and before.get("outcome") in ("passed", "skipped")

    def _write(self, test: str, **values: object) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"test": test, "source": os.environ[SOURCE], **values}) + "\n")


def _reason(longrepr: Any) -> str:
    """Return why a test was skipped, without the path and line that pytest puts before it."""
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
