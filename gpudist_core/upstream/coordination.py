"""Support work that is sent to workers: seeds, and variables in parts (TensorFlow 2.21, Keras 3.15).

A worker may die and its work be repeated, and several workers process one batch. So a random seed is only read there, and never
advanced.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from gpudist_core.state import PerThread
from gpudist_core.upstream import patches
from gpudist_core.upstream.models import plain

_seeds: PerThread[Seeds | None] = PerThread(None)
CALLS_PER_ITEM = 4096


class Seeds:
    """Compute the seeds of one traced function: a generator's n-th draw is n steps after its state.

    Args:
        item: Number of work items since the states were last advanced: an int64 scalar tensor.

    Attributes:
        draws: The number of draws from each generator, by the generator's id, with the generator.
    """

    def __init__(self, item: Any) -> None:
        self._item = item
        self.draws: dict[int, tuple[Any, int]] = {}

    def next(self, generator: Any) -> Any:
        """Return the next seed of a generator without changing its state."""
        _, count = self.draws.get(id(generator), (generator, 0))
        self.draws[id(generator)] = (generator, count + 1)
        state = tf.convert_to_tensor(generator.state)
        further = tf.stack([tf.zeros([], tf.int64), self._item * CALLS_PER_ITEM + count])
        return state + tf.cast(further, state.dtype)


@contextlib.contextmanager
def reading_seeds(item: Any) -> Iterator[Seeds]:
    """Read Keras's seed generators, without advancing them, while this thread traces.

    Args:
        item: As for `Seeds`.

    Yields:
        The seeds that were read.
    """
    seeds = Seeds(item)
    with patches.of_step, _seeds.set(seeds):
        yield seeds


def advance_seeds(draws: dict[int, tuple[Any, int]], items: int | None = None) -> None:
    """Advance the states of generators as if the work had done it.

    Args:
        draws: The draws of a `Seeds`.
        items: Number of finished items; None for one batch, which advances as on one device.
    """
    for generator, count in draws.values():
        value = generator.state.value
        step = count if items is None else items * CALLS_PER_ITEM
        value.assign(tf.convert_to_tensor(value) + tf.cast([0, step], value.dtype))


def replacements() -> patches.Replacements:
    """Return what lets Keras's seed generators be read without advancing them."""
    import keras

    yield keras.random.SeedGenerator, "next", _reading


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def following(self: Any, ordered: bool = True) -> Any:
        seeds = _seeds.value
        return original(self, ordered) if seeds is None else seeds.next(self)

    return following


def parts_of(variable: Any) -> list[Any]:
    """Return the variables that a variable is partitioned into, or the variable itself.

    Args:
        variable: A Keras variable or a `tf.Variable`, perhaps a ShardedVariable from the strategy's partitioner.

    Returns:
        The parts, in order.
    """
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    whole = plain(variable)
    return list(whole.variables) if isinstance(whole, ShardedVariable) else [variable]


def let_be_read(model: Any) -> None:
    """Let a model's partitioned variables be read as arrays, as `get_weights` and `save_weights` do.

    Args:
        model: A Keras model. Its variables get the method that TensorFlow's `ShardedVariable` lacks.
    """
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    for variable in map(plain, getattr(model, "variables", [])):
        if isinstance(variable, ShardedVariable) and not hasattr(variable, "__array__"):
            # Keras (3.8 to 3.15) reads weights with `np.array(variable)` outside of steps, where nothing is replaced.
            variable.__array__ = functools.partial(_read, weakref.ref(variable))


def _read(variable: Any, dtype: Any = None, copy: Any = None) -> Any:
    import numpy as np

    return np.asarray(tf.convert_to_tensor(variable()), dtype)


def is_coordinated(strategy: tf.distribute.Strategy) -> bool:
    """Return whether a strategy is a `ParameterServerStrategy` that works with a ClusterCoordinator."""
    return isinstance(strategy, (tf.distribute.ParameterServerStrategy, tf.distribute.experimental.ParameterServerStrategy))


def num_tasks(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Return the numbers of workers and of parameter servers of a `ParameterServerStrategy`."""
    return int(strategy._num_workers), int(strategy._num_ps)


def variables_of(optimizer: Any) -> list[Any]:
    """Return the TensorFlow variables that a Keras optimizer was built with."""
    return [plain(variable) for variable in optimizer._trainable_variables]
