"""Exchange small texts between all hosts without a collective, so that it also works beside the training."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from gpudist_core.checkpoints.errors import HostMissing
from gpudist_core.errors import Unavailable


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
