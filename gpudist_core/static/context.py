"""Where code runs: in which replica of which strategy, or outside of any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpudist_core.errors import WrongUse
from gpudist_core.replicas import Replicas, replicas_of


def check_strategy(strategy: Any, what: str) -> Replicas:
    """The replicas of a strategy whose every replica can hold something of its own.

    Args:
        strategy: What the user gave.
        what: Who asks, for the message.

    Returns:
        The replicas.

    Raises:
        WrongUse: For anything else.
    """
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.Strategy):
        raise WrongUse(f"{what} needs a tf.distribute.Strategy", "gd.make_strategy() returns one.", strategy=strategy)
    if "ParameterServer" in type(strategy).__name__:
        raise WrongUse(
            f"{what} needs a strategy whose replicas run in step",
            "With parameter servers give the strategy a variable_partitioner.",
            strategy=type(strategy).__name__,
        )
    return replicas_of(strategy)


def replica_in(strategy: Any) -> int | None:
    """The number of the replica that runs or is traced here, None outside of the strategy's replicas.

    Args:
        strategy: The strategy.

    Returns:
        The replica's number over all hosts.
    """
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.strategy is not strategy:
        return None
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if number is None and context.num_replicas_in_sync == 1 else int(number)


def is_in_other_strategy(strategy: Any) -> bool:
    """Whether this runs in a replica of another strategy (TensorFlow's default one is nobody's)."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return context is not None and context.strategy is not strategy and tf.distribute.has_strategy()


@contextlib.contextmanager
def meeting(what: str) -> Iterator[None]:
    """Within, the replicas exchange something, for which TensorFlow lets them meet in the step's own function alone.

    Args:
        what: Who asks, for the message.

    Raises:
        WrongUse: In a function, a loop or a condition within it.
    """
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise WrongUse(
            f"{what} is called where all replicas meet, in the function that Strategy.run is given",
            "Call it outside of the tf.function, the loop (tf.while_loop, a Keras RNN's) or the condition there, for all "
            "rounds of a loop at once.",
            inside="a function within it",
        ) from error


def check_not_in_a_step(what: str) -> None:
    """Raise inside of `Strategy.run`: what is made there would be made by each replica, and in each step."""
    import tensorflow as tf

    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise WrongUse(f"{what} is made once, for all replicas", "Make it before Strategy.run.", inside="Strategy.run")


def check_eager(what: str) -> None:
    """Raise where a graph is traced: what is done once must not become part of every step."""
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise WrongUse(f"{what} is for between steps", "Call it outside of tf.function and Strategy.run.", executing="a graph")
