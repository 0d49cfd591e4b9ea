"""Keras 3's trainer, taught to see one replica's rows as if they were the batch, and batches that are distributed already.

What is wrong in Keras 3.15 on several replicas: `TFEpochIterator` lets tf.distribute cut and shard the data;
`_maybe_symbolic_build` adds up the parts of the first batch, which fails where they are not equally long, and on hosts;
`reduce_per_replica` averages what each replica takes for the metric; `Mean.update_state` counts a scalar once for each replica.

Inside `row_means` every scalar that a replica computes is a mean over its rows: a Keras loss, a `reduce_mean`, a regulariser.
Weighted by the replica's fraction of the rows such means sum to the mean over the global batch, so gradients are taken of
them times the fraction, and metrics count them by it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpudist_core import share as shares
from gpudist_core.errors import WrongUse
from gpudist_core.upstream import assigned_by_hand, clipping_by_hand, datasets, losses, metric_functions, run_state
from gpudist_core.upstream.parts import Parts

GATHERED = (
    "In a loss of your own compare them with those of all replicas: keras.losses.circle of what "
    "tf.distribute.get_replica_context().all_gather(..., axis=0) gives of y and y_pred, and of its values those of the "
    "replica's own rows. The context is None while Keras builds the model."
)

_means = threading.local()
_maker: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("gpudist_epochs", default=None)


@contextlib.contextmanager
def row_means(*, tapes: bool) -> Iterator[None]:
    """While this thread traces one replica's step: scalars are means over its rows.

    Args:
        tapes: Whether `GradientTape.gradient` of variables is of the mean times the fraction: for steps that others wrote.
    """
    outer = getattr(_means, "state", None)
    _means.state = _Means(tapes)
    try:
        yield
    finally:
        _means.state = outer


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


class _Means:
    """What is known of the scalars of one trace.

    Args:
        tapes: As in `row_means`.
    """

    def __init__(self, tapes: bool) -> None:
        self.tapes = tapes
        self.of_rows: dict[int, Any] = {}
        self.outputs: Any = None  # of which a metric's function makes its values just now
        self.parts = Parts()


def _current() -> tuple[_Means, shares.Share] | None:
    means, share = getattr(_means, "state", None), shares.current()
    return None if means is None or share is None else (means, share)


@functools.cache
def install() -> None:
    """Teach Keras; outside `row_means` and `iterating` everything does what it did."""
    losses.install()
    _install_iterator()
    _install_losses()
    _install_mean()
    _install_tape()
    clipping_by_hand.install(_current_parts)
    assigned_by_hand.install(_current_parts)


def _install_iterator() -> None:
    from keras.src.backend.tensorflow import trainer

    original = trainer.TFEpochIterator

    def epoch_iterator(*args: Any, **kwargs: Any) -> Any:
        make = _maker.get()
        return original(*args, **kwargs) if make is None else make(*args, **kwargs)

    trainer.TFEpochIterator = epoch_iterator


def _install_losses() -> None:
    from keras.src.losses import loss

    of_share, unscaled = loss.reduce_weighted_values, loss.unscale_loss_for_distribution

    def reduce_weighted_values(values: Any, *args: Any, **kwargs: Any) -> Any:
        current = _current()
        if current is None:
            return of_share(values, *args, **kwargs)
        if getattr(values, "shape", None) is not None and values.shape.rank == 0:
            return _weighted_scalar(current[1], values, *args, **kwargs)
        value = of_share(values, *args, **kwargs)
        return value if value.shape.rank != 0 else _over(value, current[1].fraction)

    def unscale(value: Any) -> Any:
        current = _current()
        if current is None:
            return unscaled(value)
        # What is unscaled goes to a metric of Keras's own, with a static number of rows or none: it is counted by its rows.
        current[0].of_rows[id(value)] = value
        return value

    loss.reduce_weighted_values = reduce_weighted_values
    loss.unscale_loss_for_distribution = unscale


def _weighted_scalar(share: shares.Share, value: Any, sample_weight: Any = None, mask: Any = None, **kwargs: Any) -> Any:
    """A loss that is one number for all rows is their mean."""
    import tensorflow as tf

    losses.warn_of_one_number(share)
    given = {name: w for name, w in (("sample_weight", sample_weight), ("mask", mask)) if w is not None}
    if given and share.num_replicas > 1:
        raise WrongUse(
            "A loss must return one value for each row where rows have weights or a mask",
            "Leave out its mean.",
            shape=(),
            **{f"{name}_shape": tuple(weight.shape) for name, weight in given.items()},
        )
    for weight in given.values():
        value *= tf.reduce_mean(tf.cast(weight, value.dtype))
    return value


def _over(value: Any, fraction: Any) -> Any:
    import tensorflow as tf

    return tf.math.divide_no_nan(value, tf.cast(fraction, value.dtype))


def present(value: Any) -> Any:
    """A replica's scalar, 0 where it has no rows (a mean over no rows is not a number)."""
    import tensorflow as tf

    share = shares.current()
    if share is None or share.num_replicas == 1:
        return value
    value = tf.convert_to_tensor(value)
    return tf.math.multiply_no_nan(value, tf.cast(tf.minimum(share.rows, 1), value.dtype)) if value.dtype.is_floating else value


