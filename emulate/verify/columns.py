"""Tell examples that each host has scaled or shifted, column by column, by numbers of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from emulate.probe.examples import joined
from emulate.probe.trace import Step, Trace
from emulate.verify.arrays import Floats
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll

_FEWEST = 8
"""Rows that a line through two of them must fit."""
_CLOSE = 1e-4
"""Largest distance from the line, as part of a column's spread: values were computed in 32 bits."""
_MANY_STEPS = 4


def shifted_columns(reference: Trace, topology: Trace) -> str | None:
    """Return in words how the hosts' examples come from those of one device, by a factor and a sum for each column.

    Args:
        reference: The run on one device.
        topology: A run on several hosts with as many examples in each step.

    Returns:
        The numbers of a column on two hosts; None where other examples are not made so, or all hosts have the same numbers.
    """
    for name in topology.optimizers if topology.num_hosts > 1 else ():
        ours, theirs = (complete(trace, name)[:_MANY_STEPS] for trace in (topology, reference))
        if not (ours and theirs and ours[0] and theirs[0]):
            continue
        for place in next(iter(theirs[0].values())).row_inputs:
            for by_host in _paired(ours, theirs, place):
                lines = [_line(*pair) for pair in by_host]
                if all(line is not None for line in lines) and (text := _apart([line for line in lines if line is not None])):
                    return f"Flattened argument {place} of the step: {text}"
    return None


def _paired(ours: Sequence[StepOfAll], theirs: Sequence[StepOfAll], place: int) -> Iterator[list[tuple[Floats, Floats]]]:
    """Yield, for each way to share rows out, by host its rows and those of one device: every n-th one, or neighbors."""
    hosts = sorted({local.host for local in ours[0].values()})
    whole = _steps_of(theirs, place, None)
    shares = [_steps_of(ours, place, host) for host in hosts]
    if not whole or not all(shares) or any(len(step) % len(hosts) for step in whole):
        return
    for is_dealt in (True, False):
        pairs = []
        for number, of_host in enumerate(shares):
            parts = [step[number :: len(hosts)] if is_dealt else np.split(step, len(hosts))[number] for step in whole]
            mine, one_device = joined(of_host), joined(parts)
            if mine.shape == one_device.shape and len(mine) >= _FEWEST:
                pairs.append((mine, one_device))
        if len(pairs) == len(hosts):
            yield pairs


def _steps_of(steps: Sequence[StepOfAll], place: int, host: int | None) -> list[Floats]:
    """Return the rows of a host, or of all of them, by step; nothing where not all were kept."""
    tables = [_rows([local for local in step.values() if host in (None, local.host)], place) for step in steps]
    whole = [rows for rows in tables if rows is not None]
    return whole if len(whole) == len(tables) else []


def _rows(replicas: Sequence[Step], place: int) -> Floats | None:
    """Return all rows of some replicas as a table of floats; None where they were not kept, or are no floats."""
    stored = [replica.inputs[place] for replica in replicas]
    arrays = [array.read() for array in stored if array is not None and array.is_complete]
    if len(arrays) < len(stored) or any(array.ndim < 2 or array.dtype.kind != "f" for array in arrays):
        return None
    table = joined(arrays).astype(np.float64)
    return table.reshape(len(table), math.prod(table.shape[1:]))  # not -1: a replica may have no rows


def _line(mine: Floats, theirs: Floats) -> tuple[Floats, Floats] | None:
    """Return the factor and the sum that make each column of one device that of a host; None where none do."""
    center, own = theirs.mean(axis=0), mine.mean(axis=0)
    spread = np.sum((theirs - center) ** 2, axis=0)
    varies = spread > 0
    if not varies.any():
        return None
    factor = np.where(varies, np.sum((theirs - center) * (mine - own), axis=0) / np.where(varies, spread, 1.0), 1.0)
    shift = own - factor * center
    off = np.abs(mine - factor * theirs - shift).max(axis=0)
    is_close = bool((off <= _CLOSE * (np.abs(mine - own).max(axis=0) + np.abs(own) + _CLOSE)).all())
    return (factor, shift) if is_close else None


def _apart(lines: Sequence[tuple[Floats, Floats]]) -> str:
    """Return the column in which two hosts differ most, in words; nothing where all have the same numbers."""
    (factor, shift), others = lines[0], lines[1:]
    gaps = np.array([np.abs(its_factor - factor) + np.abs(its_shift - shift) for its_factor, its_shift in others])
    host, column = (int(at) for at in np.unravel_index(int(np.argmax(gaps)), gaps.shape))
    if gaps[host, column] <= _CLOSE:
        return ""
    its_factor, its_shift = others[host]
    return (
        f"column {column} of host 0 is that of one device times {factor[column]:.4g} plus {shift[column]:.4g}, "
        f"of host {host + 1} times {its_factor[column]:.4g} plus {its_shift[column]:.4g}"
    )
