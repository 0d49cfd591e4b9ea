"""Reduce arrays of traces to the elements that all of them kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from emulate.probe.trace import StoredArray, Variable

Floats = NDArray[np.float64]


def aligned(arrays: Sequence[StoredArray]) -> list[Floats]:
    """Return the elements that every array kept, flat and as float64.

    Traces with different budgets keep every a-th and every b-th element: both have every lcm(a, b)-th. Of sparse arrays alone,
    whose other rows are zero in all, the rows that any of them has: a table may have millions.
    """
    if all(array.rows is not None and array.is_complete and not array.parts for array in arrays):
        return _of_rows(arrays)
    stride = math.lcm(*(array.stride for array in arrays))
    return [array.read().reshape(-1)[:: stride // array.stride].astype(np.float64) for array in arrays]


def _of_rows(arrays: Sequence[StoredArray]) -> list[Floats]:
    rows = [array.read_rows() for array in arrays]
    together = np.unique(np.concatenate([numbers for numbers, _ in rows]))
    aligned_ones = []
    for array, (numbers, values) in zip(arrays, rows, strict=True):
        dense = np.zeros((len(together), *array.shape[1:]))
        dense[np.searchsorted(together, numbers)] = values
        aligned_ones.append(dense.reshape(-1))
    return aligned_ones


def is_numeric(array: StoredArray) -> bool:
    """Return whether the array holds floats (counters and seeds are compared exactly or not at all)."""
    return np.dtype(array.dtype).kind == "f"


def eps_of(dtype: str) -> float:
    """Return the unit in the last place at 1 of a float dtype; float32's for other dtypes."""
    kind = np.dtype(dtype)
    return float(np.finfo(kind).eps) if kind.kind == "f" else float(np.finfo(np.float32).eps)


def largest(values: Floats) -> float:
    """Return the largest absolute value of the finite elements; 0 if there are none."""
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def norm(values: Floats) -> float:
    """Return the L2 norm."""
    return float(np.sqrt(np.einsum("i,i->", values, values)))  # not np.dot, whose threads wait for those of other runs


def kept(variables: Iterable[Variable]) -> StoredArray | None:
    """Return the first kept array among one variable's values on several replicas."""
    return next((variable.array for variable in variables if variable.array is not None), None)


def finite_difference(ours: Floats, theirs: Floats) -> tuple[Floats, Floats]:
    """Return what two arrays differ by, and the second one, with 0 where one of them is not finite."""
    finite = np.isfinite(ours) & np.isfinite(theirs)
    ours, theirs = (np.where(finite, array, 0.0) for array in (ours, theirs))
    return ours - theirs, theirs
