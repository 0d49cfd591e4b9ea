"""Access what TensorFlow and Keras keep without a public name, and a restored run needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpudist_core.upstream import eager


def op_seeds() -> dict[str, Any]:
    """Return what the seeds of the next operations without their own seed depend on (`tf.random.set_seed`)."""
    context = eager.context()
    if context._seed is None:
        return {"seed": None, "state": None}
    version, words, gauss = context._rng.getstate()
    return {"seed": context._seed, "state": [version, np.array(words, np.uint32), gauss]}


def restore_op_seeds(state: dict[str, Any]) -> None:
    """Restore what `op_seeds` returned."""
    context = eager.context()
    if state["seed"] is not None:
        context._set_global_seed(int(state["seed"]))
        version, words, gauss = state["state"]
        context._rng.setstate((int(version), tuple(int(word) for word in words), gauss))


def keras_global_generator(make: bool = False) -> Any:
    """Return the `keras.random.SeedGenerator` of Keras functions without their own generator.

    Args:
        make: Whether to make it if nothing has drawn from it yet.

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
    """Return a Keras model and all its layers, each once; an empty list for other models."""
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []


def begin_at(model: Any, epoch: int | None) -> None:
    """Let Keras's `fit`, after `on_train_begin`, continue with an epoch, as Keras's own BackupAndRestore does.

    Args:
        model: The model.
        epoch: The epoch, from 0; None for the one that `fit` was given.
    """
    model._initial_epoch = epoch
