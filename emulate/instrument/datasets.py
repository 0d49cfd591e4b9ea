"""See where a pass over a dataset begins: with it the length of the first epoch may be known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.point import around, when_imported
from emulate.recorder.epochs import EpochsOfData, FirstEpoch

_PIPELINES = "gpudist_core.pipelines.distributed"


def install(epochs: EpochsOfData) -> None:
    """Wrap the places where a pass over a dataset begins."""
    _after_iter(upstream.dataset_class(), lambda dataset: epochs.begins(dataset, _of_dataset(dataset)))
    for cls in upstream.distributed_dataset_classes():
        _after_iter(cls, lambda dataset: epochs.begins(dataset, _of_distributed(dataset)))
    when_imported(_PIPELINES, lambda: _see_pipelines(epochs))


def install_keras(epochs: EpochsOfData, package: str) -> None:
    """Wrap the begin of `fit` in one Keras."""
    for cls in upstream.callback_list_classes():
        if cls.__module__.startswith(package):

            @around(cls, "on_train_begin")
            def on_train_begin(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
                batches = (getattr(self, "params", None) or {}).get("steps")
                epochs.fit_begins(None if batches is None else int(batches))
                return original(self, *args, **kwargs)

    if package == upstream.KERAS_3:

        @around(upstream.epoch_iterator_class(), "__init__")
        def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            epochs.arrays_given(FirstEpoch(self.num_batches, upstream.partial_batch(self.data_adapter)))


def _after_iter(cls: Any, tell: Callable[[Any], None]) -> None:
    @around(cls, "__iter__")
    def iterate(original: Any, self: Any) -> Any:
        iterator = original(self)
        tell(self)
        return iterator


def _of_dataset(dataset: Any) -> FirstEpoch:
    if not tf.executing_eagerly():
        return FirstEpoch()
    return FirstEpoch(_finite(int(dataset.cardinality())), upstream.last_batch(dataset))


def _of_distributed(dataset: Any) -> FirstEpoch:
    batches, strategy, whole = upstream.distribution_of(dataset)
    if whole is None:  # made by a function, which gives each replica batches of its own
        count = _finite(batches)
        return FirstEpoch(None if count is None else -(-count // upstream.num_local_replicas(strategy)))
    with tf.init_scope():
        return FirstEpoch(_finite(batches), upstream.last_batch(whole))


def _finite(cardinality: int) -> int | None:
    return int(cardinality) if cardinality >= 0 else None


def _see_pipelines(epochs: EpochsOfData) -> None:
    cls = sys.modules[_PIPELINES].Distributed
    _after_iter(cls, lambda pipeline: epochs.begins(pipeline, FirstEpoch(pipeline.num_batches)))
