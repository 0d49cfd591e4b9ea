"""Define `Lease`: a cluster for as long as one caller needs it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from emulate.cluster import Owner, check_function, check_time_limit, roles_of
from emulate.errors import UsageError
from emulate.pickling import to_bytes
from emulate.pool.round import HostResult, NeedsBareClusterError, Round
from emulate.pool.warm import WarmCluster
from emulate.program import working_directory
from emulate.topology import Topology

if TYPE_CHECKING:
    from emulate.pool.pool import Pool

OnEvent = Callable[[int, dict[str, Any]], None]


@final
class Lease:
    """Give access to a cluster. `Pool.lease` makes it. Leaving it returns the cluster.

    Args:
        pool: The pool of the cluster.
        topology: The cluster's topology.
        scope: Whose jobs the cluster runs.
        fresh: Whether the cluster must not have run anything yet.

    Attributes:
        topology: The cluster's topology.
        roles: The role of each host: `worker`, `chief` or `ps`.
        names: The name of each host in messages.
        notes: What the user should know: about isolation, and notes of jobs' hosts.
        device: The devices of hosts that train: `emulated`, `gpu` or `gpu slice`.
    """

    def __init__(self, pool: Pool, topology: Topology, scope: str, *, fresh: bool) -> None:
        self.topology = topology
        self.notes: list[str] = []
        self._pool = pool
        self._scope = scope
        self._is_last = False
        self._cluster: WarmCluster | None = pool.take(topology, scope, fresh=fresh)
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
        resets: bool = True,
    ) -> list[HostResult]:
        """Run `function(context, *args)` on the main thread of every host at the same time.

        Nothing that happens on hosts is raised here; the results tell it. If a host has failed (it raised, left or was killed,
        or `hurry` was called), the others get `grace` more seconds (at most one after a kill). Then their stacks are read, and
        they are ended. With parameter servers, the same happens once the chief has finished.

        Calls from several threads wait for each other.

        Afterwards each host restores its environment and working directory, forgets seeds, clears Keras's session and empties
        its folder for temporary files. Other changes (in modules, in TensorFlow's settings) stay for the next job of the same
        scope. `context.directory` is not emptied.

        If the function sets an environment variable that TensorFlow reads at import, it is restarted on hosts that have not
        imported TensorFlow. `on_event` then gets `{"event": "restarted", "reason": ...}`.

        Args:
            function: The function, sent with cloudpickle. A function at the top of a module that hosts can import is sent by
                reference.
            *args: Its arguments after the host's context.
            timeout: The time limit in seconds, after which all hosts are ended; None for no limit.
            grace: How many seconds the other hosts get after one has failed.
            patience: How many seconds a host may wait idle in TensorFlow for a host that has returned, before it is ended
                (`waiting`); None for no limit.
            on_event: A function that is called here with a host's number and each event that the job sends with `context.send`,
                and with `{"event": "exit", "status": ..., "code": ...}` when a host's process ends.
            resets: Use False for a function that sets up something for later jobs and resets its host itself.

        Returns:
            One result per host, in host order.

        Raises:
            UsageError: If the function or its arguments cannot be sent, the time limit is not valid, the lease was left or
                belongs to another process, or its `on_event` calls this.
            Unavailable: If a cluster cannot be started.
        """
        self._owner.check("A lease")
        check_function(function)
        check_time_limit(timeout)
        call = _pickle(function, args)
        with self._lock:
            return self._run(call, timeout, grace, patience, on_event, resets)

    def _run(
        self, call: bytes, timeout: float | None, grace: float, patience: float | None, on_event: OnEvent | None, resets: bool
    ) -> list[HostResult]:
        if self._round is not None:  # the same thread, which need not wait for itself
            raise UsageError(
                f"A lease runs one job at a time. Received: topology={str(self.topology)!r}, a job from the `on_event` of "
                "another. Run it when that one is done, or take another lease for it."
            )
        cwd, bare = working_directory(), False
        while True:
            cluster = self._healthy(bare)
            cluster.start(call, cwd, tuple(sys.path), resets=resets)
            self._round = Round(cluster, timeout, grace, on_event or _ignore, self._note, patience)
            try:
                return self._round.results()
            except NeedsBareClusterError as needs:
                cluster.reject(str(needs))
                bare = True
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
            raise UsageError(
                f"A lease runs functions inside its `with` only. Received: topology={str(self.topology)!r}, left. "
                "Take a new one from the pool."
            )
        if self._cluster.settle() or bare:
            self._pool.give_back(self._cluster)
            self._cluster = self._pool.take(self.topology, self._scope, fresh=True, bare=bare)
            self.device = self._cluster.running.device
        return self._cluster

    def _note(self, *texts: str) -> None:
        self.notes += [text for text in texts if text not in self.notes]

    def end_hosts(self) -> None:
        """Have the cluster ended when the lease is left, instead of kept for later leases."""
        self._is_last = True

    def close(self) -> None:
        """Give the cluster back, when the job of another thread is done."""
        if not self._owner.is_here:
            return
        with self._lock:
            if self._cluster is not None:
                self._pool.give_back(self._cluster, keep=not self._is_last)
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
        raise UsageError(
            f"A job and its arguments must be sendable to another process. Received: function={name!r}, which is or refers to "
            f"something that is not ({type(error).__name__}: {error}). Make such objects (models, tensors, locks) inside it."
        ) from error


def _ignore(host: int, event: dict[str, Any]) -> None:
    pass
