"""Check that all hosts have read the same examples. Each host reads all and keeps those of its replicas.

Before a global batch is returned, each host tells the first host what it has read, through the key-value store of the job, and
gets back the answers of all. That is not a collective: a host that fails reports it, and a waiting host can say for whom it
waits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import sys
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core import state
from gpudist_core.errors import Unavailable, UsageError
from gpudist_core.replicas import replicas_of
from gpudist_core.strategies.waiting import limited
from gpudist_core.upstream import key_value

_ALL, _END, _FAILED = "all", "no more rows", "failed: "
_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 10.0, 30.0
_LONGEST_SECONDS = 600.0  # a host that was killed says nothing, and the store does not always tell
_PATIENCE_SECONDS = 2.0  # the store is asked so long at once: an interrupt is heard in between
_PARTING_SECONDS = 5.0
_FAILURE_LETTERS = 500
_LOOKED_AT_BYTES = 1 << 22
_KEPT_BATCHES = 64  # the store forgets what was said of so many at once
_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


class HostFailed(RuntimeError):
    """Report that another host could not make a global batch, or did not ask for it. The text says which host and why."""


def digest_of(parts: Iterable[Any]) -> str:
    """Return a fingerprint of some examples.

    Args:
        parts: Arrays or tensors with the examples along their first axes. Of a large one, only every n-th number is used.
            Another order or newly drawn numbers give another fingerprint.

    Returns:
        The number of examples and a checksum, as text.
    """
    total, rows = 0, 0
    for part in parts:
        array = np.asarray(part)
        rows = rows or (len(array) if array.ndim else 0)
        total = zlib.crc32(f"{array.dtype}{array.shape}".encode(), total)
        if array.dtype.kind == "O":  # strings, each with its length
            for value in array.flat:
                data = value if isinstance(value, bytes) else str(value).encode()
                total = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), total))
        else:
            every = array.nbytes // _LOOKED_AT_BYTES | 1  # odd, so that it is not the same place in each row
            looked_at = np.ascontiguousarray(array.reshape(-1)[::every])
            total = zlib.crc32(looked_at.view(np.uint8).data, total)
    return f"{rows} rows {total:08x}"


class Alike:
    """Return global batches, each as soon as all hosts have the same one.

    Args:
        batches: Pairs of (`digest_of` all examples of a batch, the batch), with a `close()` if it has threads.
        strategy: The strategy whose hosts read them.
        name: The name of the data, equal on all hosts. Iterations with the same name are numbered in their order.
    """

    def __init__(self, batches: Iterator[tuple[str, Any]], strategy: tf.distribute.Strategy, name: str) -> None:
        self._batches = batches
        self._hosts = _Hosts(strategy, name)

    def __iter__(self) -> Alike:
        return self

    def __next__(self) -> Any:
        try:
            digest, batch = next(self._batches)
        except StopIteration:
            self._hosts.check(_END)
            raise
        except BaseException as error:
            self._hosts.fail(error)
            raise
        try:
            self._hosts.check(digest)
        except BaseException:
            self.close()
            raise
        return batch

    def close(self) -> None:
        """Stop the threads that make the batches."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


