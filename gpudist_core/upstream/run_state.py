"""Where TensorFlow and Keras keep what a run that is restored must get back and no public name gives."""

from __future__ import annotations

from typing import Any

import numpy as np


def op_seeds() -> dict[str, Any]:
    """What the seeds of the next operations made without a seed of their own depend on (`tf.random.set_seed`)."""
    context = _context()
    if context._seed is None:
        return {"seed": None, "state": None}
    version, words, gauss = context._rng.getstate()
    return {"seed": context._seed, "state": [version, np.array(words, np.uint32), gauss]}


def restore_op_seeds(state: dict[str, Any]) -> None:
    """Set what `op_seeds` returned."""
    context = _context()
    if state["seed"] is not None:
        context._set_global_seed(int(state["seed"]))
        version, words, gauss = state["state"]
        context._rng.setstate((int(version), tuple(int(word) for word in words), gauss))


def keras_global_generator(make: bool = False) -> Any:
    """The `keras.random.SeedGenerator` of Keras's functions that are given none.

    Args:
        make: Make it where nothing has drawn from it yet.

    Returns:
        The generator, or None.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if make:
        return seed_generator.global_seed_generator()
    # Keras 3.12, the last for Python 3.10, has no name for the name.
    return global_state.get_global_attribute(getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator"))


def flat_layers(model: Any) -> list[Any]:
    """A Keras model and all layers in it, each once; nothing for another model."""
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []


def begin_at(model: Any, epoch: int | None) -> None:
    """Let Keras's `fit`, which has called `on_train_begin`, go on with an epoch; Keras's own BackupAndRestore does it alike.

    Args:
        model: The model.
        epoch: Counted from 0; None for the one that `fit` was given.
    """
    model._initial_epoch = epoch


def _context() -> Any:
    from tensorflow.python.eager import context

    return context.context()
