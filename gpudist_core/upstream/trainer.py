"""Extend Keras 3's trainer to take distributed batches, and access what fit and similar methods need from it.

Keras 3.15 has these errors on several replicas. `TFEpochIterator` lets tf.distribute split the data. `_maybe_symbolic_build`
adds the parts of the first batch, which fails if they have different lengths, and on several hosts (keras#20585).
`reduce_per_replica` averages each replica's value of a metric. `row_means` defines how a replica's numbers count.

Keras's callbacks keep state from epoch to epoch, which a restored fit needs.
"""

from __future__ import annotations

import contextvars
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType
from typing import Any

import keras
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.upstream import datasets, losses, models, patches, runtime

_next: contextvars.ContextVar[NextIterator | None] = contextvars.ContextVar("gpudist_iterator", default=None)


class NextIterator:
    """Make the iterator that Keras's fit, evaluate or predict makes next. At the end of a `with` block nothing more is made.

    Args:
        make: A function of the arguments of `TFEpochIterator`, by name, that returns an iterator like
            `keras_model.sources.Epochs`.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._token: contextvars.Token[NextIterator | None] | None = None

    def expect(self) -> None:
        """Replace `TFEpochIterator` until Keras makes one."""
        if self._token is None:
            _iterators.__enter__()
            self._token = _next.set(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__exit__()
        return self._make(*args, **kwargs)

    def __enter__(self) -> None:
        self.expect()

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _next.reset(self._token)
            self._token = None
            _iterators.__exit__()


def _replacements() -> patches.Replacements:
    from keras.src.backend.tensorflow import trainer

    yield trainer, "TFEpochIterator", _making


def _making(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    make = _next.get()
    return original(*args, **kwargs) if make is None else make(*args, **kwargs)


_iterators = patches.Patches(_replacements)


def epoch_item(first: int, last: int, batches: Iterator[Any]) -> tuple[Any, ...]:
    """Return what Keras's loops take of an epoch for one call of the compiled function; up to Keras 3.10 without the last step.

    Args:
        first: The number of the call's first step.
        last: That of its last one.
        batches: The iterator of the epoch's batches.

    Returns:
        The numbers that this version of Keras unpacks, and the iterator.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    has_last = "end_step" in EpochIterator.__next__.__code__.co_varnames
    return (first, last, batches) if has_last else (first, batches)


def is_default(cls: Any, name: str) -> bool:
    """Return whether a model's class uses Keras's own method of that name.

    Args:
        cls: The class of a model.
        name: The name of the method: `train_step` or `test_step`.

    Returns:
        True if no subclass overrides it.
    """
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    return getattr(cls, name) is getattr(TensorFlowTrainer, name)


