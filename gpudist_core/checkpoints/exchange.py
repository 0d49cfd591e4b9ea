"""Exchange small texts between all hosts without a collective, so that it also works beside the training.

So the hosts agree on the step at which they stop when one of them gets a signal. One host may be ahead of another: by one step
if each step has a collective, by more otherwise. So no host decides alone. The host with the signal wakes a thread on every
host. Each thread reports the next call at which its training can still stop. From then on the training waits there until all
numbers are known. All hosts stop at the highest number. No host has passed it, and until then every host takes part in all
collectives.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from gpudist_core.errors import HostMissing, Unavailable


class Store(Protocol):
    """Store texts under keys that all hosts see."""

    def put(self, key: str, value: str) -> bool:
        """Store a value unless the key is in use, and return whether it was free."""

    def get(self, key: str, seconds: float | None) -> str | None:
        """Return the value as soon as there is one, or None after the time limit."""

    def delete(self, key: str) -> None:
        """Delete a key."""


def store_of_job(num_hosts: int) -> Store | None:
    """Return the store that TensorFlow runs for this job.

    Args:
        num_hosts: Number of hosts.

    Returns:
        The store; None with one host.

    Raises:
        Unavailable: If several hosts have no store.
    """
    from gpudist_core.upstream import key_value

    if num_hosts == 1:
        return None
    if not key_value.is_available():
        raise Unavailable(
            f"Several hosts need TensorFlow's coordination service to agree. Received: hosts={num_hosts}, no "
            "service. "
            "Make the strategy with tf.distribute.MultiWorkerMirroredStrategy, which starts it."
        )
    return key_value


class TextExchange:
    """Exchange one text between all hosts in each round.

    All hosts must make the same rounds in the same order. Each thread needs its own exchange.

    Args:
        store: The key-value store of all hosts; None with one host.
        prefix: The prefix of the keys, equal on all hosts and used once in a job.
        host: This host's number.
        num_hosts: Number of hosts.
        timeout: How long to wait for a host, in seconds.
    """

    def __init__(self, store: Store | None, prefix: str, host: int, num_hosts: int, timeout: float) -> None:
        self._store, self._prefix, self.host, self.num_hosts, self._timeout = store, prefix, host, num_hosts, timeout
        self._round = 0

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Send a value, and return the values of all hosts.

        Args:
            what: What the hosts are doing, for the message.
            value: Any value that JSON supports.

        Returns:
            One value per host, in host order.

        Raises:
            HostMissing: If a host did not send its value in time.
        """
        if self._store is None:
            return [value]
        self._round += 1
        self._store.put(self._key(self._round, self.host), json.dumps(value))
        values = self._hear(self._store, what)
        if self._round > 1:  # whoever has told this round's has heard the one before
            self._store.delete(self._key(self._round - 1, self.host))
        return values

    def _hear(self, store: Store, what: str) -> list[Any]:
        until = time.monotonic() + self._timeout
        texts = [
            store.get(self._key(self._round, host), max(0.001, until - time.monotonic())) for host in range(self.num_hosts)
        ]
        missing = [host for host, text in enumerate(texts) if text is None]
        if missing:
            raise HostMissing(
                f"Every host must take part in {what}. Received: missing hosts={missing} after {self._timeout:g} s, "
                f"hosts={self.num_hosts}. Their logs may say why they do not answer. Or allow more time (timeout=...)."
            )
        return [json.loads(text or "") for text in texts]

    def _key(self, number: int, host: int) -> str:
        return f"{self._prefix}/{number}/{host}"


_ENDED = "ended"


class HostAgreement:
    """Take part in the agreement for one host.

    Args:
        store: The key-value store of all hosts.
        prefix: The prefix of the keys, equal on all hosts and used once in a job.
        host: This host's number.
        num_hosts: Number of hosts.
        timeout: How long to wait for the other hosts' numbers, in seconds.
    """

    def __init__(self, store: Store, prefix: str, host: int, num_hosts: int, timeout: float) -> None:
        self._store, self._prefix, self._host, self._num_hosts, self._timeout = store, prefix, host, num_hosts, timeout
        self._changed = threading.Condition()
        self._calls = 0
        self._told = False
        self._over = False
        self._decided = False
        self._stop_at: int | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="checkpoints: agreement on a stop", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Tell all hosts that this host must stop. It returns before they have agreed."""
        for host in range(self._num_hosts):
            self._store.put(self._key("wake", host), str(self._host))

    def is_time(self, call: int) -> bool:
        """Return whether the hosts stop here. It waits while they agree.

        Args:
            call: The number of this call: 1, 2, 3, ... on every host.

        Returns:
            Whether to save and stop now, equal on all hosts.

        Raises:
            HostMissing: If the hosts could not agree.
        """
        with self._changed:
            if self._told:
                self._changed.wait_for(lambda: self._decided or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            self._calls = call
            return self._stop_at is not None and call >= self._stop_at

    def close(self) -> None:
        """Report that the training of this host is over, so that the others do not wait for it."""
        with self._changed:
            self._over = True
        quietly(lambda: self._store.put(self._key("wake", self._host), _ENDED))
        self._thread.join(self._timeout)

    def _watch(self) -> None:
        try:
            self._store.get(self._key("wake", self._host), None)
            with self._changed:
                value = _ENDED if self._over else str(self._calls + 1)
                self._told = not self._over
            self._store.put(self._key("next", self._host), value)
            if value == _ENDED:
                return
            stop_at = self._hear()
        except BaseException as error:  # the training must not wait for a thread that is gone
            with self._changed:
                self._failure = error if self._told else None
                self._changed.notify_all()
            return
        with self._changed:
            self._stop_at, self._decided = stop_at, True
            self._changed.notify_all()

    def _hear(self) -> int | None:
        """Return the highest number of all hosts, or None if the training of one host is over and no stop is needed."""
        values = [self._store.get(self._key("next", host), self._timeout) for host in range(self._num_hosts)]
        missing = [host for host, value in enumerate(values) if value is None]
        if missing:
            raise HostMissing(
                f"Every host must agree on a step to stop at. Received: missing hosts={missing} after "
                f"{self._timeout:g} s. Their logs may say why they do not answer."
            )
        return None if _ENDED in values else max(int(value or 0) for value in values)

    def _key(self, what: str, host: int) -> str:
        return f"{self._prefix}/{what}/{host}"


def quietly(act: Callable[[], Any]) -> None:
    """Run an action that only helps the other hosts, which may be gone."""
    try:
        act()
    except Exception:  # whatever a lost connection raises
        return
