"""Bringing data that `fit` reads without a position to where a run was interrupted: what was read then is read over.

The order of a shuffle, a generator and a sequence that shuffles itself depend on how often they were gone through.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Protocol


class Epochs(Protocol):
    """What the `fit` of a distributed model iterates: `keras_model.epochs.Epochs`."""

    source: Any
    steps_per_epoch: int | None

    def catch_stop_iteration(self) -> Any: ...
    def __iter__(self) -> Any: ...


def read_over(epochs: Epochs, number: int, name: str) -> None:
    """Go on after some epochs, as if they had been read here.

    Args:
        epochs: What `fit` iterates, before its first epoch.
        number: Epochs that were read.
        name: That of the checkpoint, for messages.
    """
    from gpudist_core.upstream import iterations

    dataset: Any = getattr(epochs.source, "dataset", None)
    if number == 0 or (epochs.steps_per_epoch is not None and _warns_of_chance(epochs, name)):
        return
    varies = iterations.what_varies(dataset) if _is_dataset(dataset) else "more"
    if epochs.steps_per_epoch is None and varies != "more":
        for _ in range(number if varies == "one shuffle" else 0):
            iter(dataset)
        return
    warnings.warn(
        f"Data without a position are read over up to where {name} was saved. Received: epochs={number}. If that takes too "
        "long, give fit a gd.Pipeline, which goes there at once.",
        stacklevel=2,
    )
    for _ in range(number):
        with epochs.catch_stop_iteration():
            for first, last, batches in epochs:
                if not sum(1 for _ in itertools.islice(batches, last - first + 1)):
                    raise StopIteration


def _warns_of_chance(epochs: Epochs, name: str) -> bool:
    """Epochs of some batches of an order that is left to chance: which rows they had cannot be told."""
    from gpudist_core.upstream import datasets, trainer

    dataset, seed = getattr(epochs.source, "dataset", None), getattr(epochs.source, "seed", None)
    by_chance = seed is not None and trainer.seed() is None
    if by_chance or (_is_dataset(dataset) and "unseeded" in datasets.shuffles_that_vary(dataset)):
        warnings.warn(
            "Where an epoch has a part of the data, its order must have a seed to go on with the rest. Received: "
            f"checkpoint={name!r}, steps_per_epoch={epochs.steps_per_epoch}, shuffle='without a seed'. The data begin anew: "
            "some rows come once more, others later. Give fit a gd.Pipeline, or the shuffle a seed.",
            stacklevel=3,
        )
        return True
    return False


def _is_dataset(value: Any) -> bool:
    import tensorflow as tf

    return isinstance(value, tf.data.Dataset)


def warn_of_unknown(name: str, epoch: int) -> None:
    """Say that a `fit` of Keras alone has begun its data anew.

    Args:
        name: That of the checkpoint.
        epoch: The epoch that comes next, from 0.
    """
    warnings.warn(
        "Data go on where they were only in fit of a gd.distributed model. Received: "
        f"checkpoint={name!r}, epoch={epoch}. The data begin anew: a shuffle has the order of the first epoch, and a set that "
        "epochs share (steps_per_epoch) its first rows. Train gd.distributed(model).",
        stacklevel=2,
    )
