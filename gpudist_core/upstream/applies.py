"""See what a Keras optimizer applies, and the arguments of `Strategy.run` around it (TensorFlow 2.21, Keras 3.15)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gpudist_core.upstream import patches

Before = Callable[[list[Any], list[Any]], Any]
_calls: list[list[Any]] = []  # of the process: MirroredStrategy runs replicas in threads of their own


def before_apply(optimizer: Any, before: Before) -> Callable[[], None]:
    """Call a function before each apply of an optimizer. Its class stays as it is.

    Args:
        optimizer: A Keras optimizer.
        before: A function of gradients and variables. The update waits for the tensor that it returns.

    Returns:
        A function that ends this.
    """
    import tensorflow as tf

    before = tf.autograph.experimental.do_not_convert(before)  # in the step of a user, autograph would convert it

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        with tf.control_dependencies([before(grads, variables)]):
            return type(optimizer).apply(optimizer, grads, None if trainable_variables is None else variables)

    optimizer.apply = apply

    def end() -> None:
        if vars(optimizer).get("apply") is apply:
            del optimizer.apply

    return end


def counter_of(optimizer: Any) -> Any:
    """Return the variable that counts an optimizer's applies. Its public `iterations` counts updates of several batches."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


def arguments_of_run(replica: int) -> list[Any] | None:
    """Return the tensors with axes among the arguments of the current `Strategy.run` on a replica; None outside of it.

    Args:
        replica: The number of the replica among those of this host.

    Returns:
        The tensors, flattened.
    """
    import tensorflow as tf
    from tensorflow.python.distribute import distribute_utils

    if not _calls:
        return None
    values = (distribute_utils.select_replica(replica, value) for value in _calls[-1])
    return [value for value in values if tf.is_tensor(value) and value.shape.rank != 0 and _has_values(value)]


def _has_values(tensor: Any) -> bool:
    import tensorflow as tf

    return tensor.dtype not in (tf.resource, tf.variant)


def _replacements() -> patches.Replacements:
    from tensorflow.python.distribute import distribute_lib as lib

    for cls in (lib.StrategyBase, lib.Strategy, lib.StrategyV1):
        if "run" in vars(cls):
            yield cls, "run", _noting


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        import tensorflow as tf

        _calls.append(tf.nest.flatten((args, kwargs or {})))
        try:
            return original(self, fn, args, kwargs, options)
        finally:
            _calls.pop()

    return run


of_run = patches.Patches(_replacements)
"""Notes the arguments of `Strategy.run` while a block is active."""
