"""Merge the reports of all hosts to those of one test, and make the controller's own reports."""

from __future__ import annotations

import copy
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from emulate.cluster.restarts import telling
from emulate.grouping import grouped
from emulate.program import shorten_traceback
from emulate.pytest_plugin import upstream

if TYPE_CHECKING:
    from emulate.cluster import HostResult

_MACHINERY = re.compile(r'  File "[^"]*/(_pytest|pluggy|unittest)/')
_OURS = re.compile(_MACHINERY.pattern + r'|  File "[^"]*/emulate/|  File "<string>|Extension modules:')
PHASES = ("setup", "call", "teardown")
_WORDS = {"setup": "setting the test up", "call": "running the test", "teardown": "tearing the test down"}


_Failure = tuple[list[str], Any, str]
"""Names of hosts, what is shown of their failure, and its message."""


@dataclass
class HostRun:
    """Describe one test on one host.

    Attributes:
        host: The host's number.
        name: What messages call it.
        reports: What its pytest reported of the phases.
        result: How its job ended.
        captured: For a host that was not done: what its pytest had captured of the phase it was in.
        subtests: What its pytest reported of subtests.
        phases: What a test consists of; no call with `--setup-only`.
    """

    host: int
    name: str
    reports: list[pytest.TestReport]
    result: HostResult
    captured: list[tuple[str, str]] = field(default_factory=list)
    subtests: list[pytest.TestReport] = field(default_factory=list)
    phases: tuple[str, ...] = PHASES

    def report(self, phase: str) -> pytest.TestReport | None:
        """Return its report of a phase."""
        return next((report for report in self.reports if report.when == phase), None)

    @property
    def is_passed(self) -> bool:
        """Return whether nothing failed here."""
        return self.result.status == "returned" and all(report.passed for report in [*self.reports, *self.subtests])

    @property
    def is_cause(self) -> bool:
        """Return whether the other hosts were ended because of this one."""
        return any(map(has_raised, self.reports)) or (self.unfinished is not None and self.result.status != "ended")

    @property
    def unfinished(self) -> str | None:
        """Return the phase in which the host left or was ended; None if it finished."""
        if self.result.status == "returned":
            return None
        reported = {report.when for report in self.reports}
        if self.reports and self.reports[0].when == "setup" and not self.reports[0].passed:
            reported.add("call")
        return next((phase for phase in self.phases if phase not in reported), None)


def has_raised(report: pytest.TestReport) -> bool:
    """Return whether the test raised on its host, expected or not."""
    return report.failed or (report.skipped and hasattr(report, "wasxfail"))


def merge(
    item: pytest.Item, runs: list[HostRun], deadline: float, patience: float, started: float | None = None
) -> list[pytest.TestReport]:
    """Return one report for each phase, and for each subtest.

    Args:
        item: The test.
        runs: How it went on each host.
        deadline: The seconds it had.
        patience: The seconds that a host may wait for one that is done with it.
        started: When it was begun, by `time.time`; now unless given.

    Returns:
        Reports of setup, of the subtests and the call (unless the setup failed or is all that is wanted), and of the teardown.
    """
    merger = _Merger(item, runs, deadline, patience, time.time() if started is None else started)
    reports = [merger.phase("setup")]
    if reports[0].passed and "call" in runs[0].phases:
        subtests, call = merger.subtests(), merger.phase("call")
        failed = sum(subtest.failed for subtest in subtests)
        if failed and call.passed:
            call.outcome, call.longrepr = "failed", f"contains {failed} failed subtest{'s' if failed > 1 else ''}"
        reports += [*subtests, call]
    return [*reports, merger.phase("teardown")]


def interrupted(item: pytest.Item, stacks: dict[str, str]) -> str:
    """Return the text about a test that the user interrupted.

    Args:
        item: The test.
        stacks: Where each of its hosts was, by name.

    Returns:
        Lines of text.
    """
    lines = [f"{name} of {item.nodeid} was in\n{_without_machinery(stack)}" for name, stack in stacks.items()]
    return "\n".join(lines) or f"{item.nodeid} had no hosts yet."


