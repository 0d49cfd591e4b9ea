"""Find out where code runs: in which replica of which strategy, or outside of any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.replicas import Replicas, replicas_of


def check_strategy(strategy: tf.distribute.Strategy, what: str) -> Replicas:
    """Return the replicas of a strategy that can hold a separate value on each replica.

    Args:
        strategy: The `strategy` argument.
        what: The name of the caller, for the message.

    Returns:
        The replicas.

    Raises:
        UsageError: For any other strategy or object.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise UsageError(f"{what} needs a tf.distribute.Strategy", "gd.make_strategy() returns one.", strategy=strategy)
    if "ParameterServer" in type(strategy).__name__:
        raise UsageError(
            f"{what} needs a strategy with synchronous replicas",
            "With parameter servers, give the strategy a variable_partitioner.",
            strategy=type(strategy).__name__,
        )
    return replicas_of(strategy)


def replica_in(strategy: tf.distribute.Strategy) -> int | None:
    """Return the number of the replica that runs or is traced here, or None outside of the strategy's replicas.

    Args:
        strategy: The strategy.

    Returns:
        The replica's number over all hosts.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.strategy is not strategy:
        return None
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if number is None and context.num_replicas_in_sync == 1 else int(number)


@contextlib.contextmanager
def meeting(what: str) -> Iterator[None]:
    """Mark a block in which the replicas exchange values. TensorFlow allows that only in the step's own function.

    Args:
        what: The name of the caller, for the message.

    Raises:
        UsageError: In a nested function, loop or condition.
    """
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise UsageError(
            f"{what} must be called directly in the function that Strategy.run gets",
            "Move the call out of the inner tf.function, loop (tf.while_loop, a Keras RNN) or condition. Call it once for all "
            "iterations of a loop.",
            inside="a function within it",
        ) from error


def check_not_in_a_step(what: str) -> None:
    """Raise inside `Strategy.run`, where each replica would create the object in each step."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise UsageError(f"{what} must be made once, for all replicas", "Make it before Strategy.run.", inside="Strategy.run")


def check_eager(what: str) -> None:
    """Raise in a graph: a call between steps must not become part of every step."""
    if not tf.executing_eagerly():
        raise UsageError(
            f"{what} must be called between steps", "Call it outside of tf.function and Strategy.run.", executing="a graph"
        )
