"""Describe the results of the topologies; those with the same findings are described once.

The stack of a hanging host is shortened to the program's frames, with libraries in one line. How a program fared with faults is
a line or two for each.
"""

from __future__ import annotations

import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from emulate.grouping import grouped
from emulate.program import hint_for, shorten_traceback, trim_traceback
from emulate.report.page import STYLES, Page, Span, against_noise, tensor, where
from emulate.told import counted, number, told_apart

if TYPE_CHECKING:
    from emulate.verify.verdict import FaultReport, Finding, Run

_COLUMN = 15
_STACK_LINES = 20
_LOCATIONS = 3
"""So many lines of a cause are shown."""
_AGREES = ("equivalent", "by-design")


def groups_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Return groups of runs with the same verdict and causes."""
    return list(grouped((_key(run), run) for run in runs if run.verdict != "equivalent" or _says_more(run)).values())


def _says_more(run: Run) -> bool:
    ends_early = run.steps_run.stopped or run.non_finite_after is not None
    return bool(run.causes or run.notes or run.not_compared or run.faults or ends_early or run.step_graph)


def _key(run: Run) -> tuple[object, ...]:
    error = last_line(run.failure) if run.verdict == "failed" else None
    alone = run.topology if run.verdict == "hung" else None
    causes = tuple((c.code, c.by_design, c.allowed) for c in run.causes)
    as_far_as = (run.steps_run, run.non_finite_after) if run.verdict in _AGREES else None
    return (run.verdict, run.reason, alone, error, causes, run.faults, as_far_as)


def last_line(failure: str | None) -> str:
    """Return the error line of a traceback; empty without one."""
    return (failure or "").rstrip().rpartition("\n")[2]


def add_group(page: Page, runs: Sequence[Run], told_causes: ToldCauses) -> None:
    """Add the findings of runs that have the same verdict and causes.

    Args:
        page: Where to.
        runs: The runs.
        told_causes: The causes that stand on the page already; those of these runs are added.
    """
    first = runs[0]
    page.blank()
    names = ", ".join(run.topology for run in runs)
    page.line((names, "bold"), "  ", (headline(runs), STYLES[first.verdict]))
    for label, text in facts(runs):
        page.labelled(label, text, 2, max(_COLUMN, len(label) + 4), label_style="dim")
    for at, fault in enumerate(first.faults):
        page.labelled("faults" if at == 0 else "", f"{fault.fault}: {outcome(fault)}", 2, _COLUMN, label_style="dim")
    if first.failure:
        page.blank()
        page.verbatim(shorten_traceback(first.failure), indent=2)
        add_hint(page, first.failure)
    for host, state, text in stacks(first):
        page.blank()
        page.line("  ", (f"host {host}", "bold"), f"  {state}")
        stack = text.splitlines()
        page.verbatim("\n".join(stack[:_STACK_LINES]), indent=4, style="dim")
        if len(stack) > _STACK_LINES:
            page.line(("    ... " + counted(len(stack) - _STACK_LINES, "more line") + " (all of them with --json)", "dim"))
    for at, cause in enumerate(first.causes):
        causes, topologies = [run.causes[at] for run in runs], [run.topology for run in runs]
        if cause.allowed:
            page.line(*_allowed(at, cause, page.width))
        else:
            _add_cause(page, at, causes, topologies, told_causes.before(cause, topologies))
    if first.verdict != "failed":  # of a program that raised nobody asks what was compared
        _add_list(page, "not compared", runs, lambda run: run.not_compared)
    _add_list(page, "notes", runs, lambda run: run.notes)


def headline(runs: Sequence[Run]) -> str:
    """Return a line about runs with the same verdict."""
    run = runs[0]
    if run.verdict == "by-design":
        return f"by-design: only {', '.join(run.deciding)}" + _as_far_as_run(runs, ", ")
    if run.verdict == "divergent":
        if {run.first_divergence.kind for run in runs if run.first_divergence} == {"final-weight"}:
            return "divergent after the last step"
        steps = {run.first_divergence.step for run in runs if run.first_divergence}
        return "divergent" + (f" from step {steps.pop()} on" if len(steps) == 1 else "")
    if run.is_of_reference:
        other = "reference" if run.against is None else "second arm"
        return f"{run.verdict}: the {other} failed; here the program finished, after {counted(run.steps, 'step')}"
    if run.verdict == "hung":
        how = {"hang": "no host could continue", "timeout": "it ran out of time"}.get(run.reason or "", run.reason or "")
        return f"hung: {how}, after {'a fault' if run.faults else counted(run.steps, 'step')}"
    if run.verdict == "failed" and run.faults:
        return "failed: the program did not finish after a fault"
    if run.verdict == "failed":
        how = "raised" if "Traceback" in (run.failure or "Traceback") else "ended"
        return f"failed: the program {how} after {counted(run.steps, 'step')}"
    if run.verdict == "unverified":
        what = "not everything that must agree could be compared" if run.worst is not None else "nothing could be compared"
        return f"unverified: {what}" + (f" ({run.reason})" if run.reason else "")
    if run.verdict == "unavailable":
        return "unavailable: this machine cannot provide it" + (f" ({run.reason})" if run.reason else "")
    return "equivalent" + _as_far_as_run(runs, " ")


def _as_far_as_run(runs: Sequence[Run], joint: str) -> str:
    """Return how far a program was compared: the last batch of an epoch is what goes wrong most often."""
    made, lost = runs[0].steps_run, runs[0].non_finite_after
    non_finite = "" if lost is None else f"; after step {lost} weights are not finite, on one device too"
    if not made.stopped:
        return non_finite
    text = f"{joint}in the first {counted(runs[0].steps, 'step')}{non_finite}"
    if made.epoch_complete is not False:
        return text
    if made.last_batch_examples is None:
        return f"{text}; an epoch has {made.epoch_batches} batches"
    replicas = ", ".join(str(number) for number in sorted({run.replicas for run in runs}))
    examples = counted(made.last_batch_examples, "example")
    return f"{text}; the last batch of an epoch ({examples} on {replicas} replicas) was not run"


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return (label, text) of runs: where they diverge, their ledgers, their steps; with topologies where they differ."""
    return [*_each_text(runs, "first", _first), *_each_text(runs, "samples", _samples), *_each_text(runs, "step", _step)]


