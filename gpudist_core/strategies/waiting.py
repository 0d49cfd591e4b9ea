"""Limit how long a task waits for the other tasks of its cluster, before the training and in a step.

TensorFlow waits without a message for a task that never starts. It (2.21) detects a host that is gone. For a host that is alive
but does not come, it has a time limit of each collective. But it starts a thread for each collective, which sleeps as long as
the limit even if the sum is there at once: tens of thousands of threads in a training of ten minutes. So a step is timed as a
whole, by one thread that ends with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import tensorflow as tf

from gpudist_core import state
from gpudist_core.errors import Unavailable
from gpudist_core.replicas import replicas_of
from gpudist_core.upstream import key_value
from gpudist_core.upstream import runtime as upstream

_PROBE_SECONDS = 2.0  # for an address that swallows packets
_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 10.0, 30.0
_START_SECONDS = 5.0
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def wait_for(peers: Mapping[str, str], own_address: str | None, leader: str | None, timeout_seconds: float | None) -> None:
    """Wait until every peer has answered or connected, and report on stderr for whom it waits.

    Each task must listen before TensorFlow's server starts, because the server blocks. So a plain socket listens at its address
    until all tasks are there.

    Args:
        peers: The name of each peer and its address `host:port`.
        own_address: The address at which the others connect to this task; None if nobody connects.
        leader: The name of the task whose server must start before this one; None for the leader itself.
        timeout_seconds: How long to wait, in seconds; None for no limit.

    Raises:
        Unavailable: If a peer does not answer in time, which the text names, or if this task's port is in use.
    """
    begin, next_word = time.monotonic(), _FIRST_WORD_SECONDS
    missing = dict.fromkeys(peers, "not asked yet")
    with _listening(own_address), ThreadPoolExecutor(min(32, len(peers) or 1)) as pool:
        for pause in itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1])):
            whys = pool.map(lambda name: _why_silent(peers[name]), missing)
            missing = {name: why for name, why in zip(list(missing), whys, strict=True) if why}
            waited = time.monotonic() - begin
            if not missing:
                break
            if timeout_seconds is not None and waited > timeout_seconds:
                raise Unavailable(_never(missing, peers, timeout_seconds))
            if waited > next_word:
                next_word = waited + _NEXT_WORD_SECONDS
                print(f"gpudist_core: waiting {waited:.0f} s for {_listed(missing, peers)}", file=sys.stderr, flush=True)
            time.sleep(pause)
        if leader is not None:
            _let_start(peers[leader])


def _let_start(address: str) -> None:
    """Wait a few seconds at most for TensorFlow's server there: a client that comes too early tries again after a second."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), _connection(address) as connection:
            connection.settimeout(max(0.01, end - time.monotonic()))
            if connection.recv(1):  # gRPC speaks first; the socket in its place says nothing and is closed
                return
        time.sleep(0.01)


def _why_silent(address: str) -> str | None:
    """Return why nobody answers at the address; None if somebody does."""
    try:
        with _connection(address):
            return None
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS)


@contextmanager
def _listening(address: str | None) -> Iterator[None]:
    """Answer the connections of other tasks. The kernel completes a connection even if nobody accepts it."""
    if address is None:
        yield
        return
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        raise Unavailable(
            f"This task's port must be free. Received: address={address!r}, {os.strerror(error.errno or 0)}. Stop the program "
            "that uses it (perhaps left over from an earlier run), or give this task another port."
        ) from error
    with server:
        yield


def _never(missing: Mapping[str, str], peers: Mapping[str, str], timeout_seconds: float) -> str:
    return (
        f"Every task of a cluster must start within timeout_seconds. Received: timeout_seconds={timeout_seconds:g}, and "
        f"{len(missing)} of {len(peers)} other tasks never answered: {_listed(missing, peers)}. Start the program there too "
        "(or find out why it stopped), check the addresses and the firewall, or allow more time: "
        "make_strategy(timeout_seconds=...)."
    )


def _listed(missing: Mapping[str, str], peers: Mapping[str, str]) -> str:
    shown = [f"{name} at {peers[name]} ({why})" for name, why in list(missing.items())[:8]]
    return ", ".join(shown) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")


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
        f"All hosts must make the same steps, each within the time limit. Received: timeout_seconds={seconds:g}, "
        f"host={replicas.host}, {who}. Find out where those hosts are (py-spy dump). Give every host the same number of "
        "batches, and let no host alone run code that waits for all hosts. Or allow more time: "
        "make_strategy(timeout_seconds=...)."
    )
