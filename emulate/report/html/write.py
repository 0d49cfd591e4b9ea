"""Fill the template of a page with a verdict, or with a forecast: table, picture, memory, collectives, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.program import hint_for, shorten_traceback
from emulate.report import plan as plans
from emulate.report.files import write_whole
from emulate.report.html.template import check_libraries, filled, image
from emulate.report.page import COLOURS, DIVERGES, tensor, where
from emulate.report.runs import ToldCauses, facts, groups_of, headline, kind_of, outcome, stacks, texts_of
from emulate.report.terminal import HEADER, by_design_text, cells, reference_failure, reference_text

if TYPE_CHECKING:
    from emulate.plan import Forecast
    from emulate.verify.verdict import Difference, Run, Verdict

_TEMPLATE = "verdict.html.jinja"


def write_html(verdict: Verdict, path: Path) -> None:
    """Write the verdict as a page; a reader of the file sees all of it or nothing.

    Args:
        verdict: What `verify` returned.
        path: The file.

    Raises:
        UsageError: When a library that makes it is not installed.
    """
    check_libraries()
    write_whole(path, page_of(verdict))


def page_of(verdict: Verdict) -> str:
    """Return the page's text."""
    from emulate.report.html import pictures
    from emulate.verify import FACTOR

    told_causes = ToldCauses()
    # What decides comes first, in the order of the exit codes.
    decides = ("failed", "hung", "divergent", "unverified", "unavailable", "by-design", "equivalent")
    verdicts = {run.verdict for run in verdict.runs}
    return filled(
        _TEMPLATE,
        verdict=verdict,
        overall=next((word for word in decides if word in verdicts), "unverified"),
        colours=COLOURS,
        diverges=DIVERGES,
        header=HEADER,
        rows=[(run, cells(run)) for run in verdict.runs],
        warning=by_design_text(verdict),
        reference=reference_text(verdict.reference, verdict.runs),
        reference_failure=reference_failure(verdict.reference, verdict.runs),
        hint_for=hint_for,
        shorten_traceback=shorten_traceback,
        least=f"{pictures.LEAST:g}",
        groups=[_group(runs, told_causes) for runs in groups_of(verdict.runs)],
        pictures=[
            {
                "run": run,
                "course": image(pictures.course(run, FACTOR)) if run.course else "",
                "rows": image(pictures.rows(run)) if run.rows and len(run.rows[0]) > 1 else "",
                "farthest": _farthest(run),
            }
            for run in verdict.runs
            if run.course or run.rows
        ],
    )


def _group(runs: Sequence[Run], told_causes: ToldCauses) -> dict[str, Any]:
    first = runs[0]
    return {
        "topologies": ", ".join(run.topology for run in runs),
        "verdict": first.verdict,
        "headline": headline(runs),
        "facts": facts(runs),
        "faults": [(fault.fault, outcome(fault)) for fault in first.faults],
        "failure": first.failure,
        "stacks": list(stacks(first)),
        "causes": [_cause(runs, at, told_causes) for at in range(len(first.causes))],
        "not_compared": texts_of(runs, lambda run: run.not_compared) if first.verdict != "failed" else [],
        "notes": texts_of(runs, lambda run: run.notes),
    }


def _cause(runs: Sequence[Run], at: int, told_causes: ToldCauses) -> dict[str, Any]:
    """Return a cause with the evidence of each topology."""
    first = runs[0].causes[at]
    evidence: dict[str, list[str]] = {}
    for run in runs:
        evidence.setdefault(run.causes[at].evidence, []).append(run.topology)
    return {
        "code": first.code,
        "url": first.url,
        "kind": kind_of(first),
        "before": told_causes.before(first, [run.topology for run in runs]) if not first.allowed else "",
        "is_allowed": first.allowed,
        "summary": first.summary,
        "stage": first.stage,
        "locations": [(location.place, location.text) for location in first.locations],
        "fix": first.fix,
        "evidence": [("" if len(evidence) == 1 else ", ".join(names), text) for text, names in evidence.items() if text],
    }


def _farthest(run: Run) -> str:
    worst: Difference | None = run.first_divergence if run.verdict in DIVERGES else run.worst
    return "" if worst is None else f"{tensor(worst)} {where(worst)}"


def write_plan_html(forecast: Forecast, path: Path) -> None:
    """Write a forecast as a page; a reader of the file sees all of it or nothing.

    Args:
        forecast: What `make_forecast` returned.
        path: The file.

    Raises:
        UsageError: When a library that makes it is not installed.
    """
    check_libraries()
    from emulate.report.html import pictures

    page = filled(
        "plan.html.jinja",
        forecast=forecast,
        step=plans.about_step(forecast),
        header=plans.HEADER,
        limit_column=plans.LIMIT_COLUMN + 1,
        rows=[(row, plans.cells(row)) for row in forecast.rows],
        price=plans.about_price(forecast),
        input_warning=plans.input_warning(forecast),
        picture=image(pictures.speed(forecast)) if len(forecast.by_num_gpus()) > 1 else "",
        memory=plans.memory_sentences(forecast),
    )
    write_whole(path, page)
