"""Write the verdict for a person: one line for each topology, then the findings and their fixes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from emulate.program import shorten_traceback
from emulate.report.page import PLAIN_WIDTH, Page, Span, width_of
from emulate.report.runs import ToldCauses, add_group, add_hint, groups_of, last_line
from emulate.report.table import HEADER, cells
from emulate.report.words import STYLES

if TYPE_CHECKING:
    from emulate.verify.verdict import Reference, Run, Verdict

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
    _add_head(page, verdict)
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


def _add_head(page: Page, verdict: Verdict) -> None:
    versions = [f"{name} {version}" for name, version in verdict.versions.items()]
    page.line((verdict.program, "bold"))
    page.text(", ".join([f"seed {verdict.seed}", f"on {verdict.device.upper()}", *versions]), style="dim")
    page.blank()


def _add_table(page: Page, runs: Sequence[Run]) -> None:
    rows = [HEADER, *(cells(run) for run in runs)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADER))]
    for at, row in enumerate(rows):
        style = "dim" if at == 0 else STYLES[runs[at - 1].verdict]
        page.line(*_aligned(row, widths, style, at == 0))


def _aligned(row: Sequence[str], widths: Sequence[int], style: str, whole: bool) -> Iterable[Span]:
    for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
        text = cell.rjust(width) if at in _RIGHT else cell.ljust(width)
        yield (text if at == 0 else "  " + text, style if whole or at in (0, 2) else "")


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
    shown = {_without_addresses(last_line(run.failure)) for run in runs if run.failure}
    return reference.failure if _without_addresses(last_line(reference.failure)) not in shown else None


def _without_addresses(error: str) -> str:
    """Return an error without memory addresses, which differ between processes."""
    return re.sub(r"\b0x[0-9a-f]+\b", "", error)


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
    return f"On {reference.where} ({reference.topology}, the reference) the program {words}{too}{other}."


def by_design_text(verdict: Verdict) -> str:
    """Return the warning about topologies whose verdict is `by-design`; empty where there is none."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for topology, codes in verdict.by_design.items():
        groups.setdefault(codes, []).append(topology)
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
