"""Process the workers' sums on the coordinator: add them, divide once, apply once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gpudist_core.gradients import Clipping, checking_finite, scale
from gpudist_core.parameter_servers.workers import Part, sendable
from gpudist_core.upstream import optimizers


class Updates:
    """Apply every update exactly once, and count every step, as the only writer of the trained variables.

    Args:
        optimizer: The result of `exact_optimizer`.
        variables: The trained variables, with partitioned ones in their parts.
        clip: Clipping before the optimizer's own.
        check_finite: Whether a gradient that is not finite is an error.
    """

    def __init__(self, optimizer: Any, variables: list[Any], clip: Clipping, check_finite: bool) -> None:
        self._optimizer, self._variables, self._clip, self._check_finite = optimizer, variables, clip, check_finite
        self._traced: dict[str, Any] = {}

    def of_batch(self, parts: Sequence[Part]) -> Part:
        """Return the sums of one batch. The model's losses of its inputs are weighted by the batch's number of examples.

        Args:
            parts: The workers' results, in the order of their examples, without the model's outputs; at least one.

        Returns:
            `grads`, `loss` and `weight`.
        """
        if len(parts) == 1 and "own_grads" not in parts[0]:
            return parts[0]
        whole: Part = self._function(f"batch of {len(parts)}", self._whole, list(parts))
        return whole

    def sum(self, first: Part, second: Part) -> Part:
        """Add the sums of two or more batches.

        Args:
            first: A result of `of_batch` or `sum`.
            second: A result of `of_batch` or `sum`.

        Returns:
            Their sum.
        """
        together: Part = self._function("sum", _added, [first, second])
        return together

    def apply(self, part: Part) -> None:
        """Make one update.

        Args:
            part: The sums over all examples of the update.
        """
        self._function("update", self._update, part)

    def _function(self, key: str, function: Any, argument: Any) -> Any:
        """Trace once, for any number of rows in sparse gradients."""
        if key not in self._traced:
            self._traced[key] = tf.function(function, autograph=False).get_concrete_function(_spec(argument))
        return self._traced[key](argument)

    def _whole(self, parts: list[Part]) -> Part:
        whole = _added(parts)
        if "own_grads" not in whole:
            return whole
        units = tf.math.divide_no_nan(whole["weight"], whole["rows"])
        shapes = [v.shape for v in self._variables]
        grads, own = ([_gradient(*pair) for pair in zip(whole[name], shapes, strict=True)] for name in ("grads", "own_grads"))
        together = [_together(g, scale(o, units)) for g, o in zip(grads, own, strict=True)]
        return {"grads": sendable(together), "loss": whole["loss"] + whole["own_loss"] * units, "weight": whole["weight"]}

    def _update(self, part: Part) -> None:
        factor = tf.math.reciprocal_no_nan(part["weight"])
        sums = [_gradient(g, v.shape) for g, v in zip(part["grads"], self._variables, strict=True)]
        grads = [scale(g, factor) for g in sums]
        with (
            checking_finite(on=self._check_finite) as checked,
            optimizers.reducing(self._optimizer, lambda summed, _: summed, self._clip),
        ):
            grads = checked(grads, self._variables)
            self._optimizer.apply_gradients(zip(grads, self._variables, strict=True))


def loss_of(part: Part) -> Any:
    """Return the loss of the batches in a sum: a scalar."""
    return tf.math.divide_no_nan(part["loss"], part["weight"])


def flattened(part: Part) -> dict[str, Any]:
    """Return a part as arrays by name: `grads/0`, or `grads/0/values` and `grads/0/indices`; none without a gradient."""
    arrays: dict[str, Any] = {}
    for name, value in part.items():
        for i, gradient in enumerate(value if name.endswith("grads") else ()):
            if isinstance(gradient, (tuple, list)):
                arrays |= {
                    f"{name}/{i}/{half}": value.numpy() for half, value in zip(("values", "indices"), gradient, strict=False)
                }
            else:
                arrays[f"{name}/{i}"] = gradient.numpy()
        if not name.endswith("grads"):
            arrays[name] = value.numpy()
    return arrays


def unflattened(arrays: Mapping[str, Any], num_variables: int) -> Part:
    """Return the part that `flattened` converted."""

    def gradient(name: str) -> Any:
        if f"{name}/values" in arrays:
            return tuple(tf.convert_to_tensor(arrays[f"{name}/{half}"]) for half in ("values", "indices"))
        return tf.convert_to_tensor(arrays[name]) if name in arrays else ()

    names = {name.split("/")[0] for name in arrays} | {"grads"}
    return {
        name: [gradient(f"{name}/{i}") for i in range(num_variables)]
        if name.endswith("grads")
        else tf.convert_to_tensor(arrays[name])
        for name in sorted(names)
    }


def _added(parts: list[Part]) -> Part:
    return {name: _sum_of(name, [part[name] for part in parts]) for name in parts[0]}


def _sum_of(name: str, values: list[Any]) -> Any:
    if name.endswith("grads"):
        return [functools.reduce(_plus, grads) for grads in zip(*values, strict=True)]
    return functools.reduce(tf.add, values)


def _plus(first: Any, second: Any) -> Any:
    """Add what two workers sent for one variable. Both have the same form, because they ran the same function."""
    if isinstance(first, (tuple, list)):
        return tuple(tf.concat(pair, 0) for pair in zip(first, second, strict=True))
    return first + second


def _together(first: Any, second: Any) -> Any:
    """Add two gradients of one variable; sparse if both are. Slices of the same rows of the data stay one."""
    if first is None or second is None:
        return first if second is None else second
    if not (isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices)):
        return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
    # Keras's optimizers square each slice for itself: two slices where one device has one would be another step.
    as_many = tf.equal(tf.size(first.indices), tf.size(second.indices))
    values, indices = tf.cond(
        as_many,
        lambda: tf.cond(
            tf.reduce_all(tf.equal(first.indices, second.indices)),
            lambda: (first.values + second.values, first.indices),
            lambda: _both(first, second),
        ),
        lambda: _both(first, second),
    )
    return tf.IndexedSlices(values, indices, first.dense_shape)


def _both(first: Any, second: Any) -> tuple[Any, Any]:
    return tf.concat([first.values, second.values], 0), tf.concat([first.indices, second.indices], 0)


def _spec(argument: Any) -> Any:
    """Return the signature that a function is traced for."""
    if isinstance(argument, tuple):
        return tuple(tf.TensorSpec((None, *value.shape[1:]), value.dtype) for value in argument)
    if isinstance(argument, dict):
        return {name: _spec(value) for name, value in argument.items()}
    return [_spec(value) for value in argument] if isinstance(argument, list) else tf.TensorSpec(argument.shape, argument.dtype)


def _gradient(sent: Any, shape: Any) -> Any:
    """Return a worker's gradient in the form that optimizers take."""
    if not isinstance(sent, (tuple, list)):
        return sent
    return tf.IndexedSlices(*sent, tf.constant(shape.as_list(), sent[1].dtype)) if sent else None
