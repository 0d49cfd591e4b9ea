"""Limit how long a step may wait for other hosts.

TensorFlow 2.21 detects a host that is gone. For a host that is alive but does not come, it has a time limit of each collective.
But it starts a thread for each collective, which sleeps as long as the limit even if the sum is there at once: tens of
thousands of threads in a training of ten minutes. So a step is timed as a whole, by one thread that ends with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from gpudist_core import state
from gpudist_core.replicas import replicas_of
from gpudist_core.upstream import key_value
from gpudist_core.upstream import runtime as upstream

_ASKED_SECONDS = 5.0
_KEY = "gpudist_core/waits/"


def set_limit(strategy: tf.distribute.Strategy, seconds: float | None) -> None:
    """Limit the duration of the steps that gpudist_core makes with a strategy of several hosts.

    Args:
        strategy: The strategy.
        seconds: The limit of one step in seconds; None for no limit.
    """
    state.limit_of[strategy] = seconds


@contextlib.contextmanager
def limited(strategy: tf.distribute.Strategy, steps: int = 1) -> Iterator[None]:
    """Stop a call that takes longer than its limit: it raises `tf.errors.DeadlineExceededError` and names the missing hosts.

    After that, collectives no longer work in this process.

    Args:
        strategy: The strategy in which the call runs.
        steps: The number of steps of the call.
    """
    seconds = state.limit_of.get(strategy)
    if seconds is None or not tf.executing_eagerly():
        yield
        return
    timer = threading.Timer(seconds * steps, _give_up, (strategy, seconds * steps))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(strategy: tf.distribute.Strategy, seconds: float) -> None:
    """Tell the other hosts that this host waits, ask which others wait, and stop the step."""
    replicas = replicas_of(strategy)
    away: list[int] = []
    if key_value.is_available():
        key_value.put(f"{_KEY}{replicas.host}", "here")
        others = (host for host in range(replicas.num_hosts) if host != replicas.host)
        away = [host for host in others if key_value.get(f"{_KEY}{host}", _ASKED_SECONDS) is None]
    who = (
        f"host {', '.join(map(str, away))} is not in a step"
        if away
        else "all hosts are in a step, but in different collectives"
    )
    upstream.abort_collectives(
        "All hosts must make the same steps, each within the time limit. Received: "
        f"timeout_seconds={seconds:g}, host={replicas.host}, {who}. Find out where those hosts are (py-spy dump). Give every "
        "host "
        "the same number of batches, and let no host alone run code that waits for all hosts. Or allow more time: "
        "make_strategy(timeout_seconds=...)."
    )
