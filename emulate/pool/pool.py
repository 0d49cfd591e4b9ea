"""Define `Pool`: clusters that run job after job, each scope on clusters of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import final

from emulate.cluster import Owner, Preload, ask_before_waiting, checked_environment, is_read_at_import, roles_of
from emulate.devices import choose_device
from emulate.errors import Unavailable, UsageError
from emulate.pool.lease import Lease
from emulate.pool.warm import Options, WarmCluster
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
class Pool:
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
        self._options = Options(max_hosts, checked_environment(environment), network, all_reduce, device, keeps_gpus)
        self.statistics = Statistics()
        self._owner = Owner()
        self._owns_preload = preload is None
        self._preload = preload or Preload(environment=self._early())
        self._bare: Preload | None = None
        self._lock = threading.RLock()
        self._idle: list[WarmCluster] = []  # the one that was used last comes last
        self._leased: list[WarmCluster] = []
        self._ending: list[threading.Thread] = []
        self._is_closed = False
        ask_before_waiting(self)

    def _early(self) -> dict[str, str]:
        return {name: value for name, value in self._options.environment.items() if is_read_at_import(name)}

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

    def take(self, topology: Topology, scope: str = "", *, fresh: bool = False, bare: bool = False) -> WarmCluster:
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
        self._owner.check("A pool")
        while True:
            cluster = None if bare else self._take_idle(topology, scope, fresh)
            is_new = cluster is None
            cluster = cluster or self._start(topology, bare)
            cluster.scope = scope
            if not self._settle(cluster):
                self.statistics.reused += cluster.num_jobs > 0
                return cluster
            if is_new:
                raise Unavailable(
                    f"The hosts of a new cluster must become idle. Received: {cluster.unfit}. "
                    "The machine may be too busy or too small for this topology: ask for fewer hosts."
                )

    def _settle(self, cluster: WarmCluster) -> str:
        """Wait until it is idle; why it cannot be used, in which case it is gone."""
        try:
            reason = cluster.settle()
        except BaseException:
            with self._lock:
                self._leased.remove(cluster)
                self._end(cluster)
            raise
        if reason:
            self._replace(cluster)
        return reason

    def _take_idle(self, topology: Topology, scope: str, fresh: bool) -> WarmCluster | None:
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

    def _start(self, topology: Topology, bare: bool = False) -> WarmCluster:
        """Start a new cluster. The lock is free while it waits for GPUs, which another thread's lease may return."""
        with self._lock:
            self._check_open()
            preload = self._bare_preload() if bare else self._preload
        cluster = WarmCluster(preload, topology, self._options, choose_device(self._options.device, [topology]).kind)
        with self._lock:
            if self._is_closed:
                self._end(cluster)
            self._check_open()
            self._make_room(len(cluster.hosts))
            self.statistics.started += 1
            self._leased.append(cluster)
            return cluster

    def _bare_preload(self) -> Preload:
        if self._bare is None:
            self._bare = Preload(environment=self._early(), imports=False)
        return self._bare

    def _make_room(self, num_hosts: int) -> None:
        """End what has been idle for longest, beyond the number of hosts that are kept."""
        used = num_hosts + sum(len(cluster.hosts) for cluster in (*self._idle, *self._leased))
        while used > self._options.max_hosts and self._idle:
            oldest = self._idle.pop(0)
            used -= len(oldest.hosts)
            self._end(oldest)

    def let_go_of_gpus(self) -> None:
        """End the idle clusters on GPUs, so that another cluster can have them."""
        if not self._owner.is_here:
            return
        with self._lock:
            for cluster in [idle for idle in self._idle if idle.device == "gpu"]:
                self._idle.remove(cluster)
                self._end(cluster)
            ending = list(self._ending)
        for thread in ending:
            thread.join()

    def give_back(self, cluster: WarmCluster, *, keep: bool = True) -> None:
        """Take a cluster back from a lease; it becomes idle, or is replaced, or is ended because nobody needs it."""
        with self._lock:
            if cluster not in self._leased:
                return
            is_broken = keep and bool(cluster.unfit or cluster.topology.num_ps)
            if is_broken:
                self._replace(cluster)
            elif not keep or self._is_closed or (cluster.device == "gpu" and not self._options.keeps_gpus):
                self._leased.remove(cluster)
                self._end(cluster)
            else:
                self._leased.remove(cluster)
                self._idle.append(cluster)
        if is_broken:
            self._prepare_instead(cluster)

    def _replace(self, cluster: WarmCluster) -> None:
        with self._lock:
            self._leased.remove(cluster)
            if cluster.topology.num_ps:
                cluster.reject("parameter servers serve until they are ended")
            self.statistics.replaced += 1
            self.statistics.reasons.append(f"{cluster.topology}: {cluster.unfit}")
            self._end(cluster)

    def _prepare_instead(self, broken: WarmCluster) -> None:
        """Start another one of its shape already: its caller, or the next, asks for it in a moment."""
        if (
            not self._is_closed
            and broken.device == "cpu"
            and broken.topology not in [cluster.topology for cluster in self._idle]
        ):
            self.prepare(broken.topology)

    def prepare(self, *topologies: str | Topology) -> None:
        """Start clusters in the background for later leases, as many as the limit of hosts allows.

        Args:
            *topologies: Their topologies.

        Raises:
            UsageError: If the pool is closed, or belongs to another process.
            Unavailable: If a cluster cannot be started.
        """
        self._owner.check("A pool")
        for topology in map(Topology.parse, topologies):
            with self._lock:
                used = sum(len(cluster.hosts) for cluster in (*self._idle, *self._leased))
            if used + len(roles_of(topology)) <= self._options.max_hosts:
                cluster = self._start(topology)
                with self._lock:
                    self._leased.remove(cluster)
                    self._idle.append(cluster)

    def _end(self, cluster: WarmCluster) -> None:
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
        if not self._owner.is_here:
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

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
