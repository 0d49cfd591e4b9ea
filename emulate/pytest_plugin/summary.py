"""Report how many tests ran where, and fail a strict run that was not on real devices."""

from __future__ import annotations

import html
from collections import Counter

import pytest

from emulate.pytest_plugin.options import DEVICE, EMULATED, NO_DEVICE, NOTE, REASON, TOPOLOGY, VERDICT, PluginSettings

_SHOWN = 3
_COLUMN = 2  # of pytest-html's table, after the test's name


class Summary:
    """Count the tests with a topology as their reports arrive.

    Args:
        settings: What the user asked for.
    """

    def __init__(self, settings: PluginSettings) -> None:
        self._strict = settings.strict
        self._tests: dict[str, dict[str, str]] = {}
        self._skipped_files: list[str] = []
        self._notes: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of a test."""
        if report.user_properties:
            self._notes.update({str(value): None for name, value in report.user_properties if name == NOTE})
            properties = {name: str(value) for name, value in report.user_properties if name.startswith("gpudist_")}
            if properties:
                self._tests.setdefault(report.nodeid, {}).update(properties)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that skips itself: it may hold tests with topologies."""
        if report.skipped:
            self._skipped_files.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a strict run if something was skipped or emulated."""
        passing = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._strict and self._objections() and session.exitstatus in passing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the line at the end."""
        if self._tests:
            terminalreporter.write_line(f"gpudist: {self._line()}")
        for note in self._notes:
            terminalreporter.write_line(f"gpudist: {note}")
        if self._strict and self._objections():
            terminalreporter.write_line(
                f"gpudist: --gpudist-strict: the run fails, because {'; '.join(self._objections())}.", red=True
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_header(self, cells: list[str]) -> None:
        """Add a column to the table of pytest-html."""
        cells.insert(_COLUMN, '<th class="sortable" data-column-type="topology">Topology</th>')

    @pytest.hookimpl(optionalhook=True)
    def pytest_html_results_table_row(self, report: pytest.TestReport, cells: list[str]) -> None:
        """Add topology, device and verdict of a test to the table of pytest-html."""
        properties = {name: str(value) for name, value in getattr(report, "user_properties", ())}
        shown = ", ".join(properties[name] for name in (TOPOLOGY, DEVICE, VERDICT) if name in properties)
        cells.insert(_COLUMN, f'<td class="col-topology">{html.escape(shown)}</td>')

    def _line(self) -> str:
        tests = list(self._tests.values())
        ran = [test for test in tests if test.get(DEVICE) not in (NO_DEVICE, None) and test.get(VERDICT) != "skipped"]
        parts = [
            self._count("ran on emulated devices", [test for test in ran if test[DEVICE] == EMULATED]),
            self._count("on real devices", [test for test in ran if test[DEVICE] != EMULATED]),
        ]
        if lacking := [test for test in tests if test.get(DEVICE) == NO_DEVICE]:
            reasons = Counter(test.get(REASON, "") for test in lacking)
            shown = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(_SHOWN))
            parts.append(f"{self._count('skipped for lack of devices', lacking)}: {shown}")
        if left := [test for test in tests if test.get(VERDICT) == "skipped" and test.get(DEVICE) != NO_DEVICE]:
            parts.append(self._count("skipped by themselves", left))
        if others := [test for test in tests if DEVICE not in test and test.get(VERDICT) == "passed"]:
            parts.append(self._count("beside all devices", others))
        return ", ".join(parts)

    def _count(self, what: str, tests: list[dict[str, str]]) -> str:
        shapes = Counter(test[TOPOLOGY] for test in tests if TOPOLOGY in test)
        shown = ", ".join(f"{shape}: {count}" for shape, count in sorted(shapes.items()))
        noun = "" if not what.startswith("ran") else " test" if len(tests) == 1 else " tests"
        return f"{len(tests)}{noun} {what}" + (f" ({shown})" if shown else "")

    def _objections(self) -> list[str]:
        skipped = [name for name, test in self._tests.items() if test.get(VERDICT) == "skipped"]
        emulated = [name for name, test in self._tests.items() if test.get(DEVICE) == EMULATED and name not in skipped]
        objections = []
        for names, what in (
            (skipped, "skipped"),
            (emulated, "ran on emulated devices"),
            (self._skipped_files, "skipped as a file"),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                objections.append(f"{what}: {', '.join(names[:_SHOWN])}{more}")
        return objections
