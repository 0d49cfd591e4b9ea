"""Move data without a position to where a run was interrupted, by reading it again.

The order of a shuffle, a generator or a sequence that shuffles itself depends on how often it was read.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Protocol

import tensorflow as tf


class RestoredEpochs(Protocol):
    """Describe the epochs that the `fit` of a distributed model iterates: `keras_model.epochs.Epochs`."""

    source: Any
    steps_per_epoch: int | None

    def catch_stop_iteration(self) -> Any: ...
    def __iter__(self) -> Any: ...


def read_over(epochs: RestoredEpochs, number: int, name: str) -> None:
    """Read some epochs again, so that the data continue after them.

    Args:
        epochs: The epochs of `fit`, before the first one.
        number: Number of epochs that were read.
        name: The name of the checkpoint, for messages.
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
        f"gpudist reads data without a position again, up to where {name} was saved. Received: epochs={number}. If that takes "
        "too long, pass fit a gd.Pipeline, which continues there at once.",
        stacklevel=2,
    )
    for _ in range(number):
        with epochs.catch_stop_iteration():
            for first, last, batches in epochs:
                if not sum(1 for _ in itertools.islice(batches, last - first + 1)):
                    raise StopIteration


def _warns_of_chance(epochs: RestoredEpochs, name: str) -> bool:
    """Warn of epochs with a part of the batches in an unseeded order: nobody knows which examples they had."""
    from gpudist_core.upstream import datasets, trainer

    dataset, seed = getattr(epochs.source, "dataset", None), getattr(epochs.source, "seed", None)
    by_chance = seed is not None and trainer.seed() is None
    if by_chance or (_is_dataset(dataset) and "unseeded" in datasets.shuffles_that_vary(dataset)):
        warnings.warn(
            "If an epoch has a part of the data, the order must have a seed to continue with the rest. Received: "
            f"checkpoint={name!r}, steps_per_epoch={epochs.steps_per_epoch}, shuffle='without a seed'. The data start again: "
            "some examples come twice, others later. Pass fit a gd.Pipeline, or give the shuffle a seed.",
            stacklevel=3,
        )
        return True
    return False


def _is_dataset(value: Any) -> bool:
    return isinstance(value, tf.data.Dataset)


def warn_of_unknown(name: str, epoch: int) -> None:
    """Warn that Keras's own `fit` has started its data again.

    Args:
        name: The name of the checkpoint.
        epoch: The next epoch, from 0.
    """
    warnings.warn(
        "Only the fit of a gd.distributed model continues its data where they were. Received: "
        f"checkpoint={name!r}, epoch={epoch}. The data start again: a shuffle repeats the order of the first epoch, and data "
        "shared between epochs (steps_per_epoch) start at the first example. Train gd.distributed(model).",
        stacklevel=2,
    )
