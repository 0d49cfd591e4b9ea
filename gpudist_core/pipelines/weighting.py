"""The weight of each row: from its class, or given for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.hashing import Integers

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Weighting:
    """A weight for each row, or one for each class.

    Attributes:
        of_rows: The weight of each row of the data, or None.
        of_classes: The weight of each class, or None.
        component: Which component of a row is its class, where weights go by class and rows come in a stream.
    """

    of_rows: Floats | None
    of_classes: Mapping[int, float] | None = None
    component: int = 1

    def weights(self, rows: Integers, labels: Integers | None) -> Floats:
        """The weights of rows, by their numbers or by their classes."""
        if self.of_rows is not None:
            return self.of_rows[rows]
        return by_class(np.asarray(labels), dict(self.of_classes or {}))


def by_class(labels: Integers, weights: Mapping[int, float]) -> Floats:
    """The weight of each label.

    Args:
        labels: Classes, of any shape.
        weights: The weight of each class.

    Returns:
        float32, the shape of the labels.

    Raises:
        WrongUse: A class has no weight.
    """
    known = np.array(sorted(weights), np.int64)
    places = np.minimum(np.searchsorted(known, labels), len(known) - 1)
    strange = np.unique(labels[known[places] != labels])
    if len(strange):
        raise WrongUse("Each class has a weight", "Give one for each class.", weights=dict(weights), without=strange.tolist())
    return np.array([weights[int(label)] for label in known], np.float32)[places]


def balancing(labels: Integers) -> dict[int, float]:
    """The weight of each class with which all classes count the same in all, and a row 1 in the mean."""
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): len(labels) / (len(classes) * int(count)) for label, count in zip(classes, counts, strict=True)}
