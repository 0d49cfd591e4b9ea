"""Hold the variables of a run's functions: the state of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emulate.probe.functions.files import folder_of, state_of

_CYCLE = 509
"""After so many elements their changes by units in the last place come again."""


class State:
    """Hold the variables of a run's functions, whose values are the state of a step.

    Args:
        trace: The folder of the run's trace.
    """

    def __init__(self, trace: Path) -> None:
        import tensorflow as tf

        self.variables: dict[int, Any] = {}
        for file in state_of(folder_of(trace)).glob("*.npy"):
            number, dtype, _ = file.name.split(".")
            self.variables[int(number)] = tf.Variable(tf.cast(np.load(file, allow_pickle=False), dtype), trainable=False)

    def read(self, numbers: Iterable[int]) -> Mapping[int, Any]:
        """Return the values of some variables, by their number."""
        return {number: self.variables[number].read_value() for number in numbers}

    def assign(self, values: Mapping[int, Any]) -> None:
        """Go back to values that `read` has returned."""
        for number, value in values.items():
            self.variables[number].assign(value)

    def shift(self, numbers: Sequence[int], units: float, seed: int) -> None:
        """Change each element of some variables by up to so many units in the last place.

        Args:
            numbers: The variables.
            units: By how many, at most.
            seed: Which change.
        """
        generator = np.random.default_rng(seed)
        for variable in (self.variables[number] for number in numbers):
            if variable.dtype.is_floating:
                value = variable.numpy()
                size = np.finfo(np.float64 if value.dtype == np.float64 else np.float32).eps
                factors = (1 + units * size * generator.uniform(-1, 1, _CYCLE)).astype(value.dtype)
                factors = np.tile(factors, -(-value.size // _CYCLE))[: value.size]
                variable.assign(value * factors.reshape(value.shape))
