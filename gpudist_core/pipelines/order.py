"""Choose the order of the examples in an epoch, for sources with random access."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpudist_core.pipelines.hashing import Integers, permutation, permutations

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
