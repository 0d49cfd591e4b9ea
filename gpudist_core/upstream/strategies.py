"""Private names of TensorFlow that strategies rest on (2.21); tests/core/strategies/test_upstream.py guards each."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

# More than the collective groups that one strategy makes; those of a ring of our own come after those of TensorFlow's.
_KEYS_APART, _OWN_RING = 10_000, 5_000
_OF_SEVERAL_HOSTS = 1_000_000  # from where on strategies of several hosts count, apart from those of one


def is_initialized() -> bool:
    """Whether TensorFlow's runtime is up, after which no server for collectives can be started."""
    return _context()._context_handle is not None


def has_collective_server() -> bool:
    """Whether this process is a member of a cluster already: a second strategy then needs no new server."""
    return _context()._collective_ops_server_def is not None


def is_in_cluster(spec: Any) -> bool:
    """Whether the cluster that this process is a member of is this one.

    Args:
        spec: A `tf.train.ClusterSpec`.

    Returns:
        The same jobs with the same tasks.
    """
    return bool(_context()._collective_ops_server_def.cluster == spec.as_cluster_def())


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Within, a server for collectives may start; SIGTERM does afterwards what it did before, which is to end the process.

    The server takes the signal for a notifier of its own, past Python's handlers: the process lives on, and a handler that
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
    """Within, a MultiWorkerMirroredStrategy leaves the collectives of this process as they are, and has keys of its own.

    TensorFlow starts them anew for each strategy. A host that is faster than the leader then waits for ever in its first
    collective, as the leader forgets that it has asked; and the older strategies go on counting the same keys.
    """
    import tensorflow as tf

    context = _context()

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
    """The sums over all replicas, without the order in which variables are read and updated being lost.

    TensorFlow's own `all_reduce` hands all sums on through one IdentityN, for their gradient. Where replicas are summed
    tensor by tensor, Grappler takes that for a way from each gradient to each update, drops the edges by which an update
    waits until its variable was read, and drops the IdentityN after that (2.21): a loss that is linear in the outputs (a
    critic's) is then made of weights that are updated already, now and then.

    Args:
        context: The replica's.
        values: Tensors, or `tf.IndexedSlices`, of one dtype.
        differentiable: Whether a gradient may be taken of the sums; never of those of sparse values.

    Returns:
        The sums, in their order.
    """
    import tensorflow as tf

    if tf.executing_eagerly() or not merges(context.strategy):  # collectives sum all in one piece
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, values))

    def batch(strategy: Any, *flat: Any) -> Any:
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(value, value) for value in flat])

    sums = list(context.merge_call(batch, args=values))
    return [_with_gradient(context, *pair) for pair in zip(values, sums, strict=True)] if differentiable else sums


def merges(strategy: Any) -> bool:
    """Whether replicas are summed by a merge call, of all of them and in the step's own graph alone; collectives need none."""
    return bool(strategy.extended._use_merge_call())


def _with_gradient(context: Any, value: Any, total: Any) -> Any:
    """The sum, whose gradient is the sum of the replicas' gradients of it.

    TensorFlow looks for variables behind what a custom gradient gives (2.21). A sum of tensors would lead it through the graphs
    of all other replicas, for each sum anew and in time that grows with the square of their size; it ends where there is no
    gradient.
    """
    import tensorflow as tf

    @tf.custom_gradient
    def summed(_: Any) -> Any:
        return tf.stop_gradient(total), lambda upstream: context.all_reduce(tf.distribute.ReduceOp.SUM, upstream)

    return total if isinstance(value, tf.IndexedSlices) else summed(value)


def _context() -> Any:
    from tensorflow.python.eager import context

    return context.context()


def abort_collectives(text: str) -> None:
    """End what waits in a collective of this process, from another thread; all later ones raise the same.

    Args:
        text: The message of the `tf.errors.DeadlineExceededError`.
    """
    import tensorflow as tf

    _context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, text)


def new_collective_keys() -> int:
    """Give the next MirroredStrategy collective keys of its own.

    All count from 0 in TensorFlow: a group of another size under a key that is taken aborts all collectives of the process.

    Returns:
        The first key of `ring`.
    """
    import tensorflow as tf

    tf.distribute.MirroredStrategy._collective_key_base += _KEYS_APART
    return int(tf.distribute.MirroredStrategy._collective_key_base) + _OWN_RING


def ring(devices: Sequence[str], options: Any, first_key: int) -> Any:
    """The collective all-reduce of one process, which MirroredStrategy makes without a choice of options.

    Args:
        devices: The names of the devices.
        options: A `tf.distribute.experimental.CommunicationOptions`.
        first_key: From `new_collective_keys`.

    Returns:
        A `tf.distribute.CrossDeviceOps`.
    """
    from tensorflow.python.distribute import cross_device_ops, cross_device_utils

    keys = cross_device_utils.CollectiveKeys(group_key_start=first_key)
    return cross_device_ops.CollectiveAllReduce(list(devices), len(devices), options, keys)
