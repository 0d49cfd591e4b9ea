"""Read examples from arrays in memory, or mapped from a file. Only the requested examples are read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.hashing import Integers
from gpudist_core.pipelines.sources.access import Rows, digest, evenly, type_of

# Rows whose content tells one data set from another: enough to notice, few enough to cost nothing.
_SAMPLES = 16


class ArraySource:
    """Provide the examples of a structure of arrays.

    Args:
        arrays: Arrays or tensors with equal first axes, in any structure.

    Raises:
        UsageError: If there is no example, an array has no first axis or holds objects, or arrays differ in their number of
            examples.
    """

    def __init__(self, arrays: Any) -> None:
        flat = tf.nest.flatten(arrays)
        # np.asanyarray keeps a memory map a memory map; a tensor on the CPU becomes an array over the same memory.
        self._parts = [np.asanyarray(array) for array in flat]
        shapes = [part.shape for part in self._parts]
        if not shapes or not all(shapes):
            raise UsageError(
                "Each array must have its examples along the first axis",
                "Pass arrays, in tuples or dicts but not in lists.",
                shapes=shapes,
            )
        if len({shape[0] for shape in shapes}) > 1:
            raise UsageError("All arrays must have the same number of examples", "Cut them to the same length.", shapes=shapes)
        self.num_rows = int(shapes[0][0])
        if self.num_rows == 0:
            raise UsageError("The data must have at least one example", "Pass arrays with examples.", shapes=shapes)
        self.spec = tf.nest.pack_sequence_as(arrays, [tf.TensorSpec(part.shape[1:], type_of(part)) for part in self._parts])

    @property
    def parts(self) -> Rows:
        """Return the arrays, flattened."""
        return self._parts

    def take(self, rows: Integers) -> Rows:
        """Return the examples with these numbers. Consecutive ones are not copied."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            return [np.asarray(part[rows[0] : rows[-1] + 1]) for part in self._parts]
        return [np.asarray(np.take(part, rows, axis=0)) for part in self._parts]

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of these examples."""
        chosen = np.unique(np.linspace(0, self.num_rows - 1, _SAMPLES).astype(np.int64))
        samples = [np.ascontiguousarray(part) for part in self.take(chosen)]
        content = [repr(part.tolist()) if part.dtype.kind == "O" else part.tobytes() for part in samples]
        return digest(*((part.shape, part.dtype.str) for part in self._parts), *content)

    @cached_property
    def looks(self) -> str:
        """Return the text that hosts compare before they start: shapes, and the values of a few examples, without floats."""
        exact = [part for part in self._sampled() if part.dtype.kind not in "fc"]
        content = [repr(part.tolist()) if part.dtype.kind == "O" else part.tobytes() for part in exact]
        forms = ", ".join(f"{part.dtype}{list(part.shape)}" for part in self._parts)
        return f"{forms}: {digest(*content)[:8]}" if content else forms

    @cached_property
    def numbers(self) -> list[float]:
        """Return numbers for a few examples of floats.

        Hosts compare them up to rounding, as each may have computed them itself.
        """
        return [number for part in self._sampled() if part.dtype.kind in "fc" for number in _sums(part)]

    def _sampled(self) -> Rows:
        rows = np.asarray(evenly(self.num_rows, _SAMPLES))
        return [np.ascontiguousarray(np.take(part, rows, axis=0)) for part in self._parts]


def _sums(part: Any) -> list[float]:
    """Return, for each example, a sum with random signs, scaled to about 1; and the logarithm of the scale."""
    rows = np.nan_to_num(part.reshape(len(part), -1).real.astype(np.float64), nan=0.5, posinf=2.0, neginf=-2.0)
    size = float(np.sqrt(np.mean(np.square(rows)))) if rows.size else 0.0
    if size == 0.0:
        return [0.0] * (len(rows) + 1)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], rows.shape[1])
    return [float(np.log(size)), *(rows @ signs / (size * np.sqrt(rows.shape[1]))).tolist()]