def _each_text(runs: Sequence[Run], label: str, of: Callable[[Run], str]) -> Iterator[tuple[str, str]]:
    for text, topologies in grouped((text, run.topology) for run in runs if (text := of(run))).items():
        yield (label if len(topologies) == len(runs) else f"{label} ({', '.join(topologies)})"), text


def _first(run: Run) -> str:
    difference = run.first_divergence
    if difference is None:
        return ""
    other = "reference" if run.against is None else "second arm"
    if difference.kind == "data" and difference.value == difference.reference_value:
        return f"different examples {where(difference)} than in the reference, the same number ({number(difference.value, 6)})"
    values = f": {{}} where the {other} has {{}}".format(*told_apart(difference.value, difference.reference_value))
    shown = "" if difference.value is None and difference.reference_value is None else values
    return f"{tensor(difference)} {where(difference)}{shown} ({against_noise(difference)})"


def _step(run: Run) -> str:
    """Return whether a verdict holds for other numbers of replicas; of one that must change nobody asks that."""
    return run.step_graph.text if run.step_graph and run.verdict in _AGREES else ""


def _samples(run: Run) -> str:
    samples = run.samples
    if not (samples.missing or samples.repeated):
        return ""
    wrong = f"{samples.missing} missing, {samples.repeated} repeated"
    return f"{samples.seen} seen, {samples.reference} in the reference: {wrong}"


