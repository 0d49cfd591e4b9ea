"""Use private names of TensorFlow 2.21 for the runtime of this process: its devices, collectives, seeds.

tests/core/strategies/test_upstream.py and tests/core/checkpoints/test_upstream.py test each of these names.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def eager_context() -> Any:
    """Return TensorFlow's eager context, of which there is one in a process."""
    from tensorflow.python.eager import context

    return context.context()


# More than the collective groups that one strategy makes; those of a ring of our own come after those of TensorFlow's.
_KEYS_APART, _OWN_RING = 10_000, 5_000
_OF_SEVERAL_HOSTS = 1_000_000  # from where on strategies of several hosts count, apart from those of one


def is_initialized() -> bool:
    """Return whether TensorFlow's runtime has started. After that, no server for collectives can be started."""
    return eager_context()._context_handle is not None


def has_collective_server() -> bool:
    """Return whether this process already belongs to a cluster: a second strategy then needs no new server."""
    return eager_context()._collective_ops_server_def is not None


def is_in_cluster(spec: Any) -> bool:
    """Return whether this process belongs to the given cluster.

    Args:
        spec: A `tf.train.ClusterSpec`.

    Returns:
        True if it has the same jobs with the same tasks.
    """
    return bool(eager_context()._collective_ops_server_def.cluster == spec.as_cluster_def())


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Restore the action of SIGTERM after a server for collectives has started in this block.

    The server installs its own notifier for the signal, past Python's handlers: the process then survives, and a handler that
    the program has installed before is never called.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def beside_other_strategies() -> Iterator[None]:
    """Let a MultiWorkerMirroredStrategy keep the collectives of this process, with its own keys.

    TensorFlow restarts them for each strategy. Then a host that is faster than the leader waits forever in its first
    collective, because the leader forgets its request. And older strategies would continue to use the same keys.
    """
    context = eager_context()

    def find_devices(server_def: Any) -> None:
        context.ensure_initialized()
        with context._initialize_lock:
            context._initialize_logical_devices()
            context._clear_caches()

    cls = tf.distribute.MultiWorkerMirroredStrategy
    cls._collective_key_base = max(cls._collective_key_base, _OF_SEVERAL_HOSTS) + _KEYS_APART
    context.enable_collective_ops = find_devices
    try:
        yield
    finally:
        del context.enable_collective_ops
        cls._collective_key_base += _KEYS_APART  # for one that is made otherwise


def all_reduce(context: Any, values: list[Any], *, differentiable: bool) -> list[Any]:
    """Return the sums over all replicas, and keep the order in which variables are read and updated.

    TensorFlow's own `all_reduce` passes all sums through one IdentityN, for their gradient. If replicas are summed tensor by
    tensor, Grappler (2.21) takes that for a path from each gradient to each update, removes the edges by which an update waits
    until its variable was read, and then removes the IdentityN. A loss that is linear in the outputs (a critic's) is then
    sometimes computed from updated weights.

    Args:
        context: The replica's context.
        values: Tensors, or `tf.IndexedSlices`, of one dtype.
        differentiable: Whether the sums must be differentiable; not supported for sparse values.

    Returns:
        The sums, in order.
    """
    if tf.executing_eagerly() or not merges(context.strategy):  # collectives sum all in one piece
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, values))

    def batch(strategy: tf.distribute.Strategy, *flat: Any) -> Any:
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(value, value) for value in flat])

    sums = list(context.merge_call(batch, args=values))
    return [_with_gradient(context, *pair) for pair in zip(values, sums, strict=True)] if differentiable else sums


def merges(strategy: tf.distribute.Strategy) -> bool:
    """Return whether replicas are summed by a merge call, which works only in the step's own graph."""
    return bool(strategy.extended._use_merge_call())


def _with_gradient(context: Any, value: Any, total: Any) -> Any:
    """Return the sum, whose gradient is the sum of the replicas' gradients of it.

    TensorFlow 2.21 looks for variables behind the result of a custom gradient. A sum of tensors would lead it through the
    graphs of all other replicas, in time that grows with the square of their size. It stops at a tensor without a gradient.
    """

    @tf.custom_gradient
    def summed(_: Any) -> Any:
        return tf.stop_gradient(total), lambda upstream: context.all_reduce(tf.distribute.ReduceOp.SUM, upstream)

    return total if isinstance(value, tf.IndexedSlices) else summed(value)


def abort_collectives(text: str) -> None:
    """Abort the collectives of this process from another thread. All later collectives raise the same error.

    Args:
        text: The message of the `tf.errors.DeadlineExceededError`.
    """
    eager_context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, text)


def new_collective_keys() -> int:
    """Give the next MirroredStrategy its own collective keys.

    All strategies count from 0 in TensorFlow: a group of another size under a used key aborts all collectives of the process.

    Returns:
        The first key for `ring`.
    """
    tf.distribute.MirroredStrategy._collective_key_base += _KEYS_APART
    return int(tf.distribute.MirroredStrategy._collective_key_base) + _OWN_RING


def ring(devices: Sequence[str], options: Any, first_key: int) -> Any:
    """Return the collective all-reduce of one process with options, which MirroredStrategy does not let you choose.

    Args:
        devices: The names of the devices.
        options: A `tf.distribute.experimental.CommunicationOptions`.
        first_key: The result of `new_collective_keys`.

    Returns:
        A `tf.distribute.CrossDeviceOps`.
    """
    from tensorflow.python.distribute import cross_device_ops, cross_device_utils

    keys = cross_device_utils.CollectiveKeys(group_key_start=first_key)
    return cross_device_ops.CollectiveAllReduce(list(devices), len(devices), options, keys)


def op_seeds() -> dict[str, Any]:
    """Return what the seeds of the next operations without their own seed depend on (`tf.random.set_seed`)."""
    context = eager_context()
    if context._seed is None:
        return {"seed": None, "state": None}
    version, words, gauss = context._rng.getstate()
    return {"seed": context._seed, "state": [version, np.array(words, np.uint32), gauss]}


def restore_op_seeds(state: dict[str, Any]) -> None:
    """Restore what `op_seeds` returned."""
    context = eager_context()
    if state["seed"] is not None:
        context._set_global_seed(int(state["seed"]))
        version, words, gauss = state["state"]
        context._rng.setstate((int(version), tuple(int(word) for word in words), gauss))


def keras_global_generator(make: bool = False) -> Any:
    """Return the `keras.random.SeedGenerator` of Keras functions without their own generator.

    Args:
        make: Whether to make it if nothing has drawn from it yet.

    Returns:
        The generator, or None.
    """
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if make:
        return seed_generator.global_seed_generator()
    # Keras 3.12, the last for Python 3.10, has no name for the name.
    return global_state.get_global_attribute(getattr(seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator"))


def flat_layers(model: Any) -> list[Any]:
    """Return a Keras model and all its layers, each once; an empty list for other models."""
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []


def begin_at(model: Any, epoch: int | None) -> None:
    """Let Keras's `fit`, after `on_train_begin`, continue with an epoch, as Keras's own BackupAndRestore does.

    Args:
        model: The model.
        epoch: The epoch, from 0; None for the one that `fit` was given.
    """
    model._initial_epoch = epoch
