"""Write the verdict for a person: one line for each topology, then the findings and their fixes.

For tests it is an assertion.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from emulate.errors import ByDesignWarning
from emulate.grouping import grouped
from emulate.program import shorten_traceback
from emulate.report.page import DIVERGES, MARKS, PLAIN_WIDTH, STYLES, Page, Span, width_of
from emulate.report.runs import ToldCauses, add_group, add_hint, groups_of, last_line
from emulate.told import number

if TYPE_CHECKING:
    from emulate.program import Program
    from emulate.topology import Topology
    from emulate.verify.verdict import Reference, Run, Samples, Verdict

_RIGHT = {3, 4, 5, 6, 7, 8}
_OF_REPEATS = ("unseeded-randomness", "shared-files")
"""The causes of two runs of the reference that differ."""


def render(verdict: Verdict, width: int = PLAIN_WIDTH) -> str:
    """Return the verdict as plain text, without color and final newline."""
    return _page(verdict, width).plain()


def show(verdict: Verdict, stream: TextIO | None = None) -> None:
    """Print the verdict: with colour on a terminal, plain elsewhere."""
    stream = stream or sys.stdout
    _page(verdict, width_of(stream)).print(stream)


def _page(verdict: Verdict, width: int) -> Page:
    page = Page(width)
    versions = [f"{name} {version}" for name, version in verdict.versions.items()]
    page.line((verdict.program, "bold"))
    page.text(", ".join([f"seed {verdict.seed}", f"on {verdict.device.upper()}", *versions]), style="dim")
    if verdict.reference.against is not None:
        page.text(f"second arm: {verdict.reference.against}", style="dim")
    page.blank()
    _add_table(page, verdict.runs)
    _add_reference(page, verdict.reference, verdict.runs)
    told_causes = ToldCauses()
    for group in groups_of(verdict.runs):
        add_group(page, group, told_causes)
    if warning := by_design_text(verdict):
        page.blank()
        page.labelled("warning", warning, 0, 9, label_style="bold yellow")
    if verdict.notes:
        page.blank()
        for note in verdict.notes:
            page.labelled("note", note, 0, 6, label_style="bold")
    _add_next(page, verdict)
    return page


def _add_table(page: Page, runs: Sequence[Run]) -> None:
    rows = [HEADER, *(cells(run) for run in runs)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADER))]
    for at, row in enumerate(rows):
        style = "dim" if at == 0 else STYLES[runs[at - 1].verdict]
        spans: list[Span] = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            text = cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            spans.append((text if column == 0 else "  " + text, style if at == 0 or column in (0, 2) else ""))
        page.line(*spans)


def _add_reference(page: Page, reference: Reference, runs: Sequence[Run]) -> None:
    if not (text := reference_text(reference, runs)):
        return
    if reference.status == "ok":
        page.text(text, style="yellow")
        return
    page.blank()
    page.text(text, style="bold")
    if failure := reference_failure(reference, runs):
        page.verbatim(shorten_traceback(failure), indent=2)
        add_hint(page, failure)


def reference_failure(reference: Reference, runs: Sequence[Run]) -> str | None:
    """Return how the reference failed, if no run shows the same error."""
    shown = {_without_numbers(last_line(run.failure)) for run in runs if run.failure}
    return reference.failure if _without_numbers(last_line(reference.failure)) not in shown else None


def _without_numbers(error: str) -> str:
    """Return an error without memory addresses, which differ between processes, and without shapes of a batch or its share."""
    return re.sub(r"\b0x[0-9a-f]+\b|\d+", "", error)


def reference_text(reference: Reference, runs: Sequence[Run]) -> str:
    """Return the text about the reference beside the runs; empty if it is in order."""
    if reference.status == "ok" and not reference.repeatable:
        codes = [cause.code for run in runs for cause in run.causes]
        why = next((code for code in codes if code in _OF_REPEATS), _OF_REPEATS[0])
        return f"Two runs of the reference (the program on {reference.topology}) differ: see {why}."
    if reference.status in ("ok", "none"):
        return ""
    words = {"failed": "fails", "hung": "hangs"}.get(reference.status, reference.status)
    too = " too" if any(not run.is_of_reference for run in runs) else ""
    other = ", with another error" if too and reference_failure(reference, runs) else ""
    if reference.against is not None:
        return f"The second arm ({reference.against}) {words}{too}{other}."
    return f"On {reference.where} ({reference.topology}, the reference) the program {words}{too}{other}."


def by_design_text(verdict: Verdict) -> str:
    """Return the warning about topologies whose verdict is `by-design`; empty where there is none."""
    groups = grouped((codes, topology) for topology, codes in verdict.by_design.items())
    differences = "; ".join(f"{', '.join(codes)} on {', '.join(names)}" for codes, names in groups.items())
    return f"The program differs from one device only by design of TensorFlow and Keras: {differences}." if differences else ""


def _add_next(page: Page, verdict: Verdict) -> None:
    causes = [cause for run in verdict.runs for cause in run.causes if not cause.allowed]
    if not causes:
        return
    page.blank()
    page.line(("Next", "bold"), f"  gpudist causes {causes[0].code}", ("  wrong and right code, evidence, fix", "dim"))
    for code in [cause.code for cause in causes if cause.by_design][:1]:
        page.line(f"      gpudist verify --allow {code}", ("  if you accept it", "dim"))
    if verdict.by_design and not verdict.strict:
        page.line("      gpudist verify --strict", ("  if it must fail (exit code 1)", "dim"))


HEADER = ("", "topology", "verdict", "replicas", "steps", "samples", "error", "noise", "seconds")


def cells(run: Run) -> tuple[str, ...]:
    """Return a run in the columns of `HEADER`."""
    worst = run.first_divergence if run.verdict in DIVERGES and run.first_divergence else run.worst
    error = "not finite" if worst and worst.non_finite else number(worst.error) if worst else "-"
    return (
        MARKS[run.verdict],
        run.topology,
        run.verdict,
        str(run.replicas or "-"),
        str(run.steps),
        _samples(run.samples),
        error,
        number(worst.noise) if worst else "-",
        f"{run.seconds:.1f}" if run.seconds else "-",
    )


def _samples(samples: Samples) -> str:
    """Return `960`; `480 of 960` if examples are missing; `960 +12` if some are repeated."""
    if not (samples.seen or samples.reference):
        return "-"
    once = samples.reference - samples.missing
    shown = str(samples.seen) if samples.missing == 0 else f"{once} of {samples.reference}"
    return shown + (f" +{samples.repeated}" if samples.repeated else "")


def assert_equivalent(
    program: str | os.PathLike[str] | Callable[[], Any] | Program,
    topology: str | Topology | Sequence[str | Topology] = "1x4",
    **options: Any,
) -> None:
    """Raise AssertionError with the report unless the program trains the same model on every topology.

    The verdict `by-design` passes with a `ByDesignWarning`; with `strict=True` it fails.

    Args:
        program: As for `emulate.verify`.
        topology: As for `emulate.verify`.
        **options: As for `emulate.verify`.

    Raises:
        AssertionError: With the whole report as its text.

    Example:
        >>> assert_equivalent("train.py", topology="2x2")  # doctest: +SKIP
    """
    from emulate.verify import verify

    check_equivalent(verify(program, topology, **options))


def check_equivalent(verdict: Verdict) -> None:
    """Raise AssertionError with the report unless a verdict passes. Warn if it passes only by design.

    Args:
        verdict: The result of `emulate.verify`.

    Raises:
        AssertionError: With the whole report as its text.
    """
    __tracebackhide__ = True
    if not verdict.is_equivalent:
        raise AssertionError(render(verdict))
    if warning := by_design_text(verdict):
        warnings.warn(f"{warning} strict=True makes it fail.", ByDesignWarning, stacklevel=3)