def add_hint(page: Page, failure: str) -> None:
    """Add the fix of a failure whose error does not contain it."""
    if hint := hint_for(failure):
        page.blank()
        page.labelled("fix", hint, 2, 7, style="green", label_style="dim")


def stacks(run: Run) -> Iterator[tuple[int, str, str]]:
    """Yield, for each host of a hung run, its number, its last step and collective, and its stack."""
    hosts = run.details.get("hosts", {})
    for host in sorted({*run.stacks, *(int(host) for host in hosts)}):
        state = hosts.get(host) or hosts.get(str(host)) or {}
        parts = [f"last step {state['step']}"] if state.get("step") is not None else []
        parts += [f"last collective {state['collective']}"] if state.get("collective") else []
        yield host, ", ".join(parts), short_stack(run.stacks.get(host, ""))


class ToldCauses:
    """Remember which causes a report has told in full, so that it tells each once."""

    def __init__(self) -> None:
        self._topologies: dict[tuple[str, str], str] = {}

    def before(self, cause: Finding, topologies: Sequence[str]) -> str:
        """Return the topologies where the same cause was told in full; empty where it is told now for the first time."""
        key = (cause.code, cause.fix)
        earlier = self._topologies.get(key, "")
        self._topologies.setdefault(key, ", ".join(topologies))
        return earlier


def _allowed(at: int, cause: Finding, width: int) -> tuple[Span | str, ...]:
    """Return one line about a cause that the user expects."""
    head = f"{at + 1}. {cause.code}"
    rest = width - len(head) - len("   (allowed)  ")
    return (
        "  ",
        (head, "bold"),
        (" (allowed)", "yellow"),
        "  " + textwrap.shorten(cause.summary, max(rest, 8), placeholder=" ..."),
    )


def _add_cause(page: Page, at: int, causes: Sequence[Finding], topologies: Sequence[str], before: str) -> None:
    cause = causes[0]
    page.blank()
    see = (f"  as on {before}, see above" if before else "", "dim")
    page.line("  ", (f"{at + 1}. {cause.code}", "bold"), (f" ({kind})" if (kind := kind_of(cause)) else "", "yellow"), see)
    by_summary = grouped((other.summary, topology) for other, topology in zip(causes, topologies, strict=True))
    for summary, those in by_summary.items():
        page.text(f"On {', '.join(those)}: {summary}" if len(by_summary) > 1 else summary, indent=5)
    # The lines to blame as compilers show them: the place, then the line of the source.
    for location in cause.locations[:_LOCATIONS]:
        stage = (f"  ({cause.stage})", "dim") if cause.stage and location is cause.locations[0] else ""
        page.line("     ", ("--> ", "dim"), (location.place, "bold cyan"), stage)
        page.line("       ", (" | ", "dim"), _cut(location.text, max(page.width - 10, 20)))
    if (more := len(cause.locations) - _LOCATIONS) > 0:
        page.line((f"         ... {counted(more, 'more line')} (--json)", "dim"))
    if before:
        return
    differ = len({other.evidence for other in causes}) > 1
    if cause.evidence:
        label = f"evidence ({topologies[0]})" if differ else "evidence"
        page.labelled(label, cause.evidence, 5, max(_COLUMN, len(label) + 7), label_style="dim")
    if cause.fix:
        page.labelled("fix", cause.fix, 5, _COLUMN, style="green", label_style="dim")
    page.labelled("more", cause.url, 5, _COLUMN, label_style="dim")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def kind_of(cause: Finding) -> str:
    """Return why a cause does not decide, or may not; empty for an ordinary one."""
    return "allowed" if cause.allowed else "advice" if cause.advice else "by design" if cause.by_design else ""


def texts_of(runs: Sequence[Run], of: Callable[[Run], Sequence[str]]) -> list[str]:
    """Return what runs say, each text once, with the topologies if not all say it."""
    texts = []
    for text in dict.fromkeys(text for run in runs for text in of(run)):
        having = [run.topology for run in runs if text in of(run)]
        texts.append(text if len(having) == len(runs) else f"{', '.join(having)}: {text}")
    return texts


