"""The handwritten digits and the small CNN whose steps the benchmarks time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

BATCH = 256
_DATA = Path(__file__).resolve().parent.parent / "fixtures" / "data" / "digits.npz"


def digits(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Images from 0 to 1, float32 of shape (1797, *shape), and labels, int64 of shape (1797,)."""
    with np.load(_DATA) as file:
        return (file["images"].reshape(-1, *shape) / 16).astype("float32"), file["labels"].astype("int64")


def cnn() -> Any:
    """A Keras model from images of shape (8, 8, 1) to 10 logits."""
    import keras

    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)
