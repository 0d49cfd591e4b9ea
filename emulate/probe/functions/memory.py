"""Add up what the recorded steps of a run keep in memory on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emulate.probe.functions.live_bytes import LiveBytes, highest
from emulate.probe.functions.state import State
from emulate.probe.functions.step_function import StepFunction

Step = tuple[StepFunction, Sequence[Sequence[int]]]
"""A function, and the shapes of its examples."""


def step_memory(steps: Sequence[Step], others: Sequence[Step], state: State) -> dict[str, Any]:
    """Return what functions and variables of a run keep in memory, in bytes.

    Args:
        steps: The functions of the steps.
        others: The same with another batch; nothing where that is not known.
        state: The variables of all steps.

    Returns:
        `weights`, `other_variables`, `static`; `inputs`: what does not depend on the batch, and of each example; `peaks` on one
        device and `reduced_peaks` on several: for the moments that may be the peak of a batch what else lives then (`highest`);
        `scales`: whether other batches are known; `uncounted`: types of operations with tensors of unknown size.
    """
    replays = [_replay(step, others[place] if others else None) for place, step in enumerate(steps)]
    sizes = {number: float(np.prod(variable.shape)) * variable.dtype.size for number, variable in state.variables.items()}
    weights = {number for function, _ in steps for number in function.variables.values()}
    peaks, reduced = (np.concatenate([replay.moments(reduced=several) for replay in replays]) for several in (False, True))
    return {
        "weights": sum(size for number, size in sizes.items() if number in weights),
        "other_variables": sum(size for number, size in sizes.items() if number not in weights),
        "static": sum(float(replay.total("Const")[0]) for replay in replays),
        "inputs": [sum(float(replay.total("Placeholder")[part]) for replay in replays) for part in (0, 1)],
        "peaks": highest(peaks),
        "reduced_peaks": highest(reduced),
        "scales": all(replay.scales for replay in replays),
        "uncounted": sorted({kind for replay in replays for kind in replay.uncounted}),
    }


def _replay(step: Step, other: Step | None) -> LiveBytes:
    function, shapes = step
    whole, examples = function.graph(shapes, is_whole=True), shapes[0][0]
    if other is None or other[1][0][0] == examples:
        return LiveBytes(whole, examples, None, function.gradient_names)
    graph = other[0].graph(other[1])
    return LiveBytes(whole, examples, (graph, other[1][0][0]), function.gradient_names)
