"""Locate the numbers that a program reports, so that those of two runs can be compared.

A program that applies several batches together (accumulation) may report a loss for each of them. Where it makes fewer batches
of the same rows on several devices, their reports are taken together, step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from emulate.probe.trace import Report, Trace
from emulate.verify.gradients import objective

if TYPE_CHECKING:
    from emulate.verify.compared_runs import Runs

_ALIKE = 1e-3
"""Tolerance of an evaluation of the same rows in different batches, after steps that differ by rounding."""
Place = tuple[int, str, str, int, int]
"""(host, kind, name, step, how manieth of its name in this step)"""


_TOGETHER: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": lambda values: float(np.sum(values)),
    "mean": lambda values: float(np.mean(values)),
    "last": lambda values: values[-1],
}


def reported(reports: Sequence[Report], by_batch: Mapping[str, tuple[int, str]]) -> dict[Place, Report]:
    """Return what the program reported, each with its place; a replica's own numbers are left out.

    Args:
        reports: As recorded.
        by_batch: Names of which so many are taken together, and as what: their `sum`, their `mean`, or the `last` of them.

    Returns:
        The reports by place.
    """
    by_place: dict[Place, Report] = {}
    for report in _together([report for report in reports if report.replica is None], by_batch):
        count = 0
        while (place := (report.host, report.kind, report.name, report.step, count)) in by_place:
            count += 1
        by_place[place] = report
    return by_place


def _together(reports: Sequence[Report], by_batch: Mapping[str, tuple[int, str]]) -> list[Report]:
    joined = [report for report in reports if report.name not in by_batch]
    for name, (size, how) in by_batch.items():
        for host in sorted({report.host for report in reports}):
            one_by_one = [report for report in reports if (report.host, report.name) == (host, name)]
            for at in range(0, len(one_by_one) - size + 1, size):
                values = [report.value for report in one_by_one[at : at + size]]
                made = one_by_one[at + size - 1].made
                joined.append(replace(one_by_one[at], step=at // size, value=_TOGETHER[how](values), made=made))
    return joined


def reported_by_batch(runs: Runs) -> dict[str, tuple[tuple[int, int], str]]:
    """Return what is reported for each batch, if the runs' steps have different numbers of batches.

    Args:
        runs: The runs that are compared.

    Returns:
        By name how many reports belong to one step, in the topology and in the reference, and as what they are taken
        together: the batches' losses add up to the step's or are each like it, as what the gradients are taken of does.
    """
    by_name: dict[str, tuple[tuple[int, int], str]] = {}
    for optimizer in runs.optimizers:
        ours, theirs = runs.batches(optimizer)
        if ours == theirs:
            continue
        steps = [len(runs.topology.steps(optimizer)), len(runs.reference.steps(optimizer))]
        counts = [Counter(report.name for report in t.reports if report.host == 0) for t in (runs.topology, runs.reference)]
        for name in counts[0]:
            pairs = zip(counts, steps, (ours, theirs), strict=True)
            if all(abs(count[name] - num_steps * size) < size for count, num_steps, size in pairs):
                # A metric of Keras counts all batches so far: its last result is that of the step.
                how = "last" if name.startswith("metric/") else _how(runs, optimizer, ours / theirs)
                by_name[name] = ((ours, theirs), how)
    return by_name


def of_other_batches(runs: Runs) -> list[str]:
    """Return names of which the runs report different numbers between the same steps, equally many on the whole.

    An evaluation whose batches grow with the replicas does so; where it sees other rows its numbers differ on the whole too.

    Args:
        runs: The runs that are compared, that have made as many steps.

    Returns:
        The names.
    """
    ours, theirs = (_between_steps(trace) for trace in (runs.topology, runs.reference))
    names = []
    for name in (ours.keys() & theirs.keys()) - reported_by_batch(runs).keys():
        both = [(ours[name][at], theirs[name][at]) for at in ours[name].keys() & theirs[name].keys()]
        if any(len(values) != len(other) for values, other in both) and any(
            all(np.isclose(whole(values), whole(other), rtol=_ALIKE, atol=0.0) for values, other in both)
            for whole in (np.mean, np.sum)
        ):
            names.append(name)
    return sorted(names)


def _between_steps(trace: Trace) -> dict[str, dict[int, list[float]]]:
    """Return the first host's reports by name and by steps before them, without the last, which may be partial."""
    by_name: dict[str, dict[int, list[float]]] = {}
    for report in trace.reports:
        if report.host == 0 and report.replica is None and report.made is not None:
            by_name.setdefault(report.name, {}).setdefault(report.made, []).append(report.value)
    for by_made in by_name.values():
        if len(by_made) > 1:
            del by_made[max(by_made)]
    return by_name


def _how(runs: Runs, optimizer: str, ratio: float) -> str:
    """Return `sum` or `mean`, as the objectives of the first step compare: its batches' sum is equal, or each batch's value."""
    first = [objective(step) for step in runs.pairs(optimizer)[0]]
    if first[0] is None or not first[1] or not first[0] / first[1] > 0:
        return "sum"
    factor = first[0] / first[1]
    return "sum" if abs(np.log(factor)) <= abs(np.log(factor / ratio)) else "mean"
