"""Measure the numbers that a program reports by itself: losses, metrics, logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from emulate.probe.facts import Facts
from emulate.probe.reports import SO_FAR
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
    noise = (*runs.noise, *(trace for trace in runs.reported if not trace.follows))
    others = [reported(trace.reports, beside_it) for trace in (*noise, *runs.confirmation)]
    # Rounding alone decides a bias before BatchNormalization: another one in each noise run, the same at the same weights.
    of_the_same = [reported(trace.reports, beside_it) for trace in runs.reported if trace.follows and len(runs.reported) == 1]
    precision = max(
        (coarsest_unit(runs, theirs_) for name in runs.optimizers for _, theirs_ in runs.pairs(name)[:1]), default=eps_of("<f4")
    )
    last = max((len(runs.pairs(name)) for name in runs.optimizers), default=1) - 1
    often = Counter((host, kind, name) for host, kind, name, _, _ in ours)
    unlike = {*of_other_steps(runs), *of_other_batches(runs), *of_own_statistics(runs)}
    for place, report in ours.items():
        there = (0, *place[1:])
        if there not in theirs or report.name in unlike:
            continue
        # A run without this report adds nothing to the floor, and the others stay what they are: noise or confirmation.
        is_made = any(there in values for values in others)
        beside = [np.array([values.get(there, theirs[there]).value]) for values in others] if is_made else []
        at = _step_of(report, often[place[:3]], last)
        values = next((values for values in of_the_same if at != report.step and there in values), theirs)
        measured = measure(
            Key(report.kind, "", report.name),
            report.step,
            np.array([report.value]),
            np.array([values[there].value]),
            beside[: len(noise)],
            beside[len(noise) :],
            eps=precision,
            host=place[0] if runs.topology.num_hosts > 1 else None,
        )
        yield replace(measured, at=at)


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


def of_own_statistics(runs: Runs) -> list[str]:
    """Return the names of what evaluations report where each replica has its own moving statistics.

    Keras 3 does not aggregate those of BatchNormalization. One device that normalizes by share has those of the first.
    """
    if not Facts.of(runs.reference).by_share:
        return []
    fewest = min((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    counts = Counter(report.name for report in runs.topology.reports if report.host == 0)
    of_training = ("batch/", "epoch/", SO_FAR)  # means over the steps' own numbers
    return [
        name
        for name, count in counts.items()
        if count < fewest - 1 and (not name.startswith(of_training) or name.startswith("epoch/val_"))
    ]


def of_other_steps(runs: Runs) -> list[str]:
    """Return the names of reports made once in many steps, if the runs have made different numbers of them."""
    if as_many_steps(runs):
        return []
    fewest = min((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    by_step = max(fewest - 1, 2)
    counts = [Counter(report.name for report in trace.reports if report.host == 0) for trace in (runs.topology, runs.reference)]
    return [name for name, count in counts[0].items() if counts[1][name] > 0 and count < by_step]
