"""Draw random numbers, and orders of examples, as a function of their purpose: the same in every process and version.

NumPy may change the draws of its generators between versions, and a restored run must continue in the order of its start. So
order and augmentation come from a hash (splitmix64) of the seed, the epoch and the example.
"""

from __future__ import annotations

from dataclasses import dataclass
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


# What a random number is for, so that no two uses of one seed draw the same numbers.
ROWS, CLASSES, CLASS_ROWS, BUFFER, BUFFER_REST, FILES, AUGMENTATION = range(7)


@dataclass(frozen=True)
class Drawn:
    """Hold the examples of an epoch, or of a part of it.

    Attributes:
        rows: The number of each example in the data.
        repeats: How often the example was drawn before in this epoch: 0 unless classes are balanced.
    """

    rows: Integers
    repeats: Integers

    def part(self, start: int, stop: int) -> Drawn:
        """Return the examples from one position up to another."""
        return Drawn(self.rows[start:stop], self.repeats[start:stop])


def in_order(num_rows: int) -> Drawn:
    """Return every example once, in the order of the data."""
    return Drawn(np.arange(num_rows), np.zeros(num_rows, np.int64))


def shuffled(num_rows: int, seed: int, epoch: int) -> Drawn:
    """Return every example once, in a random order for this epoch."""
    return Drawn(permutation(num_rows, seed, ROWS, epoch), np.zeros(num_rows, np.int64))


def balanced(labels: Integers, num_rows: int, seed: int, epoch: int) -> Drawn:
    """Draw every class equally often, in a random order for this epoch.

    Each run of as many examples as there are classes has each class once. Within a class, every example is drawn once before
    any is drawn again.

    Args:
        labels: The class of each example, any integers.
        num_rows: Number of examples to draw.
        seed: The seed of the pipeline.
        epoch: The number of the epoch.

    Returns:
        The drawn examples.
    """
    classes = np.unique(labels)
    turns = -(-num_rows // len(classes))
    drawn = np.empty((2, turns, len(classes)), np.int64)
    for column, label in enumerate(classes):
        rows = np.flatnonzero(labels == label)
        rounds = permutations(-(-turns // len(rows)), len(rows), seed, CLASS_ROWS, epoch, int(label))
        drawn[0, :, column] = rows[rounds.ravel()[:turns]]
        drawn[1, :, column] = np.arange(turns) // len(rows)
    places = permutations(turns, len(classes), seed, CLASSES, epoch)
    mixed = np.take_along_axis(drawn, places[np.newaxis], axis=2).reshape(2, -1)[:, :num_rows]
    return Drawn(mixed[0], mixed[1])
