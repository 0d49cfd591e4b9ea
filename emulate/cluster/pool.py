"""Define `Pool`: clusters that run job after job, each scope on clusters of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

from emulate.cluster.environ import read_at_import
from emulate.cluster.gpus import ask_before_waiting
from emulate.cluster.parent import Preload
from emulate.cluster.plan import ForkGuard, check_function, check_one_of, check_time_limit, checked_environment, roles_of
from emulate.cluster.session import HostResult, NeedsBareClusterError, Round, Session
from emulate.cluster.supervision import Event
from emulate.devices import choose_device
from emulate.errors import Unavailable, UsageError
from emulate.pickling import to_bytes
from emulate.program import working_directory
from emulate.topology import Topology


@dataclass
class Statistics:
    """Count what a pool did.

    Attributes:
        started: Number of started clusters.
        reused: Number of leases of a cluster that had already run a job.
        replaced: Number of clusters that could not be used again.
        reasons: The reason for each of those.
    """

    started: int = 0
    reused: int = 0
    replaced: int = 0
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.started} clusters started, {self.reused} reused, {self.replaced} replaced"


@final
class Pool(AbstractContextManager["Pool"]):
    """Keep clusters between jobs, so that a job need not wait for new hosts.

    After a job, each host restores its environment and working directory, forgets seeds, clears Keras's session and empties its
    folder for temporary files. Other changes stay: a job finds what an earlier job of the same scope and topology changed in
    modules, in TensorFlow's settings or by a patch. Jobs of different scopes never share hosts. A cluster is replaced if a host
    ended, or if a job failed on several hosts, and `statistics` says why.

    Args:
        max_hosts: The largest number of processes. Beyond it, idle clusters are ended, the least recently used first.
        preload: The process to fork from, if it is shared. It keeps running after the pool.
        environment: Environment variables for every host, added to those of this process.
        network: `own`: several hosts get a private network without access to the outside. `host`: this machine's network.
        all_reduce: How replicas of one host are summed: `auto`, `ring`, `hierarchical` or `one-device`.
        device: `cpu`; `gpu`: this machine's GPUs, for one cluster at a time; or `auto`: GPUs if each device of the topology can
            have its own.
        keeps_gpus: Whether a cluster on GPUs stays warm. Use False if other processes wait for the GPUs.

    Attributes:
        statistics: What the pool did so far.

    Raises:
        UsageError: If an option is not valid.
        Unavailable: If hosts cannot be emulated.

    Example:
        >>> from emulate import Pool
        >>> with Pool() as pool, pool.lease("2x1") as cluster:
        ...     [result.value for result in cluster.run(lambda context: context.host)]
        [0, 1]
    """

    def __init__(
        self,
        *,
        max_hosts: int = 12,
        preload: Preload | None = None,
        environment: Mapping[str, str] | None = None,
        network: str = "own",
        all_reduce: str = "auto",
        device: str = "cpu",
        keeps_gpus: bool = True,
    ) -> None:
        own_environment = checked_environment(environment)
        check_one_of("network", network, ("own", "host"))
        check_one_of("all_reduce", all_reduce, ("auto", "ring", "hierarchical", "one-device"))
        check_one_of("device", device, ("cpu", "gpu", "auto"))
        if not (isinstance(max_hosts, int) and max_hosts >= 1):
            raise UsageError(
                f"A pool keeps at least one host. Received: max_hosts={max_hosts!r}. Give a number of processes, 12 say."
            )
        self._max_hosts = max_hosts
        self._device = device
        self._keeps_gpus = keeps_gpus
        self._options: dict[str, Any] = {"network": network, "all_reduce": all_reduce, "environment": own_environment}
        self.statistics = Statistics()
        self._fork_guard = ForkGuard()
        self._owns_preload = preload is None
        # Hosts get these from it, because TensorFlow reads them when it is imported.
        self._early = read_at_import(own_environment)
        self._preload = preload or Preload(environment=self._early)
        self._bare: Preload | None = None
        self._lock = threading.RLock()
        self._idle: list[Session] = []  # the one that was used last comes last
        self._leased: list[Session] = []
        self._ending: list[threading.Thread] = []
        self._is_closed = False
        ask_before_waiting(self)

    def lease(self, topology: str | Topology, *, fresh: bool = False, scope: str = "") -> Lease:
        """Return a lease of a cluster of that topology. A cluster is started if none of the scope is idle.

        Args:
            topology: `"2x2"` or a Topology.
            fresh: Whether the cluster must not have run anything yet.
            scope: A name for the jobs that may share hosts.

        Returns:
            The lease, a context manager. Leaving it returns the cluster.

        Raises:
            UsageError: If the topology is not valid, the pool is closed, or it belongs to another process.
            Unavailable: If the cluster cannot be started.
        """
        return Lease(self, Topology.parse(topology), scope, fresh=fresh)

    def has_idle(self, topology: Topology, scope: str) -> bool:
        """Return whether a cluster waits that has run jobs of this scope.

        Args:
            topology: Its topology.
            scope: The name of the scope.

        Returns:
            Whether there is one.
        """
        with self._lock:
            return any(cluster.topology == topology and cluster.scope == scope for cluster in self._idle)

    def take(self, topology: Topology, scope: str = "", *, fresh: bool = False, bare: bool = False) -> Session:
        """Return a cluster for a lease. With `bare`, its hosts import TensorFlow themselves.

        Args:
            topology: Its topology.
            scope: Whose jobs it runs.
            fresh: Whether it must not have run anything yet.
            bare: Whether its hosts must not have imported TensorFlow.

        Returns:
            The cluster, idle.

        Raises:
            UsageError: If the pool is closed, or belongs to another process.
            Unavailable: If the cluster cannot be started.
        """
        self._fork_guard.check("A pool")
        while True:
            cluster = None if bare else self._take_idle(topology, scope, fresh)
            is_new = cluster is None
            cluster = cluster or self._start(topology, bare)
            cluster.scope = scope
            try:
                cluster.settle()
            except BaseException:
                with self._lock:
                    self._leased.remove(cluster)
                    self._end(cluster)
                raise
            if not cluster.unfit:
                self.statistics.reused += cluster.num_jobs > 0
                return cluster
            self._replace(cluster)
            if is_new:
                raise Unavailable(
                    f"The hosts of a new cluster must become idle. Received: {cluster.unfit}. "
                    "The machine may be too busy or too small for this topology: ask for fewer hosts."
                )

    def _take_idle(self, topology: Topology, scope: str, fresh: bool) -> Session | None:
        with self._lock:
            self._check_open()
            for of in [None] if fresh else [scope, None]:
                for cluster in reversed(self._idle):
                    if (cluster.topology, cluster.scope) == (topology, of):
                        self._idle.remove(cluster)
                        self._leased.append(cluster)
                        cluster.running.adopt()
                        return cluster
        return None

    def _start(self, topology: Topology, bare: bool = False) -> Session:
        """Start a new cluster. The lock is free while it waits for GPUs, which another thread's lease may return."""
        with self._lock:
            self._check_open()
            if bare and self._bare is None:
                self._bare = Preload(environment=self._early, imports=False)
            preload = self._bare if bare and self._bare is not None else self._preload
        cluster = Session(preload, topology, choose_device(self._device, [topology]).kind, self._options)
        with self._lock:
            if self._is_closed:
                self._end(cluster)
            self._check_open()
            used = self._num_hosts() + len(cluster.hosts)
            while used > self._max_hosts and self._idle:  # the least recently used goes first
                oldest = self._idle.pop(0)
                used -= len(oldest.hosts)
                self._end(oldest)
            self.statistics.started += 1
            self._leased.append(cluster)
            return cluster

    def _num_hosts(self) -> int:
        return sum(len(cluster.hosts) for cluster in (*self._idle, *self._leased))

    def let_go_of_gpus(self) -> None:
        """End the idle clusters on GPUs, so that another cluster can have them."""
        if not self._fork_guard.is_here:
            return
        with self._lock:
            for cluster in [idle for idle in self._idle if idle.device == "gpu"]:
                self._idle.remove(cluster)
                self._end(cluster)
            ending = list(self._ending)
        for thread in ending:
            thread.join()

    def give_back(self, cluster: Session, *, keep: bool = True) -> None:
        """Take a cluster back from a lease; it becomes idle, or is replaced, or is ended because nobody needs it."""
        with self._lock:
            if cluster not in self._leased:
                return
            is_broken = keep and bool(cluster.unfit or cluster.topology.num_ps)
            if is_broken:
                self._replace(cluster)
            else:
                self._leased.remove(cluster)
                is_kept = keep and not self._is_closed and (cluster.device == "cpu" or self._keeps_gpus)
                self._idle.append(cluster) if is_kept else self._end(cluster)
        is_rare = cluster.topology not in [idle.topology for idle in self._idle]
        if is_broken and is_rare and cluster.device == "cpu" and not self._is_closed:
            self.prepare(cluster.topology)  # already: its caller, or the next, asks for another one in a moment

    def _replace(self, cluster: Session) -> None:
        with self._lock:
            self._leased.remove(cluster)
            if cluster.topology.num_ps:
                cluster.reject("parameter servers serve until they are ended")
            self.statistics.replaced += 1
            self.statistics.reasons.append(f"{cluster.topology}: {cluster.unfit}")
            self._end(cluster)

    def prepare(self, *topologies: str | Topology) -> None:
        """Start clusters in the background for later leases, as many as the limit of hosts allows.

        Args:
            *topologies: Their topologies.

        Raises:
            UsageError: If the pool is closed, or belongs to another process.
            Unavailable: If a cluster cannot be started.
        """
        self._fork_guard.check("A pool")
        for topology in map(Topology.parse, topologies):
            with self._lock:
                used = self._num_hosts()
            if used + len(roles_of(topology)) <= self._max_hosts:
                cluster = self._start(topology)
                with self._lock:
                    self._leased.remove(cluster)
                    self._idle.append(cluster)

    def _end(self, cluster: Session) -> None:
        """End a cluster in the background: with several hosts it may take a moment."""
        thread = threading.Thread(target=cluster.end, name=f"end of {cluster.topology}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process is about to leave: Python starts no thread any more
            cluster.end()
            return
        self._ending = [other for other in self._ending if other.is_alive()] + [thread]

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("A pool leases clusters until it is closed. Received: a closed pool. Make a new one.")

    def close(self) -> None:
        """End every process; one that was forked from this one leaves them alone."""
        if not self._fork_guard.is_here:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for cluster in (*self._idle, *self._leased):
                self._end(cluster)
            self._idle, self._leased = [], []
        for thread in self._ending:
            thread.join()
        if self._bare is not None:
            self._bare.close()
        if self._owns_preload:
            self._preload.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class Lease(AbstractContextManager["Lease"]):
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
        self._cluster: Session | None = pool.take(topology, scope, fresh=fresh)
        self.device = self._cluster.running.device
        self.roles = roles_of(topology)
        self.names = [self._cluster.running.name(host) for host in self._cluster.hosts]
        self._note(*self._cluster.running.notes)
        self._round: Round | None = None
        self._fork_guard = ForkGuard()
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
        on_event: Callable[[int, Event], None] | None = None,
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
        self._fork_guard.check("A lease")
        check_function(function)
        check_time_limit(timeout)
        try:
            call = to_bytes((function, args))
        except Exception as error:  # objects refuse in many ways
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(
                f"A job and its arguments must be sendable to another process. Received: function={name!r}, which is or "
                f"refers to something that is not ({type(error).__name__}: {error}). "
                "Make such objects (models, tensors, locks) inside it."
            ) from error
        on_event = on_event or (lambda host, event: None)
        with self._lock:
            if self._round is not None:  # the same thread, which need not wait for itself
                raise UsageError(
                    f"A lease runs one job at a time. Received: topology={str(self.topology)!r}, a job from the `on_event` of "
                    "another. Run it when that one is done, or take another lease for it."
                )
            cwd, bare = working_directory(), False
            while True:
                cluster = self._healthy(bare)
                cluster.start(call, cwd, tuple(sys.path), resets=resets)
                self._round = Round(
                    cluster, timeout=timeout, grace=grace, patience=patience, on_event=on_event, note=self._note
                )
                try:
                    return self._round.results()
                except NeedsBareClusterError as needs:
                    cluster.reject(str(needs))
                    bare = True
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
            self._round.watch.allow(seconds)

    def stacks(self) -> dict[str, str]:
        """Return the Python stack of each live host by name, for the caller that interrupted the job."""
        running = self._cluster.running if self._cluster is not None else None
        return {self.names[host]: stack for host, stack in running.stacks().items()} if running is not None else {}

    def _healthy(self, bare: bool) -> Session:
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
        if not self._fork_guard.is_here:
            return
        with self._lock:
            if self._cluster is not None:
                self._pool.give_back(self._cluster, keep=not self._is_last)
            self._cluster = None

    def __exit__(self, *_: object) -> None:
        self.close()
