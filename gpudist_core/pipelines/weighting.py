"""The weight of each row: from its class, or given for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.hashing import Integers
from gpudist_core.values import is_whole

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Weighting:
    """A weight for each row, or one for each class.

    Attributes:
        of_rows: The weight of each row of the data, or None.
        of_classes: The weight of each class, which is y of a row (x, y) as the maps leave it; or None.
        otherwise: The weight of a class that has none; None refuses it.
    """

    of_rows: Floats | None
    of_classes: Mapping[int, float] | None = None
    otherwise: float | None = None

    def weights(self, rows: Integers, labels: Any) -> Floats:
        """The weights of rows, by their numbers or by their classes, y."""
        if self.of_rows is not None:
            return self.of_rows[rows]
        classes = classes_of(labels)
        found = by_class(classes.reshape(-1), dict(self.of_classes or {}), self.otherwise)
        return found.reshape(classes.shape)


def classes_of(labels: Any) -> Integers:
    """The classes that targets stand for, as Keras takes them for `class_weight`.

    Args:
        labels: Numbers of classes, of shape [rows] or [rows, 1], floats rounded; or one-hot or probabilities, of shape
            [rows, ..., classes].

    Returns:
        int64, of shape [rows] or [rows, ...].
    """
    found = np.asarray(labels)
    if found.ndim > 1:
        found = found.argmax(-1) if found.shape[-1] != 1 else found[..., 0]
    return np.round(found).astype(np.int64)


def label_component(row: Any) -> int:
    """Which component, flattened, of rows of (x, y) is y.

    Args:
        row: The structure of a row.

    Returns:
        Its place.

    Raises:
        WrongUse: Rows are no such pairs, or y is no single tensor of numbers.
    """
    import tensorflow as tf

    if not isinstance(row, tuple) or len(row) < 2 or len(tf.nest.flatten(row[1])) != 1:
        raise WrongUse("The class is the second component of a row (x, y)", "Give such rows, or labels=....", row=row)
    (y,) = tf.nest.flatten(row[1])
    if y.dtype == tf.string:
        raise WrongUse("A class is a number", "Number the classes in a map: keras.layers.StringLookup.", dtype=y.dtype.name)
    return len(tf.nest.flatten(row[0]))


def checked(labels: Any, shape: tuple[int, ...] | None = None) -> Integers:
    """Labels as integers.

    Args:
        labels: One for each row.
        shape: The shape that they must have, if any.

    Returns:
        int64.

    Raises:
        WrongUse: They are no integers, or not one for each row.
    """
    found = np.asarray(labels)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (shape is not None and found.shape != shape):
        raise WrongUse(
            "Labels are integers, one for each row",
            "Give the number of each row's class: of one-hot labels the argmax.",
            shape=found.shape,
            dtype=found.dtype.name,
            rows=None if shape is None else shape[0],
        )
    return found.astype(np.int64)


def check_weights(weights: Any) -> None:
    """Refuse weights that no mean can have.

    Args:
        weights: A number for each class or row.

    Raises:
        WrongUse: One is negative, not finite, or no number.
    """
    try:
        found = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise WrongUse("Weights are numbers, 0 or more", "Give one for each row or class.", weights=weights) from None
    wrong = found[~(np.isfinite(found) & (found >= 0))]
    if wrong.size:
        raise WrongUse("Weights are finite, 0 or more", "Leave a row out with 0.", weights=wrong[:3].tolist())


def of_classes(weights: Mapping[Any, float]) -> dict[int, float]:
    """The weights of classes by their numbers.

    Args:
        weights: The weight of each class.

    Returns:
        The same, with Python's integers.

    Raises:
        WrongUse: A class is no whole number.
    """
    if strange := [label for label in weights if not is_whole(label)]:
        raise WrongUse("A class is a whole number", "Number the classes, as y does.", classes=strange[:3])
    return {int(label): weight for label, weight in weights.items()}


def by_class(labels: Any, weights: Mapping[int, float], otherwise: float | None = None) -> Floats:
    """The weight of each label.

    Args:
        labels: The class of each row.
        weights: The weight of each class.
        otherwise: The weight of a class that has none; None refuses it.

    Returns:
        float32.

    Raises:
        WrongUse: A class has no weight.
    """
    wanted = checked(labels)
    strange = np.setdiff1d(wanted, np.array(sorted(weights), np.int64))
    if len(strange) and otherwise is not None:
        weights = {**weights, **{int(label): otherwise for label in strange}}
    elif len(strange):
        raise WrongUse("Each class has a weight", "Give one for each class.", weights=dict(weights), without=strange.tolist())
    known = np.array(sorted(weights), np.int64)
    places = np.searchsorted(known, wanted)
    return np.array([weights[int(label)] for label in known], np.float32)[places]


def balancing(labels: Integers) -> dict[int, float]:
    """The weight of each class with which all classes count the same in all, and a row 1 in the mean."""
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): len(labels) / (len(classes) * int(count)) for label, count in zip(classes, counts, strict=True)}
