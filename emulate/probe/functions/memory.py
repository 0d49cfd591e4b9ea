"""Add up what the recorded steps of a run keep in memory on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emulate.probe.functions.live_bytes import LiveBytes, highest
from emulate.probe.functions.step_function import State, StepFunction

Shapes = Sequence[Sequence[int]]


def step_memory(functions: Mapping[StepFunction, Shapes], state: State) -> dict[str, Any]:
    """Return what functions and variables of a run keep in memory, in bytes.

    Args:
        functions: Those of the steps, each with the shapes of its examples.
        state: The variables of all of them.

    Returns:
        `weights`, `other_variables`, `static`; `inputs`: what does not depend on the batch, and of each example; `peaks` and
        `peaks_in_16_bits`: the same of what else lives at the peak, one line for each moment that is the peak of some batch;
        `scales`: whether other batches could be computed; `uncounted`: types of operations with tensors of unknown size.
    """
    steps = [_replayed(function, shapes) for function, shapes in functions.items()]
    sizes = {number: float(np.prod(one.shape)) * one.dtype.size for number, one in state.variables.items()}
    weights = {number for function in functions for number in function.variables.values()}
    live = np.concatenate([step.peaks() for step in steps])
    return {
        "weights": sum(size for number, size in sizes.items() if number in weights),
        "other_variables": sum(size for number, size in sizes.items() if number not in weights),
        "static": sum(float(step.total("Const")[0]) for step in steps),
        "inputs": [float(size) for size in sum(step.total("Placeholder") for step in steps)[:2]],
        "peaks": highest(live[:, :2]),
        "peaks_in_16_bits": highest(np.stack([live[:, 0], live[:, 1] - live[:, 2] / 2], axis=1)),
        "scales": all(step.scales for step in steps),
        "uncounted": sorted({kind for step in steps for kind in step.uncounted}),
    }


def _replayed(function: StepFunction, shapes: Shapes) -> LiveBytes:
    """Return the replay of a step, for other batches too where its graph takes twice as many examples."""
    whole = function.forward_and_backward(shapes, and_update=True)
    examples = shapes[0][0]
    doubled = [[2 * shape[0], *shape[1:]] if shape and shape[0] == examples else shape for shape in shapes]
    try:
        larger = function.forward_and_backward(doubled)
    except ValueError:  # an operation whose shape is written into the graph does not fit
        larger = None
    return LiveBytes(whole, larger, examples)