class _Hosts:
    """Compare in one iteration what each host has.

    Args:
        strategy: The strategy of the hosts.
        name: The name of the data.
        to: What a missing host must do, with a placeholder for the number of the batch.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, name: str, to: str = "ask for global batch {}, which all hosts take together"
    ) -> None:
        run = _run_of(strategy)
        replicas = replicas_of(strategy)
        self._host, self._num_hosts = replicas.host, replicas.num_hosts
        self._what, self._to = name, to
        self.longest = _LONGEST_SECONDS
        self._prefix = f"gpudist/rows/{run.token}/{name}/{next(run.iterations[name])}"
        self._batch = -1

    def check(self, mine: str) -> None:
        """Raise unless all hosts have the same.

        Args:
            mine: What this host has.

        Raises:
            HostFailed: If a host could not make the batch.
            UsageError: If the hosts have different examples.
        """
        texts = self.told(mine, lambda texts: len(set(texts)) == 1)
        if texts is None:
            return
        failed = {host: text.removeprefix(_FAILED) for host, text in enumerate(texts) if text.startswith(_FAILED)}
        if failed:
            raise HostFailed(
                f"Every host must make each global batch. Received: batch={self._batch}, failed hosts={failed}. "
                "See the error there."
            )
        raise UsageError(
            "All hosts must read the same examples in the same order",
            "Give shuffles and random draws a seed that is the same on all hosts: np.random.default_rng(SEED).",
            batch=self._batch,
            hosts=texts,
        )

    def told(self, mine: str, are_alike: Callable[[list[str]], bool]) -> list[str] | None:
        """Return what each host has, or None if all is well.

        Args:
            mine: What this host has.
            are_alike: A function that says whether the answers of all hosts agree.

        Returns:
            The answers by host, or None.
        """
        self._batch += 1
        texts = self._gathered(mine)
        if are_alike(texts):
            return None
        self._part()
        return texts

    def fail(self, error: BaseException) -> None:
        """Tell the other hosts that this host cannot make the batch."""
        self._batch += 1
        failure = f"{_FAILED}{type(error).__name__}: {error}"[:_FAILURE_LETTERS]
        with contextlib.suppress(Exception):  # the host's own error is what is to be seen
            if self._host:
                self._tell(self._host, failure)
            else:
                self._tell(_ALL, json.dumps([failure, *[""] * (self._num_hosts - 1)]))
                self._part()

    def _gathered(self, mine: str) -> list[str]:
        """Return what each host has."""
        if self._host:
            self._tell(self._host, mine)
            return list(json.loads(self._waited_for(_ALL, 0)))
        texts = [mine, *(self._waited_for(host, host) for host in range(1, self._num_hosts))]
        if self._batch and self._batch % _KEPT_BATCHES == 0:  # whoever has told this batch's has heard of those before
            key_value.delete(self._key(self._batch - 1).rpartition("/")[0])
        self._tell(_ALL, json.dumps(texts))
        return texts

    def _part(self) -> None:
        """End the exchange. The first host, which runs the store, waits until the others have got the reason."""
        if self._host:
            self._tell(f"{self._host}/heard", "")
            return
        until = time.monotonic() + _PARTING_SECONDS
        for host in range(1, self._num_hosts):
            for what in (host, f"{host}/heard"):
                text = self._heard(what, max(0.001, until - time.monotonic()))
                if text is None or text.startswith(_FAILED):  # it does not come, or needs no word of ours
                    break

    def _tell(self, what: Any, text: str) -> None:
        key_value.put(f"{self._key(self._batch)}/{what}", text)

    def _heard(self, what: Any, seconds: float) -> str | None:
        return key_value.get(f"{self._key(self._batch)}/{what}", seconds)

    def _key(self, batch: int) -> str:
        return f"{self._prefix}/{batch // _KEPT_BATCHES}/{batch}"

    def _waited_for(self, what: Any, host: int) -> str:
        """Wait for an answer of a host, and report it by name meanwhile: it may be about to save."""
        begin, next_word = time.monotonic(), _FIRST_WORD_SECONDS
        while (text := self._heard(what, _PATIENCE_SECONDS)) is None:
            waited = time.monotonic() - begin
            if waited > self.longest:
                raise HostFailed(
                    f"All hosts must take each global batch together. Received: batch={self._batch}, no answer from host "
                    f"{host} for {waited:.0f} s. Its log may say why."
                )
            if waited > next_word:
                next_word = waited + _NEXT_WORD_SECONDS
                print(
                    f"gpudist_core: waiting {waited:.0f} s for host {host} to {self._to.format(self._batch)} ({self._what})",
                    file=sys.stderr,
                    flush=True,
                )
        return text


class _Run:
    """Hold what the hosts of a strategy have in common.

    Args:
        token: The prefix of their keys in the store, which may outlive the strategy.

    Attributes:
        iterations: The number of iterations for each name.
        meetings: Exchanges between the hosts about anything but batches, by subject.
    """

    def __init__(self, token: int) -> None:
        self.token = f"{token:08x}"
        self.iterations: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self.meetings: dict[str, _Hosts] = {}


def told_by_all(
    strategy: tf.distribute.Strategy, what: str, mine: str, are_alike: Callable[[list[str]], bool]
) -> list[str] | None:
    """Return what each host says about something that must be equal on all hosts. All must ask together, in one order.

    Args:
        strategy: The strategy of the hosts.
        what: The subject.
        mine: What this host says.
        are_alike: A function that says whether the answers of all hosts agree.

    Returns:
        The answers by host, or None if they agree.
    """
    meetings = _run_of(strategy).meetings
    if what not in meetings:
        meetings[what] = _Hosts(strategy, what, "start the iteration that all hosts run together")
    limit = state.limit_of.get(strategy)  # what is allowed to a step is allowed to a host that is to begin
    meetings[what].longest = _LONGEST_SECONDS if limit is None else limit
    return meetings[what].told(mine, are_alike)


def _run_of(strategy: tf.distribute.Strategy) -> _Run:
    """Return the state of a strategy's hosts. On the first call, all hosts must ask together."""
    if strategy not in _runs:
        if not key_value.is_available():
            raise Unavailable(
                "Several hosts need TensorFlow's coordination service to compare the examples they read. Received: no service. "
                "Make the strategy with tf.distribute.MultiWorkerMirroredStrategy, which starts it."
            )
        _runs[strategy] = _Run(of_first_host(strategy, secrets.randbits(32)))
    return _runs[strategy]


def of_first_host(strategy: tf.distribute.Strategy, value: int) -> int:
    """Return the number that the first host passes, by a collective.

    Args:
        strategy: The strategy. All its hosts must ask.
        value: This host's number, from 0 and below 2**32.

    Returns:
        The number of the first host.
    """
    from gpudist_core.gradients import all_reduce
    from gpudist_core.upstream import randomness

    if replicas_of(strategy).num_hosts == 1:
        return value

    def of_first() -> Any:
        context = tf.distribute.get_replica_context()
        # A float32 holds 16 bits exactly.
        halves = [float(value >> 16 & 0xFFFF), float(value & 0xFFFF)]
        with randomness.unwatched():  # the other hosts' numbers are never used
            return all_reduce(tf.where(tf.equal(context.replica_id_in_sync_group, 0), tf.constant(halves), tf.zeros(2)))

    with limited(strategy):
        results = strategy.experimental_local_results(tf.function(lambda: strategy.run(of_first), autograph=False)())
    high, low = (int(half) for half in results[0])
    return high << 16 | low
