"""Fill the template of a page with a verdict, or with a forecast: table, picture, memory, collectives, and what it rests on.

A page needs nothing beside itself. In the report's texts what stands in backticks, and indented lines, are code.
"""

from __future__ import annotations

import base64
import importlib.util
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.errors import UsageError
from emulate.grouping import grouped
from emulate.program import hint_for, shorten_traceback
from emulate.report import plan as plans
from emulate.report.files import write_whole
from emulate.report.page import COLOURS, DIVERGES, clean, is_code, tensor, where
from emulate.report.runs import ToldCauses, facts, groups_of, headline, kind_of, outcome, stacks, texts_of
from emulate.report.terminal import HEADER, by_design_text, cells, reference_failure, reference_text

if TYPE_CHECKING:
    from markupsafe import Markup

    from emulate.plan import Forecast
    from emulate.verify.verdict import Run, Verdict


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
    farthest = [(run, run.first_divergence if run.verdict in DIVERGES else run.worst) for run in verdict.runs]
    return filled(
        "verdict.html.jinja",
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
                "course": _image(pictures.course(run, FACTOR)) if run.course else "",
                "rows": _image(pictures.rows(run)) if run.rows and len(run.rows[0]) > 1 else "",
                "farthest": f"{tensor(worst)} {where(worst)}" if worst is not None else "",
            }
            for run, worst in farthest
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
    evidence = grouped((run.causes[at].evidence, run.topology) for run in runs)
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
        picture=_image(pictures.speed(forecast)) if len(forecast.by_num_gpus()) > 1 else "",
        memory=plans.memory_sentences(forecast),
    )
    write_whole(path, page)


_LIBRARIES = ("jinja2", "matplotlib")


def check_libraries() -> None:
    """Find out before the work starts whether a page can be made.

    Raises:
        UsageError: When a library is not installed.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--html needs {' and '.join(_LIBRARIES)}. Received: {' and '.join(missing)} not installed. "
            'Install them: pip install "gpudist[html]". Or leave --html out: --json needs nothing.'
        )


def filled(template: str, **values: Any) -> str:
    """Return the text of a page; what stands in values is escaped.

    Args:
        template: The name of its file in this folder.
        **values: What it shows.

    Returns:
        HTML.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    return environment.get_template(template).render(marked_up=_marked_up, **values)


def _image(svg: str) -> str:
    """Return an SVG as a data URL, so that names in two pictures do not collide."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


_INLINE_CODE = re.compile(r"`([^`\n]+)`")


def _marked_up(text: str) -> Markup:
    """Return a text as HTML: lines indented by four spaces are code, as is what stands in backticks; the rest is escaped."""
    from markupsafe import Markup, escape

    parts = []
    for code, lines in groupby(clean(text).splitlines(), key=is_code):
        if code:
            block = "\n".join(line[4:] for line in lines)
            parts.append(f"<pre>{escape(block)}</pre>")
        else:
            parts.append(_INLINE_CODE.sub(r"<code>\1</code>", str(escape("\n".join(lines)))))
    return Markup("".join(parts))
