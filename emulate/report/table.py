"""Build the cells of the report's table: one line for each topology."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emulate.digits import number
from emulate.report.words import DIVERGES, MARKS

if TYPE_CHECKING:
    from emulate.verify.verdict import Run, Samples

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