class _Merger:
    def __init__(self, item: pytest.Item, runs: list[HostRun], deadline: float, patience: float, started: float) -> None:
        self._since = started
        self._item = item
        self._runs = runs
        self._deadline = deadline
        self._patience = patience
        self._has_failed = False
        self._has_cause = any(run.is_cause for run in runs)
        self._told: list[HostRun] = []

    def phase(self, phase: str) -> pytest.TestReport:
        """Return the report of one phase."""
        reports = [(run, report) for run in self._runs if (report := run.report(phase)) is not None]
        merged = self._whole(phase, [report for _, report in reports])
        failing = [(run, report) for run, report in reports if report.failed]
        broken = [] if self._has_failed else [run for run in self._runs if run.unfinished == phase]
        if self._has_cause:  # what was ended because of another host has done nothing
            broken = [run for run in broken if run.result.status != "ended"]
        if failing or broken:
            groups = self._groups(phase, failing, broken)
            self._tell(merged, groups, self._rest(phase, [name for names, _, _ in groups for name in names]))
        elif reports:
            self._agree(merged, reports)
        self._has_failed |= merged.failed
        if broken:
            merged.start, merged.stop = self._since, time.time()
            merged.duration = merged.stop - merged.start
        self._since = merged.stop
        written = [(run.name, title, text) for run, report in reports for title, text in report.sections]
        if self._has_failed:
            silent = [run for run in self._runs if run.unfinished is not None and run not in self._told]
            self._told += silent
            written += [(run.name, f"{title} {run.unfinished}", text) for run in silent for title, text in run.captured]
        merged.sections = _shared_sections(written, len(self._runs))
        return merged

    def subtests(self) -> list[pytest.TestReport]:
        """Return the reports of the subtests. A repeated one gets a number."""
        groups: dict[tuple[str | None, int], list[tuple[HostRun, pytest.TestReport]]] = {}
        for run in self._runs:
            counts: Counter[str | None] = Counter()
            for report in run.subtests:
                name = upstream.subtest_name(report)
                groups.setdefault((name, counts[name]), []).append((run, report))
                counts[name] += 1
        return [self._subtest(reports) for reports in groups.values()]

    def _subtest(self, reports: list[tuple[HostRun, pytest.TestReport]]) -> pytest.TestReport:
        merged = copy.copy(reports[0][1])
        merged.nodeid, merged.location = self._item.nodeid, self._item.location
        failing = [(run, report) for run, report in reports if report.failed]
        if failing:
            groups = _by_failure([(run, report.longrepr) for run, report in failing])
            others = [pair for pair in reports if pair not in failing]
            self._tell(merged, groups, _joined(others))
        else:
            self._agree(merged, reports)
        written = [(run.name, title, text) for run, report in reports for title, text in report.sections]
        merged.sections = _shared_sections(written, len(self._runs))
        return merged

    def _whole(self, phase: str, reports: list[pytest.TestReport]) -> pytest.TestReport:
        """Return the phase as passed, with the duration of its slowest host."""
        merged = _empty(self._item, phase)
        if not reports:
            return merged
        merged.__dict__.update({k: v for k, v in reports[0].__dict__.items() if k not in merged.__dict__ and k != "wasxfail"})
        merged.keywords = dict(reports[0].keywords)
        merged.duration = max(report.duration for report in reports)
        merged.start = min(report.start for report in reports)
        merged.stop = max(report.stop for report in reports)
        merged.user_properties = _shared_properties(self._runs, reports)
        return merged

    def _agree(self, merged: pytest.TestReport, reports: list[tuple[HostRun, pytest.TestReport]]) -> None:
        """Check that all hosts passed, or all skipped, or all failed as expected; otherwise report that as the failure."""
        kinds = {_kind(report) for _, report in reports}
        first = reports[0][1]
        if len(kinds) == 1 and first.outcome in ("passed", "skipped"):
            merged.outcome, merged.longrepr = first.outcome, first.longrepr
            if hasattr(first, "wasxfail"):
                merged.wasxfail = first.wasxfail
            return
        said = _joined(reports)
        text = (
            f"All hosts of a test must agree on what becomes of it: passed, skipped or failed. Received: {said}. "
            "Skip, or expect a failure, on every host."
        )
        self._set_failed(merged, "", upstream.failure(text, *self._place(), text))

    def _tell(self, merged: pytest.TestReport, groups: list[_Failure], rest: str) -> None:
        names, longrepr, message = groups[0]
        on = _names(names, len(self._runs))
        if not hasattr(longrepr, "addsection"):
            longrepr = upstream.failure(str(longrepr), *self._place(), message)
        if longrepr.reprcrash is not None and len(self._runs) > 1:
            longrepr.reprcrash.message = f"{on}: {longrepr.reprcrash.message}"
        for others, text, _ in groups[1:]:
            longrepr.addsection(f"{_names(others, len(self._runs))}, otherwise", str(text).strip("\n"), "-")
        if rest:
            longrepr.addsection("the other hosts", rest, "-")
        self._set_failed(merged, f"on {on}" if len(self._runs) > 1 else "", longrepr)

    def _set_failed(self, merged: pytest.TestReport, where: str, longrepr: Any) -> None:
        path, line, name = merged.location
        merged.location = (path, line, f"{name} {where}".rstrip())
        merged.outcome, merged.longrepr = "failed", longrepr

    def _groups(self, phase: str, failing: list[tuple[HostRun, pytest.TestReport]], broken: list[HostRun]) -> list[_Failure]:
        """Return the groups of failures: hosts that left by themselves first, then who failed first."""
        left = [run for run in broken if run.result.status not in ("ended", "timeout")]
        late = [run for run in broken if run.result.status == "timeout"]
        ended = [run for run in broken if run.result.status == "ended"]
        shown: list[tuple[HostRun, Any]] = [(run, self._left(run, phase)) for run in left]
        shown += [(run, report.longrepr) for run, report in sorted(failing, key=lambda pair: pair[1].stop)]
        shown += [(run, self._left(run, phase)) for run in (*late, *ended)]
        return _by_failure(shown)

    def _left(self, run: HostRun, phase: str) -> str:
        """Return how a host ended that did not report."""
        status, code, while_ = run.result.status, run.result.code, _WORDS[phase]
        stack = _without_machinery(run.result.stack)
        if status == "killed":
            number = -(code or 0)
            names = {int(known): f" ({known.name})" for known in signal.Signals}
            text = f"The host was killed by signal {number}{names.get(number, '')} while {while_}."
            text += f" It was in\n{stack}" if run.result.stack else ""
        elif status == "exited":
            text = f"The host's process left with exit code {code} while {while_}."
        elif status == "raised" and run.result.error is not None:
            error = run.result.error
            text = error.message if error.kind.endswith("UsageError") else shorten_traceback(error.traceback_text)
        elif status == "waiting":
            done = [other.name for other in self._runs if other.result.status == "returned"]
            text = (
                f"The host has done nothing for {self._patience:g} s while {while_}: it waits for "
                f"{_names(done, len(self._runs))}, done with the test already, in\n{stack}\n"
                "Every host of a test runs the same collectives, in no branch that some do not take."
            )
        elif status == "timeout":
            text = f"The host did not finish {while_} within {self._deadline:g} s; it was in\n{stack}"
        else:
            text = f"The host was ended while {while_}, because another one had failed; it was in\n{stack}"
        said = _last_lines(run.result.output)
        return text + (f"\nIts last output:\n{said}" if said else "")

    def _rest(self, phase: str, involved: list[str]) -> str:
        """Return what the other hosts did."""
        lines: dict[str, list[str]] = {}
        for run in self._runs:
            if run.name in involved:
                continue
            report, doing = run.report(phase), "did nothing"
            if run.unfinished is not None:
                doing = f"did not finish {_WORDS[run.unfinished]}; it was ended inside\n{_without_machinery(run.result.stack)}"
            elif report is not None:
                doing = f"{_kind(report)}{_reason(report)}"
            lines.setdefault(doing, []).append(run.name)
        return "\n".join(f"{_names(names, len(self._runs))} {text}" for text, names in lines.items())

    def _place(self) -> tuple[str, int]:
        return self._item.location[0], (self._item.location[1] or 0) + 1


