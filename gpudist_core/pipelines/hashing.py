"""Draw random numbers as a function of their purpose: the same in every process, on every machine, in every version.

NumPy may change the draws of its generators between versions, and a restored run must continue in the order of its start. So
order and augmentation come from a hash (splitmix64) of the seed, the epoch and the example.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]


def words(seed: int, *parts: Any) -> Words:
    """Return one word of 64 random bits for each element of the parts, which broadcast.

    Args:
        seed: Any integer.
        *parts: Integers or arrays of integers that identify the purpose of the word.

    Returns:
        The words, as an array even if all parts are single numbers.
    """
    state = _mixed(np.atleast_1d(np.asarray(seed & 0xFFFFFFFFFFFFFFFF, np.uint64)))
    for part in parts:
        state = _mixed(state ^ _mixed(np.atleast_1d(np.asarray(part)).astype(np.int64).view(np.uint64)))
    return state


def _mixed(value: Words) -> Words:
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Words = value ^ (value >> np.uint64(31))
        return mixed


def permutation(length: int, seed: int, *parts: Any) -> Integers:
    """Return the numbers below `length` in an order drawn for the parts (single numbers)."""
    only: Integers = permutations(1, length, seed, *parts)[0]
    return only


def permutations(count: int, length: int, seed: int, *parts: Any) -> Integers:
    """Return several orders of the numbers below `length`, one in each row."""
    keys = words(seed, *parts, np.arange(count)[:, np.newaxis], np.arange(length))
    # Only a stable sort orders equal words alike on every processor.
    return np.argsort(keys, axis=1, kind="stable").astype(np.int64, copy=False)