def of_all(value: Any) -> Any:
    """A replica's mean as its part of the mean over all rows: the parts of all replicas sum to it, as values by row do."""
    import tensorflow as tf

    share = shares.current()
    if share is None or share.num_replicas == 1:
        return value
    value = tf.convert_to_tensor(value)
    if value.shape.rank:
        return value
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.float32)
    return tf.math.multiply_no_nan(value, tf.cast(share.fraction, value.dtype))


def _install_mean() -> None:
    from keras.src.metrics.reduction_metrics import Mean, MeanMetricWrapper

    original, of_function = Mean.update_state, MeanMetricWrapper.update_state

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        import tensorflow as tf

        current = _current()
        if current is not None and current[0].outputs is not None:
            values = metric_functions.by_row(self, values, current[0].outputs)
        if current is None or tf.convert_to_tensor(values).shape.rank != 0:
            return original(self, values, sample_weight)
        means, share = current
        if id(values) in means.of_rows:
            sample_weight = share.rows
        elif sample_weight is None:
            sample_weight = share.fraction
        return original(self, present(values), sample_weight)

    @functools.wraps(of_function)
    def update_by_function(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        current = _current()
        if current is None or current[1].num_replicas == 1:
            return of_function(self, y_true, y_pred, sample_weight)
        current[0].outputs = y_pred
        try:
            return of_function(self, y_true, y_pred, sample_weight)
        finally:
            current[0].outputs = None

    Mean.update_state, MeanMetricWrapper.update_state = update_state, update_by_function


def _install_tape() -> None:
    import tensorflow as tf

    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any) -> Any:
        current = _current()
        if current is None or not current[0].tapes or current[1].num_replicas == 1 or not _variables(sources):
            return original(self, target, sources, output_gradients, **kwargs)
        targets = tf.nest.flatten(target)
        given = tf.nest.flatten(output_gradients) if output_gradients is not None else [tf.ones_like(t) for t in targets]
        # Of values by row a tape takes the sum, as it does on one device; one number is the mean over the replica's rows.
        seeds = [g if g.shape.rank else g * tf.cast(current[1].fraction, g.dtype) for g in given]
        grads = original(self, targets, sources, seeds, **kwargs)
        grads = tf.nest.map_structure(lambda g: _finite_without_rows(g, current[1]), grads)
        current[0].parts.remember(tf.nest.flatten(grads), tf.nest.flatten(sources))
        return grads

    tf.GradientTape.gradient = gradient


def _current_parts() -> tuple[Parts, shares.Share] | None:
    """Of a step that others wrote, on several replicas."""
    current = _current()
    if current is None or not current[0].tapes or current[1].num_replicas == 1:
        return None
    return current[0].parts, current[1]


def _variables(sources: Any) -> bool:
    import keras
    import tensorflow as tf

    return any(isinstance(source, (tf.Variable, keras.Variable)) for source in tf.nest.flatten(sources))


def _finite_without_rows(gradient: Any, share: shares.Share) -> Any:
    import tensorflow as tf

    from gpudist_core.gradients import reduction

    if gradient is None:
        return None
    values = reduction.values_of(gradient)
    here = tf.cast(tf.minimum(share.rows, 1), values.dtype)
    return reduction.with_values(gradient, tf.math.multiply_no_nan(values, here))


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
    """
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
    """Refuse losses of Keras that compare rows, or are a ratio over all: of each replica's rows they are others.

    Args:
        model: A compiled Keras model.

    Raises:
        WrongUse: For `Dice` and `Tversky` without axes, `CosineSimilarity` and crossentropies along the rows, `Circle`.
    """
    import keras

    compiled = model._compile_loss
    for given in keras.tree.flatten(compiled._user_loss) if compiled is not None else ():
        loss = keras.losses.get(given) if isinstance(given, str) else given
        function, options = _function_of(loss)
        if function is keras.losses.circle:
            rule, advice = "A row's loss must not depend on which other rows a replica has", GATHERED
        elif _joins_rows(function, options):
            rule = "A loss has a value for each row, so that it does not depend on which rows a replica has"
            of_images = ": keras.losses.Dice(axis=(1, 2, 3)) for images" if function in _ratios() else ""
            advice = f"Leave the rows out of its axes{of_images}."
        else:
            continue
        raise WrongUse(rule, advice, loss=getattr(loss, "name", None) or getattr(loss, "__name__", ""))


def _function_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function that a loss of Keras calls, and its options; a loss that has a `call` of its own is its own function."""
    from keras.src.losses.losses import LossFunctionWrapper

    calls = getattr(type(loss), "call", None) is LossFunctionWrapper.call
    return (loss.fn, loss._fn_kwargs) if calls else (loss, {})


def _joins_rows(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function of Keras makes one value of several rows, or weighs one by another; a mean over them does no harm."""
    from keras import losses as of_keras

    axis = options.get("axis")
    if function in _ratios():
        return axis is None or 0 in (axis if isinstance(axis, (list, tuple)) else [axis])
    crossentropies = of_keras.categorical_crossentropy, of_keras.sparse_categorical_crossentropy
    normed = (*crossentropies, of_keras.categorical_focal_crossentropy, of_keras.cosine_similarity)
    return axis == 0 and function in normed


def _ratios() -> tuple[Any, ...]:
    import keras

    return keras.losses.dice, keras.losses.tversky


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
