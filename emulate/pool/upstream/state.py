"""Reset what TensorFlow and Keras count and keep while programs run: generators, names, caches, collectives."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

from emulate.devices import strategies_made
from emulate.pool.upstream.runtime import context, is_up

_OUR_GROUPS = 2_000_000_000  # keys of groups: strategies count theirs from below
_instances = itertools.count(1)
_ASKED_WHILE_TRACING = "has no attr named"  # how TensorFlow asks each operation that it traces what it only reads
_errors: list[str] = []  # kinds of errors of operations that a job has seen


def watch_errors() -> None:
    """Remember that an operation failed; called once in a process, when TensorFlow has been imported."""
    from tensorflow.python.framework import errors_impl

    real = errors_impl.OpError.__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        is_end_of_data = isinstance(self, errors_impl.OutOfRangeError)
        if not is_end_of_data and _ASKED_WHILE_TRACING not in str(self.message):
            _errors.append(type(self).__name__)

    errors_impl.OpError.__init__ = init


def forget_seeds() -> None:
    """Reset the generators of NumPy, TensorFlow and Keras to the unseeded state after a start."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if "tensorflow" in sys.modules:
        import tensorflow as tf
        from tensorflow.python.ops import stateful_random_ops

        tf.random.set_seed(None)
        stateful_random_ops.global_generator = None
    if (legacy := sys.modules.get("tf_keras.src.backend")) is not None and hasattr(legacy._SEED_GENERATOR, "generator"):
        del legacy._SEED_GENERATOR.generator


def forget_names() -> None:
    """Reset Keras's layer names, the default graph, and kernels with their state."""
    if (keras := sys.modules.get("keras")) is not None:
        keras.utils.clear_session(free_memory=False)
    if (legacy := sys.modules.get("tf_keras")) is not None:
        legacy.backend.clear_session()
    if is_up():
        context()._clear_caches()
        context().clear_kernel_cache()


def collectives_fail(host: int) -> str:
    """Return why collectives no longer work in this process: a failed one may break all later ones.

    A program that swallowed the error leaves nothing else to see. What is tried is a sum over this host alone.
    """
    had_errors = bool(_errors)
    _errors.clear()
    if not is_up() or not had_errors or not (strategies_made() or context()._collective_ops_server_def):
        return ""
    import tensorflow as tf
    from tensorflow.python.ops import gen_collective_ops

    size, group, instance = (tf.constant(number) for number in (1, _OUR_GROUPS + host, next(_instances)))
    try:
        gen_collective_ops.collective_reduce_v2(
            tf.ones([1]), size, group, instance, ordering_token=[], merge_op="Add", final_op="Id", communication_hint="auto"
        )
    except tf.errors.OpError as error:
        return f"collectives fail since one did ({error.message[:200]})"
    return ""
