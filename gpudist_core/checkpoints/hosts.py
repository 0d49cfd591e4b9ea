"""Coordinate the hosts of a run for checkpoints: exchanges, the shared folder, who leaves last, and signals that stop them.

Small texts are exchanged without a collective, so that it also works beside the training.

So the hosts agree on the step at which they stop when one of them gets a signal. One host may be ahead of another: by one step
if each step has a collective, by more otherwise. So no host decides alone. The host with the signal wakes a thread on every
host. Each thread reports the next call at which its training can still stop. From then on the training waits there until all
numbers are known. All hosts stop at the highest number. No host has passed it, and until then every host takes part in all
collectives.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpudist_core.checkpoints.folder import IN_USE, Folder, Lock
from gpudist_core.errors import FolderInUse, HostMissing, Unavailable, UsageError


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
            f"Several hosts need TensorFlow's coordination service to agree. Received: hosts={num_hosts}, no service. Make the "
            "strategy with tf.distribute.MultiWorkerMirroredStrategy, which starts it."
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
        until = time.monotonic() + self._timeout
        texts = [
            self._store.get(self._key(self._round, other), max(0.001, until - time.monotonic()))
            for other in range(self.num_hosts)
        ]
        missing = [other for other, text in enumerate(texts) if text is None]
        if missing:
            raise HostMissing(
                f"Every host must take part in {what}. Received: missing hosts={missing} after {self._timeout:g} s, "
                f"hosts={self.num_hosts}. Their logs may say why they do not answer. Or allow more time (timeout=...)."
            )
        if self._round > 1:  # whoever has told this round's has heard the one before
            self._store.delete(self._key(self._round - 1, self.host))
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
        self._changed = threading.Condition()  # guards what follows
        self._calls = 0  # the number of the last call that did not wait; it stands still from `_told` on until `_decided`
        self._told = False  # whether the other hosts know the next call at which this one can stop
        self._over = False
        self._decided = False  # set together with `_stop_at`, never unset
        self._stop_at: int | None = None  # equal on all hosts, and above the last call of each of them when it is set
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


_SEEN_WITHIN = 10.0  # seconds until a network file system shows what another host has made
_GOODBYE = 10.0
_opened = itertools.count()


class Hosts:
    """Describe this host among those of the run.

    Args:
        host: Its number.
        num_hosts: Number of hosts.
        folder: The folder of the checkpoints.
        timeout: How long to wait for another host, in seconds.
    """

    def __init__(self, host: int, num_hosts: int, folder: Folder, timeout: float) -> None:
        self.host, self.num_hosts = host, num_hosts
        self._store = store_of_job(num_hosts)
        self._prefix, self._timeout = f"gpudist/checkpoints/{next(_opened)}", timeout
        self._folder = folder
        self._lock: Lock | None = None
        self.training = self._exchange("training")
        self.writing = self._exchange("writing")

    def _exchange(self, name: str) -> TextExchange:
        return TextExchange(self._store, f"{self._prefix}/{name}", self.host, self.num_hosts, self._timeout)

    def check_alike(self, **settings: Any) -> None:
        """Raise unless all hosts were given the same settings.

        Args:
            **settings: The settings of this host.

        Raises:
            UsageError: If they differ.
        """
        settings_of_hosts = self.training.all_gather("opening the checkpoints", settings)
        for name in settings:
            values = [each.get(name) for each in settings_of_hosts]
            if any(value != values[0] for value in values):
                raise UsageError(f"{name} must be the same on all hosts", **{name: values})

    def check_shared(self) -> None:
        """Raise unless all hosts see the same folder: they compare a new file, or old checkpoints if it is read-only.

        Raises:
            UsageError: If some hosts do not see it, or there is nothing to compare.
        """
        if self._store is None:
            return
        path = self._folder.path
        token = f".seen-by-all-{time.time_ns()}"
        token, failure = self.training.all_gather(
            "looking at the folder", [token, self._on_first(lambda: _touch(path / token))]
        )[0]
        if failure:
            there = self.training.all_gather("looking at the folder", self._folder.steps())
            if not there[0]:
                raise self._unwritable(failure)
            seen = [steps == there[0] for steps in there]
        else:
            seen = self.training.all_gather("looking at the folder", _appears(path / token))
            if self.host == 0:
                (path / token).unlink()
        if not all(seen):
            raise UsageError(
                "Several hosts need a shared folder, for example on a network file system",
                "Mount one at the same path on every host.",
                folder=str(path),
                hosts_without_it=[host for host, sees in enumerate(seen) if not sees],
            )

    def claim(self) -> None:
        """Lock the folder for this run, and remove what a killed run left unfinished.

        Raises:
            FolderInUse: If another run writes into it.
            UsageError: If it is not writable.
        """
        failure = self.training.all_gather("locking the folder", self._on_first(self._take))[0]
        if failure:
            raise FolderInUse(failure) if failure.startswith(IN_USE) else self._unwritable(failure)

    def _unwritable(self, failure: str) -> UsageError:
        rule, path = "The folder of checkpoints must be writable", str(self._folder.path)
        return UsageError(rule, "Pass another folder.", folder=path, error=failure)

    def _take(self) -> None:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self._folder.path)
        self._lock.acquire()
        self._folder.clean()

    def _on_first(self, act: Callable[[], Any]) -> str:
        if self.host == 0:
            try:
                act()
            except (OSError, FolderInUse) as error:
                return str(error)
        return ""

    def agreement(self) -> HostAgreement | None:
        """Return how the hosts agree on a stop; None with one host."""
        if self._store is None:
            return None
        return HostAgreement(self._store, f"{self._prefix}/stop", self.host, self.num_hosts, self._timeout)

    def leave(self) -> None:
        """Release the lock. The first host, which runs the store, waits until the others no longer need it."""
        store = self._store
        if store is not None and self.host > 0:
            quietly(lambda: store.put(f"{self._prefix}/goodbye/{self.host}", ""))
        elif store is not None:
            until = time.monotonic() + _GOODBYE
            for host in range(1, self.num_hosts):
                left = max(0.001, until - time.monotonic())
                quietly(functools.partial(store.get, f"{self._prefix}/goodbye/{host}", left))
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _appears(path: Path) -> bool:
    until = time.monotonic() + _SEEN_WITHIN
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
        if path.parent.is_dir():
            os.listdir(path.parent)  # makes a network file system look again
    return True


# A second signal of the same kind sooner than this is the same notice (schedulers signal every process of a tree).
_SAME_NOTICE = 5.0


class Notice:
    """Watch for signals, on behalf of all hosts.

    Args:
        names: The signals, for example `SIGTERM`.
        agreement: How the hosts agree on a step; None with one host.

    Raises:
        UsageError: Outside of the main thread.
    """

    def __init__(self, names: Sequence[str], agreement: HostAgreement | None) -> None:
        self._agreement = agreement
        self._received: int | None = None
        self._since = 0.0
        self._honoured = False
        # A signal handler may run while any lock is held: of all queues only this one may be used there.
        self._notices: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._before: dict[int, Any] = {}
        self._passed_on: dict[int, Any] = {}
        numbers = [int(signal.Signals[name]) for name in names]
        if numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "Signals can be watched from the main thread only",
                "Train there, or leave the signals to the rest of the program: signals=().",
                thread=threading.current_thread().name,
            )
        if agreement is not None and numbers:
            self._thread = threading.Thread(target=self._announce, name="checkpoints: notice of a signal", daemon=True)
            self._thread.start()
        # TensorFlow's server for MultiWorkerMirroredStrategy installs its own notifier for SIGTERM, and the process lives on. A
        # handler that is installed later, as here, gets the signal instead.
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)

    def is_time(self, call: int) -> bool:
        """Return whether to save and stop now.

        Args:
            call: The number of this call.

        Returns:
            The answer, equal on all hosts.
        """
        stop = self._received is not None if self._agreement is None else self._agreement.is_time(call)
        self._honoured = self._honoured or stop
        return stop

    def close(self) -> None:
        """Restore the signal handlers. A signal that came too late to stop the training is delivered again."""
        if self._agreement is not None:
            self._agreement.close()
        if self._thread is not None:
            self._notices.put(False)
            self._thread.join()
            self._thread = None
        self._give_back()
        if self._received is not None and not self._honoured:
            self._honoured = True
            os.kill(os.getpid(), self._received)

    def _give_back(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            handler = signal.SIG_DFL if handler is None else handler
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
            else:  # somebody else has it now, and may give it back to this one
                self._passed_on[number] = handler

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number in self._passed_on:
            signal.signal(number, self._passed_on[number])
            os.kill(os.getpid(), number)
        elif self._received is None:
            self._received, self._since = number, now
            self._notices.put(True)
        elif now - self._since > _SAME_NOTICE:  # whoever asks again wants it now
            self._give_back()
            os.kill(os.getpid(), number)

    def _announce(self) -> None:
        assert self._agreement is not None
        if self._notices.get():
            quietly(self._agreement.ask)