def loss_of(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
    """Return the result of the model's `compute_loss`, which may or may not take `training`."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def single_loss(model: Any) -> Any:
    """Return the only loss that a model was compiled with, as a function (y, y_pred) -> values by example.

    Args:
        model: A compiled Keras model.

    Returns:
        The function; None for several losses, loss weights, or a loss that is not a mean over the examples.
    """
    compiled = model._compile_loss
    if compiled is None or compiled._user_loss_weights or isinstance(compiled._user_loss, (dict, list, tuple)):
        return None
    loss = keras.losses.get(compiled._user_loss)
    if isinstance(loss, keras.losses.Loss) and loss.reduction not in ("sum_over_batch_size", "mean"):
        return None
    return losses.per_example_function(losses.of_function(loss))


def has_metrics(model: Any) -> bool:
    """Return whether `compile` was given metrics."""
    return model._compile_metrics is not None


def update_metrics(model: Any, y: Any, y_pred: Any, weight: Any) -> None:
    """Update the metrics that `compile` was given with a batch."""
    model._compile_metrics.update_state(y, y_pred, sample_weight=weight)


def track_loss(model: Any, loss: Any, rows: Any) -> None:
    """Update the metric called loss with a batch's loss."""
    model._loss_tracker.update_state(loss, sample_weight=rows)


def build(model: Any, batch: Any) -> None:
    """Create all variables of model, metrics, losses and optimizer, with the shapes of a batch.

    Args:
        model: A compiled Keras model.
        batch: A structure as the step takes it, with any objects that have `shape` and `dtype` in place of tensors.

    Raises:
        UsageError: If the model has variables of another strategy, beside which the optimizer cannot create its own.
    """
    with models.beside_variables(model.distribute_strategy, model):
        model._symbolic_build(data_batch=batch)


def build_layers(model: Any, batch: Any) -> None:
    """Create the variables of a model that was not called yet, on all replicas at once. A replica in its step creates its own.

    Args:
        model: A Keras model.
        batch: As for `build`; only the inputs are used.
    """
    from keras.src import backend

    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    x = keras.tree.map_structure(lambda v: keras.KerasTensor(v.shape, v.dtype.name), x)
    training = {"training": False} if model._call_has_training_arg else {}
    backend.compute_output_spec(model, x, **training)


def are_layers_built(model: Any) -> bool:
    """Return whether a model's layers have all their variables."""
    return all(layer.built for layer in model._flatten_layers())


def needs_build(model: Any) -> bool:
    """Return whether some variables are still missing."""
    parts = [model._compile_metrics, model._compile_loss, model.optimizer]
    return not are_layers_built(model) or any(p is not None and not p.built for p in parts)


def check_targets(model: Any, batch: Any) -> None:
    """Refuse a batch without targets if a compiled loss needs them.

    Args:
        model: A compiled Keras model whose step is Keras's own.
        batch: A structure as the step takes it.

    Raises:
        UsageError: If it has no targets.
    """
    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if model._compile_loss is not None and not own_loss and keras.utils.unpack_x_y_sample_weight(batch)[1] is None:
        raise UsageError(
            "A model compiled with a loss needs targets",
            "Use fit(x, y), or a pipeline or dataset with examples (x, y).",
            y=None,
        )


def check_losses(model: Any) -> None:
    """Refuse losses that depend on how examples are split over replicas. See `losses`.

    Args:
        model: A compiled Keras model.

    Raises:
        UsageError: If it has such a loss.
    """
    compiled = model._compile_loss
    for loss in keras.tree.flatten(compiled._user_loss) if compiled is not None else ():
        losses.check_rows(loss)


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model: the one given to `compile`, and those that it keeps itself, also in lists and dicts."""
    waiting: list[Any] = [vars(model)]
    seen: set[int] = set()
    optimizers: dict[int, Any] = {}
    while waiting:
        kept = waiting.pop()
        if id(kept) in seen:
            continue
        seen.add(id(kept))
        for value in list(kept.values() if isinstance(kept, Mapping) else kept):
            if isinstance(value, keras.optimizers.Optimizer):
                optimizers[id(value)] = value
            elif isinstance(value, (list, tuple, Mapping)):
                waiting.append(value)
    return list(optimizers.values())


def metrics_of(model: Any) -> list[Any]:
    """Return the single metrics of a model, with those given to `compile` listed one by one."""
    own: list[Any] = []
    for metric in model.metrics:
        own += metric.metrics if metric is model._compile_metrics else [metric]
    return own


def in_this_thread(callbacks: Any) -> None:
    """Keep a `CallbackList` from calling in threads, where callbacks would read another step."""
    callbacks._async_train = callbacks._async_test = callbacks._async_predict = False


def data_adapter(**data: Any) -> Any:
    """Return Keras's data adapter for anything that `fit` takes.

    Args:
        **data: `x`, `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle`, `class_weight`.

    Returns:
        The data adapter.
    """
    from keras.src.trainers import data_adapters

    return data_adapters.get_data_adapter(**data)


def arrays_of(adapter: Any) -> tuple[Any, int] | None:
    """Return the arrays of an adapter, including weights, and its batch size; None if it does not hold arrays."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return (adapter._inputs, adapter._batch_size) if type(adapter) is ArrayDataAdapter else None


def is_made_in_python(adapter: Any) -> bool:
    """Return whether an adapter's batches come from Python code, which may differ between hosts: neither arrays nor tf.data."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    return not isinstance(adapter, (ArrayDataAdapter, TFDatasetAdapter))


def dataset_of(adapter: Any, seed: int | None) -> Any:
    """Return the batches of an adapter, shuffled by a seed and not by the state of Python and TensorFlow.

    For a generator, and a `PyDataset` without an end, each batch is read on request: batches that were read ahead at the end of
    an epoch would be lost, and their number depends on timing.

    Args:
        adapter: Keras's data adapter.
        seed: A seed that is equal on all hosts and new in each fit; None if the adapter does not shuffle.

    Returns:
        A `tf.data.Dataset`.
    """
    from keras.src.trainers.data_adapters import py_dataset_adapter

    if _is_endless(adapter):
        return datasets.without_prefetch(adapter.get_tf_dataset())
    if seed is None:
        return adapter.get_tf_dataset().prefetch(tf.data.AUTOTUNE)
    if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):  # it shuffles the batches when they are read
        _draw_from(random.Random(seed), adapter, "_finite_generator")
        _draw_from(random.Random(seed), adapter.enqueuer, "_run")
    kept = runtime.op_seeds()
    tf.random.set_seed(seed)
    try:
        return adapter.get_tf_dataset().prefetch(tf.data.AUTOTUNE)
    finally:
        tf.random.set_seed(None)
        runtime.restore_op_seeds(kept)


def _draw_from(generator: random.Random, owner: Any, name: str) -> None:
    """Let a method of one object draw from a generator, where its module draws from that of the process."""
    method = getattr(owner, name, None)
    if method is not None:
        function = method.__func__
        own = {**function.__globals__, "random": generator}
        setattr(owner, name, MethodType(FunctionType(function.__code__, own, closure=function.__closure__), owner))


def _is_endless(adapter: Any) -> bool:
    """Return whether an adapter continues after an epoch: it has a state, and no known end."""
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    if isinstance(adapter, PyDatasetAdapter):
        return adapter.num_batches is None and adapter.enqueuer is None  # an enqueuer reads ahead by design
    return isinstance(adapter, GeneratorDataAdapter)


def seed() -> int | None:
    """Return the last seed of `keras.utils.set_random_seed`, or None."""
    from keras.src.utils import rng_utils

    # Keras 3.8 remembers no seed of its own: set_random_seed gives it to TensorFlow.
    get_seed = getattr(rng_utils, "get_random_seed", lambda: runtime.op_seeds()["seed"])
    last_seed: int | None = get_seed()
    return last_seed


# By the class's name: Keras 3.12, the last one for Python 3.10, has no OrbaxCheckpoint.
_KEPT = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "OrbaxCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch"),
}
# Given by the list, or made anew of what a callback is told.
_OF_KERAS = ("_current_epoch", "_model", "min_delta", "monitor_op", "params", "validation_data")


def kept_by(callback: Any) -> tuple[str, ...]:
    """Return the attributes in which a callback of Keras, or a subclass, keeps state for later epochs."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _KEPT and cls is getattr(keras.callbacks, cls.__name__, None):
            return _KEPT[cls.__name__]
    return ()


def attributes_of(callback: Any) -> dict[str, Any]:
    """Return a callback's own attributes, except for those that the list sets or `kept_by` names; none for Keras's classes."""
    if type(callback).__module__.split(".")[0] in ("keras", "gpudist_core"):
        return {}
    excluded = (*_OF_KERAS, *kept_by(callback))
    return {name: value for name, value in vars(callback).items() if name not in excluded}


class _Last:
    """Stand at the end of a list of callbacks while they start the training."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self.functions: list[Callable[[list[Any]], None]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self._callbacks[:] = [callback for callback in self._callbacks if callback is not self]
        for function in self.functions:
            function(self._callbacks)


def after_all_begin(callback: Any, function: Callable[[list[Any]], None]) -> None:
    """Call a function with the list of callbacks after all of them have started the training.

    Keras gives a callback no access to the list, so it is found among the callers.

    Args:
        callback: A callback in its `on_train_begin`. If no list of callbacks has called it, nothing happens.
        function: A function of the list. It may sort it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(callbacks, list) and any(listed is callback for listed in callbacks):
            if not isinstance(callbacks[-1], _Last):
                callbacks.append(_Last(callbacks))  # the loop over the list comes to it
            callbacks[-1].functions.append(function)
            return
        frame = frame.f_back