def _add_list(page: Page, title: str, runs: Sequence[Run], of: Callable[[Run], Sequence[str]]) -> None:
    texts = texts_of(runs, of)
    if not texts:
        return
    page.blank()
    page.line("  ", (title, "dim"))
    for text in texts:
        page.labelled("-", text, 5, 7)


def outcome(fault: FaultReport) -> str:
    """Return the result of one fault: `recovered after 1 restart, resumed after 6 steps, the same result bit for bit`."""
    if not fault.fired:
        return "did not happen"
    where = f"in step {fault.step} (counted from 1), " if fault.step else ""
    if not fault.recovered:
        return f"{where}not recovered{_after(fault)}"
    results = {
        "identical": "the same result bit for bit",
        "within-noise": f"the same result within rounding ({number(fault.error)})",
        "different": f"a different result (largest difference {number(fault.error)})"
        if fault.error
        else "a different number of steps",
        None: "nothing could be compared",
    }
    if fault.fault.startswith("preempt:") and not fault.restarts:
        has_left = fault.result == "different" and not fault.error
        if has_left:
            how = "received SIGTERM and ended with exit code 0, so gpudist did not restart it"
        else:
            how = "received SIGTERM, but ran to its end before SIGKILL, so its recovery was not tested"
        return f"{where}{how}, {results[fault.result]}"
    return f"{where}recovered{_after(fault)}, {results[fault.result]}"


def _after(fault: FaultReport) -> str:
    if not fault.restarts:
        return " without a restart"
    times = counted(fault.restarts, "restart")
    if not fault.went_on_from:
        return f" after {times}"
    made = fault.went_on_from[-1]
    where = f"after {counted(made, 'step')}" if made else "from the beginning"
    return f" after {times}, resumed {where}"


_FRAME = re.compile(r'(?P<indent>\s*)File "(?P<file>[^"]+)", line \d+')
_LIBRARIES = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib", "stdlib", "platstdlib")})


@dataclass
class _StackPart:
    """Hold a frame with the text below it, or a line that is no frame."""

    lines: list[str]
    library: str | None = None
    is_frame: bool = False
    indent: int = 0


def short_stack(text: str) -> str:
    """Return a stack from faulthandler or traceback without frames of gpudist, with library frames only counted."""
    parts = list(_parts(trim_traceback(text)))
    if not any(part.is_frame for part in parts):
        return "(outside the program: it has ended, or has not begun)" if _FRAME.search(text) else text
    lines: list[str] = []
    has_frame_below = [part.is_frame for part in parts[1:]] + [False]
    shown = [part for part, below in zip(parts, has_frame_below, strict=True) if part.is_frame or below]
    for is_library, group in groupby(shown, key=lambda part: part.library is not None):
        run = list(group)
        lines += [_counted(run)] if is_library else [line for part in run for line in part.lines]
    return "\n".join(lines)


def _parts(text: str) -> Iterator[_StackPart]:
    current: _StackPart | None = None
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match:
            if current:
                yield current
            current = _StackPart([line], _library(match["file"]), True, len(match["indent"]))
        elif current and current.is_frame and line.strip() and len(line) - len(line.lstrip()) > current.indent:
            current.lines.append(line)
        elif line.strip():
            if current:
                yield current
            current = _StackPart([line])
    if current:
        yield current


def _library(file: str) -> str | None:
    """Return the name of the installed package of a file; None for the user's own."""
    for folder in sorted(_LIBRARIES, key=len, reverse=True):
        if file.startswith(folder):
            return file[len(folder) :].split("/")[0].removesuffix(".py")
    return "python" if file.startswith("<frozen") else None


def _counted(run: list[_StackPart]) -> str:
    names = ", ".join(dict.fromkeys(part.library or "" for part in run))
    return " " * run[0].indent + f"... {counted(len(run), 'frame')} of {names}"
