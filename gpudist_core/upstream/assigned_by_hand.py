"""Make what a custom step assigns to trained variables depend on the gradients of all replicas.

A custom step may compute weights from gradients itself (`w.assign_sub(rate * gradient)`, the ascent of sharpness-aware
minimization). It has a replica's part of them, and would give each replica other weights. So the assigned value is recomputed
from the gradients of all replicas. Values that do not depend on gradients (clipped weights, averages of weights) are unchanged.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from gpudist_core import share as shares
from gpudist_core.gradients import reduction
from gpudist_core.upstream import layer_state, strategies
from gpudist_core.upstream.parts import Parts
from gpudist_core.upstream.patches import Replacements

Current = Callable[[], tuple[Parts, shares.Share] | None]


def replacements(current: Current) -> Replacements:
    """Return what lets Keras's variables and collectives know gradients.

    Args:
        current: As for `clipping_by_hand.replacements`.

    Returns:
        Owners, names and replacements.
    """
    import tensorflow as tf
    from keras.src import backend

    meeting, context = functools.partial(_meeting, current), tf.distribute.ReplicaContext
    return [
        (backend.Variable, "_direct_assign", functools.partial(_assigning, current)),
        *((context, name, meeting) for name in ("all_reduce", "all_gather", "merge_call")),
        (strategies, "all_reduce", meeting),
    ]


def _assigning(current: Current, assign: Any) -> Any:
    @functools.wraps(assign)
    def direct_assign(self: Any, value: Any) -> Any:
        import tensorflow as tf

        now = current()
        if now is not None and not reduction.is_sharded(self):
            value = tf.convert_to_tensor(value)
            value = _of_all(*now, self, value) if now[0] else value
            _look_for_rows(now[0], self, value)
        return assign(self, value)

    return direct_assign


def _meeting(current: Current, original: Any) -> Any:
    """Mark the results of collectives: they are no parts of gradients."""

    @functools.wraps(original)
    def meet(self: Any, *args: Any, **kwargs: Any) -> Any:
        value, now = original(self, *args, **kwargs), current()
        if now is not None:
            now[0].remember_same(value)
        return value

    return meet


def _of_all(parts: Parts, share: shares.Share, variable: Any, value: Any) -> Any:
    import tensorflow as tf

    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    if tf.executing_eagerly():
        if variable.trainable:
            _compare(share, variable, value)
    elif parts.descends(value):
        if not variable.trainable:  # it may add up parts for an optimizer
            parts.remember_keeper(variable._value)
        elif share.can_meet():
            return parts.whole(value)
        else:
            _warn(variable, "Assign outside of loops, branches and functions of the graph, where collectives do not work.")
    return value


def _look_for_rows(parts: Parts, variable: Any, value: Any) -> None:
    """Warn of an assigned value that depends on this replica's examples: nobody knows how to combine it over the replicas."""
    if not layer_state.is_of_rows(variable) or layer_state.in_call_of_a_layer() or not parts.is_of_rows(value):
        return
    warnings.warn(
        "A custom step must assign the same value to a variable on all replicas. Received: "
        f"variable={variable.path!r}, computed from each replica's own examples. From now on each replica has another value. "
        "Combine "
        "the values first: tf.distribute.get_replica_context().all_reduce('MEAN', value) of means over equal shares, "
        "'SUM' of sums and counts, all_gather(rows, axis=0) of examples.",
        stacklevel=2,
    )


def _compare(share: shares.Share, variable: Any, value: Any) -> None:
    """Compare a value with the first replica's: without a graph nobody knows what it is computed from."""
    import tensorflow as tf

    is_first = tf.equal(share.replica, 0)
    of_first = reduction.all_reduce(tf.where(is_first, value, tf.zeros_like(value)))
    if not is_first and bool(tf.reduce_any((of_first != value) & ~(tf.math.is_nan(of_first) & tf.math.is_nan(value)))):
        _warn(
            variable,
            "Leave run_eagerly out: in a graph gpudist computes the assigned value from the gradients of all replicas.",
        )


def _warn(variable: Any, advice: str) -> None:
    warnings.warn(
        "A custom step must assign the same value to a trained variable on all replicas. Received: "
        f"variable={variable.path!r}, computed from the gradients of each replica's own examples. From now on each replica "
        "has other "
        f"weights. {advice}",
        stacklevel=2,
    )
