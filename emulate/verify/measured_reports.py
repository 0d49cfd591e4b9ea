"""Measure the numbers that a program reports by itself: losses, metrics, logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from emulate.probe.trace import Report
from emulate.verify.arrays import eps_of
from emulate.verify.compared_runs import Runs, as_many_steps
from emulate.verify.measure import Measure, coarsest_unit, measure
from emulate.verify.noise import Key
from emulate.verify.reported import of_other_batches, reported, reported_by_batch


def reports(runs: Runs) -> Iterator[Measure]:
    """Yield the measures of all reports that both runs made."""
    by_batch = reported_by_batch(runs)
    ours = reported(runs.topology.reports, {name: (counts[0], how) for name, (counts, how) in by_batch.items()})
    beside_it = {name: (counts[1], how) for name, (counts, how) in by_batch.items()}
    theirs = reported(runs.reference.reports, beside_it)
    others = [reported(trace.reports, beside_it) for trace in (*runs.noise, *runs.reported, *runs.confirmation)]
    precision = max(
        (coarsest_unit(runs, theirs_) for name in runs.optimizers for _, theirs_ in runs.pairs(name)[:1]), default=eps_of("<f4")
    )
    last = max((len(runs.pairs(name)) for name in runs.optimizers), default=1) - 1
    often = Counter((host, kind, name) for host, kind, name, _, _ in ours)
    unlike = {*of_other_steps(runs), *of_other_batches(runs)}
    for place, report in ours.items():
        there = (0, *place[1:])
        if there not in theirs or report.name in unlike:
            continue
        # A run without this report adds nothing to the floor, and the others stay what they are: noise or confirmation.
        is_made = any(there in values for values in others)
        beside = [np.array([values.get(there, theirs[there]).value]) for values in others] if is_made else []
        many = len(runs.noise) + len(runs.reported)
        measured = measure(
            Key(report.kind, "", report.name),
            report.step,
            np.array([report.value]),
            np.array([theirs[there].value]),
            beside[:many],
            beside[many:],
            eps=precision,
            host=place[0] if runs.topology.num_hosts > 1 else None,
        )
        yield replace(measured, at=_step_of(report, often[place[:3]], last))


def _step_of(report: Report, often: int, last: int) -> int:
    """Return the step of a report, given the number of reports: one for each step, several for each, or fewer."""
    if often < last:
        return _made_after(report, last)
    times = -(-often // (last + 1))
    each = times if times * (last + 1) - often <= times else 1  # those of the step in which runs are held may be missing
    return min(report.step // max(each, 1), last)


def _made_after(report: Report, last: int) -> int:
    """Return the step after which a report was made that is not in every step (an epoch's)."""
    return last if report.made is None else min(max(report.made - 1, 0), last)


def of_other_steps(runs: Runs) -> list[str]:
    """Return the names of reports made once in many steps, if the runs have made different numbers of them."""
    if as_many_steps(runs):
        return []
    fewest = min((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    by_step = max(fewest - 1, 2)
    counts = [Counter(report.name for report in trace.reports if report.host == 0) for trace in (runs.topology, runs.reference)]
    return [name for name, count in counts[0].items() if counts[1][name] > 0 and count < by_step]
