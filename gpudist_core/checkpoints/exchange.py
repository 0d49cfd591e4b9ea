"""Small texts that every host tells every other: agreement without a collective operation, so also beside the training."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from gpudist_core.checkpoints.errors import HostMissing
from gpudist_core.errors import Unavailable


class Store(Protocol):
    """Texts under keys that all hosts see."""

    def put(self, key: str, value: str) -> bool:
        """Store a value unless the key is taken; whether it was free."""

    def get(self, key: str, seconds: float | None) -> str | None:
        """The value, once there is one; None when there was none in time."""

    def delete(self, key: str) -> None:
        """Forget a key."""


def store_of_job(num_hosts: int) -> Store | None:
    """The store that TensorFlow keeps for this job.

    Args:
        num_hosts: Hosts in all.

    Returns:
        The store, None where there is one host.

    Raises:
        Unavailable: Where several hosts have none.
    """
    from gpudist_core.upstream import key_value

    if num_hosts == 1:
        return None
    if not key_value.is_available():
        raise Unavailable(
            f"Several hosts need TensorFlow's coordination service to agree on checkpoints. Received: hosts={num_hosts}, none. "
            "Make the strategy with tf.distribute.MultiWorkerMirroredStrategy, which starts it."
        )
    return key_value


class Exchange:
    """Rounds in which each host tells one text and hears that of each other.

    All hosts must make the same rounds in the same order. Threads each need an exchange of their own.

    Args:
        store: What all hosts see; None where there is one host.
        prefix: Begins the keys; the same on all hosts and used once in a job.
        host: This host's number.
        num_hosts: Hosts in all.
        timeout: How long to wait for a host, in seconds.
    """

    def __init__(self, store: Store | None, prefix: str, host: int, num_hosts: int, timeout: float) -> None:
        self._store, self._prefix, self.host, self.num_hosts, self._timeout = store, prefix, host, num_hosts, timeout
        self._round = 0

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Tell a value and hear those of all hosts.

        Args:
            what: What the hosts are doing, for the message.
            value: Anything that JSON can hold.

        Returns:
            One value per host, in host order.

        Raises:
            HostMissing: When a host did not tell its own in time.
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
                f"hosts={self.num_hosts}. See in their logs why they do not come, or give them more time (timeout=...)."
            )
        return [json.loads(text or "") for text in texts]

    def _key(self, number: int, host: int) -> str:
        return f"{self._prefix}/{number}/{host}"
