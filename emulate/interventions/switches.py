"""Switch a suspect off, so that the absence of what it does confirms it; and enlarge learning rates.

One switch lets BatchNormalization take its statistics from the rows of all replicas, another, on one device, from each
replica's share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulate import upstream
from emulate.imports import tf
from emulate.point import around, instead_of
from emulate.recorder import BY_SHARE, CENTERED, IN_32_BITS, SYNCHRONIZED


def by_share(*splits: Sequence[int]) -> str:
    """Return the switch that normalizes on one device as replicas do, each its own rows.

    Args:
        *splits: How many rows of a full batch each replica has, then the same of batches of another size; of a size that is not
            there the last replicas have fewer.

    Returns:
        The switch, short even for many replicas.
    """
    return BY_SHARE + ",".join("+".join(f"{len(list(some))}x{number}" for number, some in groupby(rows)) for rows in splits)


def splits_of(switches: Collection[str]) -> list[list[int]]:
    """Return each replica's rows of a full batch, then of others; nothing where the statistics are those of the whole batch."""
    splits = next((switch.removeprefix(BY_SHARE) for switch in switches if switch.startswith(BY_SHARE)), "")
    parts = [[part.split("x") for part in split.split("+")] for split in splits.split(",") if split]
    return [[int(number) for many, number in split for _ in range(int(many))] for split in parts]


def rows_of_shares(rows: int, splits: Sequence[Sequence[int]]) -> list[int]:
    """Return how many of a batch's rows belong to each share: all that it may have, as long as there are any."""
    known = next((split for split in splits if sum(split) == rows), None)
    ends = np.minimum(np.cumsum(splits[0][:-1], dtype=np.int64), rows)
    return [int(number) for number in (np.diff([0, *ends, rows]) if known is None else known)]


def permutation(generator: np.random.Generator, rows: int, splits: Sequence[Sequence[int]]) -> NDArray[np.int_]:
    """Return the rows of a batch in another order, in which each stays in its share.

    Args:
        generator: Draws the order.
        rows: How many there are.
        splits: Of each share the rows of a full batch, then of others; nothing where all rows are together.

    Returns:
        The numbers of the rows.
    """
    ends: Sequence[int] = list(np.cumsum(rows_of_shares(rows, splits)[:-1])) if splits else []
    return np.concatenate([generator.permutation(part) for part in np.split(np.arange(rows), ends)])


def _before_call(cls: Any, prepare: Callable[[Any, Any], Any]) -> None:
    """Call a layer's class with what `prepare` makes of the layer and its inputs."""

    @around(cls, "call")
    def call(original: Any, self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, prepare(self, inputs), *args, **kwargs)


def _synchronized(layer: Any, inputs: Any) -> Any:
    layer.synchronized = True
    return inputs


def _centered(layer: Any, inputs: Any) -> Any:
    """Take the mean of all rows off the inputs of a synchronized layer: Keras's E(x^2) - E(x)^2 cancels where it is large."""
    context, size = tf.distribute.get_replica_context(), len(inputs.shape)
    axes = [place for place in range(size) if not {place, place - size} & {*tf.nest.flatten(layer.axis)}]
    # In 8 bits each time, so that the mean is the same however the rows are added up.
    for _ in range(3 if context is not None and getattr(layer, "synchronized", False) else 0):
        sums = [tf.reduce_sum(values, axes, keepdims=True) for values in (inputs, tf.ones_like(inputs))]
        whole, count = context.all_reduce("SUM", [tf.stop_gradient(value) for value in sums])
        inputs -= tf.cast(tf.cast(tf.math.divide_no_nan(whole, count), tf.bfloat16), inputs.dtype)
    return inputs


def _normalize_by_share(cls: Any, splits: Sequence[Sequence[int]]) -> None:
    signature = inspect.signature(cls.call)

    @around(cls, "call")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        training = arguments.get("training")
        if training is None or training is False or not self.trainable or upstream.is_synchronized(self, arguments.get("mask")):
            return original(self, *args, **kwargs)
        return _of_shares(original, arguments, self.non_trainable_variables, splits)


