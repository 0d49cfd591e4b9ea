"""Define `Lease`: a warm cluster for as long as one caller needs it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from emulate.cluster import Owner, check_function, check_time_limit, roles_of
from emulate.errors import WrongUse
from emulate.pickling import to_bytes
from emulate.pool.result import HostResult
from emulate.pool.round import NeedsOtherClusterError, Round
from emulate.pool.warm import WarmCluster
from emulate.program import working_directory
from emulate.topology import Topology

if TYPE_CHECKING:
    from emulate.pool.pool import Pool

OnEvent = Callable[[int, dict[str, Any]], None]


@final
class Lease:
    """Give access to a clean cluster. `Pool.lease` makes it. Leaving it returns the cluster.

    Args:
        pool: Whose cluster it is.
        topology: The cluster's shape.
        fresh: Whether the cluster must have run nothing before.

    Attributes:
        topology: The cluster's shape.
        roles: The role of each host: `worker`, `chief` or `ps`.
        names: What messages call each host.
        notes: What the user should know: about isolation, and what jobs' hosts noted.
        device: What the devices of hosts that train are: `emulated`, `gpu` or `gpu slice`.
    """

    def __init__(self, pool: Pool, topology: Topology, *, fresh: bool) -> None:
        self.topology = topology
        self.notes: list[str] = []
        self._pool = pool
        self._cluster: WarmCluster | None = pool.take(topology, fresh=fresh)
        self.device = self._cluster.running.device
        self.roles = roles_of(topology)
        self.names = [self._cluster.running.name(host) for host in self._cluster.hosts]
        self._note(*self._cluster.running.notes)
        self._round: Round | None = None
        self._owner = Owner()
        self._lock = threading.RLock()  # hosts do one job at a time

    @property
    def is_broken(self) -> bool:
        """Return whether the cluster was ended, or will not be used again. `run` then takes another one."""
        return self._cluster is None or bool(self._cluster.unfit)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        grace: float = 2.0,
        patience: float | None = None,
        on_event: OnEvent | None = None,
    ) -> list[HostResult]:
        """Run `function(context, *args)` on the main thread of every host at the same time.

        What happens on hosts is never raised here, it stands in the results. When a host is done for (it raised, left or was
        killed, or `hurry` was called), the others get `grace` more seconds (one at most after a kill), are asked for their
        stacks, and ended. With parameter servers, that is so once the chief is done.

        Calls of several threads wait for each other.

        Where the function does what only a host that has run nothing can do (split devices, set a number of threads), it is
        begun again on such hosts; `on_event` then gets `{"event": "restarted", "reason": ...}`.

        A folder for temporary files is a host's own and is emptied after each job; `context.directory` is not.

        Args:
            function: Sent with cloudpickle: one at the top of a module that hosts can import arrives by reference, and what
                it keeps in its module stays for the next job of that host.
            *args: What it gets after the host's context.
            timeout: Seconds after which all are ended; None for as long as it takes.
            grace: Seconds that the others get when one is done for.
            patience: Seconds that a host may wait in TensorFlow, doing nothing, for one that has returned; then it is ended
                (`waiting`). None for as long as it takes.
            on_event: Called here with a host's number and each event that the job sends with `context.send`, and with
                `{"event": "exit", "status": ..., "code": ...}` when a host's process ends.

        Returns:
            How it went on each host, in host order.

        Raises:
            WrongUse: When the function or its arguments cannot be sent, the time limit cannot be, the lease was left or is
                another process's, or its `on_event` calls this.
            Unavailable: When a cluster could not be started.
        """
        self._owner.check("A lease")
        check_function(function)
        check_time_limit(timeout)
        call = _pickle(function, args)
        with self._lock:
            return self._run(call, timeout, grace, patience, on_event)

    def _run(
        self, call: bytes, timeout: float | None, grace: float, patience: float | None, on_event: OnEvent | None
    ) -> list[HostResult]:
        if self._round is not None:  # the same thread, which need not wait for itself
            raise WrongUse(
                f"A lease runs one job at a time. Received: topology={str(self.topology)!r}, a job from the `on_event` of "
                "another. Run it when that one is done, or take another lease for it."
            )
        cwd, bare = working_directory(), False
        while True:
            cluster = self._healthy(bare)
            cluster.start(call, cwd, tuple(sys.path))
            self._round = Round(cluster, timeout, grace, on_event or _ignore, self._note, patience)
            try:
                return self._round.results()
            except NeedsOtherClusterError as needs:
                cluster.reject(str(needs))
                bare = needs.bare
                if on_event is not None:
                    on_event(needs.host, {"event": "restarted", "reason": str(needs)})
            except BaseException:  # Ctrl-C, or what on_event raised
                cluster.reject("its job was interrupted")
                raise
            finally:
                self._round = None

    def hurry(self) -> None:
        """Give the other hosts only `grace` more seconds after one host has failed. Call it from `on_event`."""
        if self._round is not None:
            self._round.hurry()

    def allow(self, seconds: float) -> None:
        """Give the job this many seconds from now, whatever its `timeout` was. Call it from `on_event`."""
        if self._round is not None:
            self._round.allow(seconds)

    def stacks(self) -> dict[str, str]:
        """Return the Python stack of each live host by name, for the caller that interrupted the job."""
        running = self._cluster.running if self._cluster is not None else None
        return {self.names[host]: stack for host, stack in running.stacks().items()} if running is not None else {}

    def _healthy(self, bare: bool) -> WarmCluster:
        """Return the leased cluster, or another one if it is broken."""
        if self._cluster is None:
            raise WrongUse(
                f"A lease runs functions inside its `with` only. Received: topology={str(self.topology)!r}, left. "
                "Take a new one from the pool."
            )
        if self._cluster.settle() or bare:
            self._pool.give_back(self._cluster)
            self._cluster = self._pool.take(self.topology, fresh=True, bare=bare)
            self.device = self._cluster.running.device
        return self._cluster

    def _note(self, *texts: str) -> None:
        self.notes += [text for text in texts if text not in self.notes]

    def close(self) -> None:
        """Give the cluster back, when the job of another thread is done."""
        if not self._owner.is_here:
            return
        with self._lock:
            if self._cluster is not None:
                self._pool.give_back(self._cluster)
            self._cluster = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _pickle(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return to_bytes((function, args))
    except Exception as error:  # objects refuse in many ways
        name = getattr(function, "__qualname__", repr(function))
        raise WrongUse(
            f"A job and its arguments must be sendable to another process. Received: function={name!r}, which is or refers to "
            f"something that is not ({type(error).__name__}: {error}). Make such objects (models, tensors, locks) inside it."
        ) from error


def _ignore(host: int, event: dict[str, Any]) -> None:
    pass
