"""Compute the weight of each example: from its class, or from given weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gpudist_core.errors import UsageError, is_whole
from gpudist_core.pipelines.hashing import Integers

Floats = npt.NDArray[np.floating[Any]]


def dtype_of_weights() -> str:
    """Return the dtype of weights: float64 where Keras computes in it, else float32."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


@dataclass(frozen=True)
class Weighting:
    """Hold a weight for each example, or one for each class.

    Attributes:
        of_rows: The weight of each example of the data, or None.
        of_classes: The weight of each class (y of an example (x, y) after the maps), or None.
        otherwise: The weight of classes that `of_classes` does not list. None refuses such classes.
        dtype: That of the weights: float64 where Keras computes in it, else float32.
    """

    of_rows: Floats | None
    of_classes: Mapping[int, float] | None = None
    otherwise: float | None = None
    dtype: str = field(default_factory=dtype_of_weights)

    def weights(self, rows: Integers, labels: Any) -> Floats:
        """Return the weights of examples, by their numbers or by their classes, y."""
        if self.of_rows is not None:
            return self.of_rows[rows].astype(self.dtype, copy=False)
        classes = classes_of(labels)
        weights = by_class(classes.reshape(-1), dict(self.of_classes or {}), self.otherwise)
        return weights.reshape(classes.shape).astype(self.dtype, copy=False)


def classes_of(labels: Any) -> Integers:
    """Return the classes of targets, as Keras reads them for `class_weight`.

    Args:
        labels: Class numbers of shape (rows,) or (rows, 1), floats rounded; or one-hot vectors or probabilities of shape
            (rows, ..., classes).

    Returns:
        int64, of shape (rows,) or (rows, ...).
    """
    classes = np.asarray(labels)
    if classes.ndim > 1:
        classes = classes.argmax(-1) if classes.shape[-1] != 1 else classes[..., 0]
    return np.round(classes).astype(np.int64)


def label_component(row: Any) -> int:
    """Return the index of y among the flattened components of examples (x, y).

    Args:
        row: The structure of an example.

    Returns:
        The index.

    Raises:
        UsageError: If examples are not such pairs, or y is not one numeric tensor.
    """
    if not isinstance(row, tuple) or len(row) < 2 or len(tf.nest.flatten(row[1])) != 1:
        raise UsageError("Classes need examples of the form (x, y)", "Use such examples, or pass labels=....", row=row)
    (y,) = tf.nest.flatten(row[1])
    if y.dtype == tf.string:
        raise UsageError(
            "A class must be a number", "Number the classes in a map: keras.layers.StringLookup.", dtype=y.dtype.name
        )
    return len(tf.nest.flatten(row[0]))


def checked(labels: Any, shape: tuple[int, ...] | None = None) -> Integers:
    """Convert labels to integers.

    Args:
        labels: One label for each example.
        shape: The required shape, or None.

    Returns:
        int64.

    Raises:
        UsageError: If they are not integers, or not one for each example.
    """
    classes = np.asarray(labels)
    if classes.ndim != 1 or classes.dtype.kind not in "iu" or (shape is not None and classes.shape != shape):
        raise UsageError(
            "labels must be integers, one for each example",
            "Pass the class number of each example. For one-hot labels use argmax.",
            shape=classes.shape,
            dtype=classes.dtype.name,
            rows=None if shape is None else shape[0],
        )
    return classes.astype(np.int64)


def check_weights(weights: Any) -> None:
    """Refuse weights that do not give a valid mean.

    Args:
        weights: A number for each class or example.

    Raises:
        UsageError: If one is negative, not finite, or not a number.
    """
    try:
        numbers = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise UsageError("Weights must be numbers >= 0", weights=weights) from None
    wrong = numbers[~(np.isfinite(numbers) & (numbers >= 0))]
    if wrong.size:
        raise UsageError("Weights must be finite and >= 0", "Use 0 to leave an example out.", weights=wrong[:3].tolist())


def of_classes(weights: Mapping[Any, float]) -> dict[int, float]:
    """Return the weights of classes by their numbers.

    Args:
        weights: The weight of each class.

    Returns:
        The same, with Python integers as keys.

    Raises:
        UsageError: If a class is not an integer.
    """
    if strange := [label for label in weights if not is_whole(label)]:
        raise UsageError("A class must be an integer", "Number the classes, as y does.", classes=strange[:3])
    return {int(label): weight for label, weight in weights.items()}


def by_class(labels: Any, weights: Mapping[int, float], otherwise: float | None = None) -> Floats:
    """Return the weight of each label.

    Args:
        labels: The class of each example.
        weights: The weight of each class.
        otherwise: The weight of other classes; None refuses them.

    Returns:
        float32, or float64 where Keras computes in it.

    Raises:
        UsageError: If a class has no weight.
    """
    wanted = checked(labels)
    strange = np.setdiff1d(wanted, np.array(sorted(weights), np.int64))
    if len(strange) and otherwise is not None:
        weights = {**weights, **{int(label): otherwise for label in strange}}
    elif len(strange):
        raise UsageError(
            "Each class must have a weight",
            "Pass one for each class, or otherwise=...",
            weights=dict(weights),
            without=strange.tolist(),
        )
    classes = np.array(sorted(weights), np.int64)
    places = np.searchsorted(classes, wanted)
    return np.array([weights[int(label)] for label in classes], dtype_of_weights())[places]


def balancing(labels: Integers) -> dict[int, float]:
    """Return the weight of each class with equal total weight for all classes and a mean weight of 1 for examples."""
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): len(labels) / (len(classes) * int(count)) for label, count in zip(classes, counts, strict=True)}