def _of_shares(original: Any, arguments: dict[str, Any], variables: Sequence[Any], splits: Sequence[Sequence[int]]) -> Any:
    """Call a layer with one share after the other, each from the same statistics; what they leave becomes one as on replicas.

    Args:
        original: The layer's `call`.
        arguments: Its arguments by name.
        variables: The layer's moving statistics.
        splits: Rows of a full batch of each replica, then of others.

    Returns:
        The outputs, in the order of the rows.
    """
    inputs = tf.convert_to_tensor(arguments["inputs"])
    numbers = numbers_of_shares(tf.shape(inputs)[0], splits)
    masks = [None] * len(splits[0]) if arguments.get("mask") is None else tf.split(arguments["mask"], numbers)
    before = [tf.identity(variable) for variable in variables]
    outputs, after = [], []
    for part, mask in zip(tf.split(inputs, numbers, num=len(splits[0])), masks, strict=True):
        outputs.append(original(**{**arguments, "inputs": part, **({} if mask is None else {"mask": mask})}))
        after.append([tf.identity(variable) for variable in variables])
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    for variable, *values in zip(variables, *after, strict=True):
        variable.assign(_aggregated(variable, values))
    output = tf.concat(outputs, 0)
    output.set_shape(inputs.shape)
    return output


def _aggregated(variable: Any, values: Sequence[Any]) -> Any:
    """Return what the first replica's variable holds after replicas have assigned these values.

    Keras 3 keeps each replica's own or the first one's; the variables of tf_keras are combined only where they are read.
    """
    inner = getattr(variable, "value", variable)
    owner = variable if callable(inner) else inner
    if getattr(owner, "synchronization", None) == tf.VariableSynchronization.ON_READ:
        return values[0]
    how = getattr(owner, "aggregation", None)
    if how == tf.VariableAggregation.MEAN:
        return tf.add_n(values) / len(values)
    return tf.add_n(values) if how == tf.VariableAggregation.SUM else values[0]


def numbers_of_shares(rows: Any, splits: Sequence[Sequence[int]]) -> Any:
    """Return `rows_of_shares` for a number of rows that is a tensor."""
    ends = tf.minimum(tf.cumsum(tf.constant(splits[0][:-1], tf.int32)), rows)
    numbers = tf.concat([ends, [rows]], 0) - tf.concat([[0], ends], 0)
    for split in splits[1:]:
        numbers = tf.where(tf.equal(rows, sum(split)), tf.constant(split, tf.int32), numbers)
    return numbers


def switch_layers(package: str, switches: Collection[str]) -> None:
    """Change the layers and policies of an imported Keras as the switches say."""
    if SYNCHRONIZED in switches:
        _before_call(upstream.batchnorm_class(package), _synchronized)
    if CENTERED in switches:
        _before_call(upstream.batchnorm_class(package), _centered)
    if splits := splits_of(switches):
        _normalize_by_share(upstream.batchnorm_class(package), splits)
    if IN_32_BITS in switches:
        for cls in upstream.policy_classes():

            @around(cls, "_parse_name")
            def parse_name(original: Any, self: Any, name: Any) -> Any:  # the name stays, and a loss is scaled as before
                return tuple("float32" if dtype in ("float16", "bfloat16") else dtype for dtype in original(self, name))

    if "no-regularization" in switches:
        for cls in upstream.layer_classes():

            @instead_of(cls, "losses")
            def losses(original: Any, self: Any) -> Any:
                return [0.0 * loss for loss in original(self)]


def enlarge_rates(times: float) -> None:
    """Make the learning rate of all Keras 3 optimizers so many times as large."""
    for cls, method in upstream.rate_makers():

        @around(cls, method)
        def current(original: Any, self: Any) -> Any:
            return tf.convert_to_tensor(original(self)) * times
