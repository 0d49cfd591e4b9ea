"""Keras 3's trainer, taught to take batches that are distributed already, and what fit and its like ask of it.

What is wrong in Keras 3.15 on several replicas: `TFEpochIterator` lets tf.distribute cut and shard the data;
`_maybe_symbolic_build` adds up the parts of the first batch, which fails where they are not equally long, and on hosts;
`reduce_per_replica` averages what each replica takes for the metric. How a replica's numbers count is in `row_means`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpudist_core.errors import WrongUse
from gpudist_core.upstream import datasets, losses, models, row_losses, row_means, run_state

_maker: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("gpudist_epochs", default=None)


@contextlib.contextmanager
def iterating(make: Callable[..., Any]) -> Iterator[None]:
    """While fit, evaluate or predict runs: what takes the place of `TFEpochIterator`.

    Args:
        make: Called with its arguments, by name; returns an iterator as `keras_model.epochs.Epochs` is one.
    """
    install()
    token = _maker.set(make)
    try:
        yield
    finally:
        _maker.reset(token)


@functools.cache
def install() -> None:
    """Teach Keras; outside `row_means.counting` and `iterating` everything does what it did."""
    row_means.install()
    _install_iterator()


def _install_iterator() -> None:
    from keras.src.backend.tensorflow import trainer

    original = trainer.TFEpochIterator

    def epoch_iterator(*args: Any, **kwargs: Any) -> Any:
        make = _maker.get()
        return original(*args, **kwargs) if make is None else make(*args, **kwargs)

    trainer.TFEpochIterator = epoch_iterator


def epoch_item(first: int, last: int, batches: Iterator[Any]) -> tuple[Any, ...]:
    """Return what Keras's loops take of an epoch for one call of the compiled function; up to Keras 3.10 without the last step.

    Args:
        first: The number of the call's first step.
        last: That of its last one.
        batches: The iterator of the epoch's batches.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    has_last = "end_step" in EpochIterator.__next__.__code__.co_varnames
    return (first, last, batches) if has_last else (first, batches)


def is_default(cls: Any, name: str) -> bool:
    """Whether a model's class has Keras's own method of that name.

    Args:
        cls: The class of a model.
        name: Of a method: `train_step`, `test_step`.

    Returns:
        Whether no one has overridden it.
    """
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    return getattr(cls, name) is getattr(TensorFlowTrainer, name)