def _by_failure(shown: list[tuple[HostRun, Any]]) -> list[_Failure]:
    """Group hosts with the same failure."""
    failures: dict[str, _Failure] = {}
    for run, longrepr in shown:
        message = getattr(getattr(longrepr, "reprcrash", None), "message", None)
        if not message:
            lines = str(longrepr).strip().splitlines()
            message = lines[-1 if lines[0].startswith("Traceback ") else 0]
        # Without what differs between processes.
        key = re.sub(r"0x[0-9a-f]+|[\w-]+-host\d+-\w+|\bhost[- ]\d+|task:\d+", "*", str(longrepr))
        failures.setdefault(key, ([], longrepr, message))[0].append(run.name)
    return list(failures.values())


def _empty(item: pytest.Item, phase: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "passed", None, phase)  # type: ignore[arg-type]


def _kind(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "failed as expected" if report.skipped else "passed unexpectedly"
    return report.outcome


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return f" ({report.longrepr[2].removeprefix('Skipped: ')})"
    return ""


def _joined(reports: list[tuple[HostRun, pytest.TestReport]]) -> str:
    """Return what became of a test on which hosts."""
    said = grouped((f"{_kind(report)}{_reason(report)}", run.name) for run, report in reports)
    return ", ".join(f"{text} on {_names(names, len(reports))}" for text, names in said.items())


def _names(names: list[str], number: int) -> str:
    """Return `host 1`, `hosts 0 and 2` or `all 4 hosts`."""
    if len(names) == number and number > 1:
        return f"all {number} hosts"
    if len(names) == 1:
        return names[0]
    short = [name.removeprefix("host ") for name in names]
    return f"hosts {', '.join(short[:-1])} and {short[-1]}"


def _without_machinery(stack: str) -> str:
    frames = re.split(r"\n(?=  File )", stack.rstrip("\n"))
    shown = [frame for frame in frames if not _MACHINERY.match(frame)]
    return "\n".join(shown or frames) or "  (unknown)"


def _last_lines(output: str) -> str:
    """Return the end of a host's output, without TensorFlow's routine messages; of Python's crash dump the start."""
    at = output.find("Fatal Python error:")
    if at >= 0:
        return "\n".join([line for line in telling(output[at:], len(output)) if not _OURS.match(line)][:20])
    return "\n".join(telling(output))


def _shared_sections(written: list[tuple[str, str, str]], number: int) -> list[tuple[str, str]]:
    """Return the hosts' output, the same text once."""
    writers = grouped(((title, text), name) for name, title, text in written)
    if number == 1:
        return list(writers)
    return [(f"{title} on {_names(names, number)}", text) for (title, text), names in writers.items()]


def _shared_properties(runs: list[HostRun], reports: list[pytest.TestReport]) -> list[tuple[str, object]]:
    """Return what tests record: once if all hosts record the same, else under the host's name."""
    recorded = grouped(pair for report in reports for pair in report.user_properties)
    merged: list[tuple[str, object]] = []
    for name, values in recorded.items():
        if all(value == values[0] for value in values):
            merged.append((name, values[0]))
        else:
            merged += [(f"{name} (host {number})", value) for number, value in enumerate(values)]
    return merged


Properties = list[tuple[str, object]]


def setup_reports(
    item: pytest.Item, outcome: str, started: float, message: str, properties: Properties
) -> list[pytest.TestReport]:
    """Return the reports of a test that could not run here (`skipped`), or has a usage error (`failed`)."""
    path, line = item.location[0], item.location[1] or 0
    is_skipped = outcome == "skipped"
    longrepr = (path, line, f"Skipped: {message}") if is_skipped else upstream.failure(message, path, line, message)
    setup = _report(item, "setup", outcome, started, longrepr)
    return finished([setup, _report(item, "teardown", "passed", time.time())], properties)


def finished(reports: list[pytest.TestReport], properties: Properties, note: str = "") -> list[pytest.TestReport]:
    """Return the reports of a test with its notes."""
    for report in reports:
        report.user_properties = [*report.user_properties, *properties]
        if note:
            report.sections.append(("gpudist", note))
    return reports


def verdict_of(reports: list[pytest.TestReport]) -> str:
    """Return `failed`, `skipped` or `passed`; an expected failure has passed."""
    if any(report.failed for report in reports):
        return "failed"
    return "skipped" if any(report.skipped and not hasattr(report, "wasxfail") for report in reports) else "passed"


def _report(item: pytest.Item, when: str, outcome: str, started: float, longrepr: object = None) -> pytest.TestReport:
    now = time.time()
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=longrepr,  # type: ignore[arg-type]
        when=when,  # type: ignore[arg-type]
        duration=now - started,
        start=started,
        stop=now,
        user_properties=list(item.user_properties),
    )