def loss_of(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
    """What the model's `compute_loss` says, which may or may not take `training`."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def call(model: Any, x: Any, *, training: bool) -> Any:
    """The model's output, told whether it is in training where it asks."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def single_loss(model: Any) -> Any:
    """The one loss that a model was compiled with, as a function (y, y_pred) -> values per row.

    Args:
        model: A compiled Keras model.

    Returns:
        The function; None where there are several losses, weights of losses, or one that is not a mean over the rows.
    """
    import keras

    compiled = model._compile_loss
    if compiled is None or compiled._user_loss_weights or isinstance(compiled._user_loss, (dict, list, tuple)):
        return None
    loss = keras.losses.get(compiled._user_loss)
    if isinstance(loss, keras.losses.Loss) and loss.reduction not in ("sum_over_batch_size", "mean"):
        return None
    return losses.per_example_function(losses.of_function(loss))


def has_metrics(model: Any) -> bool:
    """Whether metrics were given to `compile`."""
    return model._compile_metrics is not None


def update_metrics(model: Any, y: Any, y_pred: Any, weight: Any) -> None:
    """Count a batch in the metrics that were given to `compile`."""
    model._compile_metrics.update_state(y, y_pred, sample_weight=weight)


def track_loss(model: Any, loss: Any, rows: Any) -> None:
    """Count a batch's loss in the metric called loss."""
    model._loss_tracker.update_state(loss, sample_weight=rows)


def build(model: Any, batch: Any) -> None:
    """Make all variables of model, metrics, losses and optimizer, with the shapes of a batch.

    Args:
        model: A compiled Keras model.
        batch: A structure as the step takes it, anything with `shape` and `dtype` in the place of each tensor.

    Raises:
        WrongUse: Where the model has variables of another strategy, beside which the optimizer cannot make its own.
    """
    with models.beside_variables(model.distribute_strategy, model):
        model._symbolic_build(data_batch=batch)


def build_layers(model: Any, batch: Any) -> None:
    """Make the variables of a model that was not called yet, all replicas' at once; a replica in its step makes its own.

    Args:
        model: A Keras model.
        batch: As in `build`; only the inputs are looked at.
    """
    import keras
    from keras.src import backend

    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    x = keras.tree.map_structure(lambda v: keras.KerasTensor(v.shape, v.dtype.name), x)
    training = {"training": False} if model._call_has_training_arg else {}
    backend.compute_output_spec(model, x, **training)


def are_layers_built(model: Any) -> bool:
    """Whether a model's layers have all their variables."""
    return all(layer.built for layer in model._flatten_layers())


def needs_build(model: Any) -> bool:
    """Whether some variables are still missing."""
    parts = [model._compile_metrics, model._compile_loss, model.optimizer]
    return not are_layers_built(model) or any(p is not None and not p.built for p in parts)


def check_targets(model: Any, batch: Any) -> None:
    """Refuse a batch without targets where a compiled loss needs them.

    Args:
        model: A compiled Keras model whose step is Keras's own.
        batch: A structure as the step takes it.

    Raises:
        WrongUse: It has none.
    """
    import keras

    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if model._compile_loss is not None and not own_loss and keras.utils.unpack_x_y_sample_weight(batch)[1] is None:
        raise WrongUse(
            "A model that was compiled with a loss needs targets",
            "Give (x, y): fit(x, y), or a pipeline or dataset whose rows are (x, y).",
            y=None,
        )


def check_losses(model: Any) -> None:
    """Refuse losses that are of other rows on several replicas: see `row_losses`.

    Args:
        model: A compiled Keras model.

    Raises:
        WrongUse: One of them is.
    """
    import keras

    compiled = model._compile_loss
    for loss in keras.tree.flatten(compiled._user_loss) if compiled is not None else ():
        row_losses.check(loss)


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers of a model: that given to `compile`, and those it keeps for a step of its own, in lists and dicts too."""
    import keras

    waiting: list[Any] = [vars(model)]
    seen: set[int] = set()
    found: dict[int, Any] = {}
    while waiting:
        kept = waiting.pop()
        if id(kept) in seen:
            continue
        seen.add(id(kept))
        for value in list(kept.values() if isinstance(kept, Mapping) else kept):
            if isinstance(value, keras.optimizers.Optimizer):
                found[id(value)] = value
            elif isinstance(value, (list, tuple, Mapping)):
                waiting.append(value)
    return list(found.values())


def metrics_of(model: Any) -> list[Any]:
    """The single metrics of a model: those given to `compile` apart."""
    own: list[Any] = []
    for metric in model.metrics:
        own += metric.metrics if metric is model._compile_metrics else [metric]
    return own


def in_this_thread(callbacks: Any) -> None:
    """Keep a `CallbackList` from calling in threads of its own, where what they read is of another step."""
    callbacks._async_train = callbacks._async_test = callbacks._async_predict = False


def data_adapter(**data: Any) -> Any:
    """Keras's own reader of whatever `fit` takes.

    Args:
        **data: `x`, `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle`, `class_weight`.

    Returns:
        Its data adapter.
    """
    from keras.src.trainers import data_adapters

    return data_adapters.get_data_adapter(**data)


def arrays_of(adapter: Any) -> tuple[Any, int] | None:
    """What an adapter of arrays holds, weights included, and its batch size; None for another adapter."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return (adapter._inputs, adapter._batch_size) if type(adapter) is ArrayDataAdapter else None


def is_made_in_python(adapter: Any) -> bool:
    """Whether an adapter's batches come of Python code, which may give others on another host: neither arrays nor tf.data."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    return not isinstance(adapter, (ArrayDataAdapter, TFDatasetAdapter))


def dataset_of(adapter: Any, seed: int | None) -> Any:
    """The batches of an adapter, shuffled by a seed and not by the state of Python and TensorFlow.

    Of a generator, and of a `PyDataset` without an end, no batch is taken before it is asked for: what was read ahead when an
    epoch ends would be lost, and how much that is depends on time.

    Args:
        adapter: Keras's reader.
        seed: The same on all hosts, another in each fit; None where it does not shuffle.

    Returns:
        A `tf.data.Dataset`.
    """
    import tensorflow as tf
    from keras.src.trainers.data_adapters import py_dataset_adapter

    if _is_endless(adapter):
        return datasets.without_prefetch(adapter.get_tf_dataset())
    if seed is None:
        return adapter.get_tf_dataset().prefetch(tf.data.AUTOTUNE)
    any_adapter: Any = py_dataset_adapter
    any_adapter.random = random.Random(seed)  # shuffles the batches of a PyDataset, when they are read
    kept = run_state.op_seeds()
    tf.random.set_seed(seed)
    try:
        return adapter.get_tf_dataset().prefetch(tf.data.AUTOTUNE)
    finally:
        tf.random.set_seed(None)
        run_state.restore_op_seeds(kept)


def _is_endless(adapter: Any) -> bool:
    """Whether an adapter goes on where it was left: it has a state, and no end that is known."""
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    if isinstance(adapter, PyDatasetAdapter):
        return adapter.num_batches is None and adapter.enqueuer is None  # an enqueuer reads ahead by design
    return isinstance(adapter, GeneratorDataAdapter)


def seed() -> int | None:
    """What `keras.utils.set_random_seed` was last told, if anything."""
    from keras.src.utils import rng_utils

    told: int | None = rng_utils.get_random_seed()
    return told
