"""Track one cluster of the pool: whether its hosts are idle and can run another job.

All clusters of a pool have the same options.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulate.cluster import ClusterPlan, Preload, RunningCluster, remove_tree
from emulate.errors import Unavailable, UsageError
from emulate.pool.loop import DONE, IDLE, NEEDS_PROCESS, OUTPUT, Job, Renew, WarmHost
from emulate.topology import Topology

_POSSIBLE = {
    "network": ("own", "host"),
    "all_reduce": ("auto", "ring", "hierarchical", "one-device"),
    "device": ("cpu", "gpu", "auto"),
}


@dataclass(frozen=True)
class Options:
    """Hold the options of all clusters of a pool.

    Raises:
        UsageError: If an option is not valid.
    """

    max_hosts: int = 12
    environment: Mapping[str, str] = field(default_factory=dict)
    network: str = "own"
    all_reduce: str = "auto"
    device: str = "cpu"
    keeps_gpus: bool = True

    def __post_init__(self) -> None:
        for name, possible in _POSSIBLE.items():
            value = getattr(self, name)
            if value not in possible:
                one_of = ", ".join(possible)
                raise UsageError(f"{name} must be one of {one_of}. Received: {name}={value!r}. Choose one of them.")
        if not (isinstance(self.max_hosts, int) and self.max_hosts >= 1):
            raise UsageError(
                f"A pool keeps at least one host. Received: max_hosts={self.max_hosts!r}. Give a number of processes, 12 say."
            )


_PATIENCE = 15.0  # seconds in which a host must be idle after its job: it collects garbage
_SHOWN = 4 << 20  # bytes of a job's output that are kept


class WarmCluster:
    """Control a cluster whose hosts run job after job.

    Args:
        preload: What forks its hosts.
        topology: Its shape.
        options: As the pool has them.
        device: `cpu` or `gpu`.

    Attributes:
        topology: Its shape.
        device: `cpu` or `gpu`.
        running: The cluster itself.
        scope: Whose jobs it runs; None until its first lease.
        num_jobs: How many jobs it was given.
        unfit: Why it cannot be used again; empty while it can.
    """

    def __init__(self, preload: Preload, topology: Topology, options: Options, device: str) -> None:
        self.topology = topology
        self.device = device
        self.scope: str | None = None
        self.num_jobs = 0
        self.unfit = ""
        self._directory = Path(tempfile.mkdtemp(dir=preload.directory))
        self._idle: set[int] = set()
        self._is_used = False
        self._first_keys: dict[int, int] = {}
        self.running: RunningCluster = preload.launch(
            ClusterPlan(
                topology=topology,
                entry=WarmHost(),
                directory=self._directory,
                device=device,
                all_reduce=options.all_reduce,
                network=options.network,
                environment=options.environment,
            )
        )

    @property
    def hosts(self) -> range:
        """Return the numbers of its hosts."""
        return range(len(self.running.roles))

    def settle(self) -> str:
        """Wait until every host is idle; why the cluster cannot be used, empty where it can."""
        deadline = time.monotonic() + (_PATIENCE if self.num_jobs else self.running.plan.start_timeout + _PATIENCE)
        self._wait_until_idle(deadline)
        if not self.unfit and self._is_used and self.topology.has_several_hosts:
            # Only when no host is in a collective any more, and on all before one is in the next.
            self._tell(Renew(max(self._first_keys.values())))
            self._is_used = False
            self._wait_until_idle(deadline)
        if not self.unfit:
            self.events(0.0)  # a host may have ended since
        return self.unfit

    def _wait_until_idle(self, deadline: float) -> None:
        while not self.unfit and len(self._idle) < len(self.hosts):
            self.events(0.1)
            if time.monotonic() > deadline:
                self.unfit = "a host was not idle in time after its job"

    def _tell(self, message: Job | Renew) -> None:
        self._idle.clear()
        for host in self.hosts:
            self.running.tell(host, pickle.dumps(message))

    def events(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        """Return the events as `RunningCluster.events` does, after noting those about the cluster's state."""
        arrived = self.running.events(timeout)
        for host, event in arrived:
            self._take(host, event)
        return arrived

    def _take(self, host: int, event: dict[str, Any]) -> None:
        name, kind = self.running.name(host), event["event"]
        if kind == IDLE:
            self._idle.add(host)
            self._first_keys[host] = event["first_key"]
        elif kind == "exit":
            self.reject(f"{name} ended ({event['status']}, {event['code']})")
        elif kind == DONE and event["status"] != "returned":
            self._take_failure(name, event["status"])
        elif kind == NEEDS_PROCESS:
            self.reject(f"{name}: its job sets {event['name']}, which TensorFlow reads when it is imported")

    def _take_failure(self, name: str, status: str) -> None:
        """Handle a failed job: one host that raised is back in its loop; several hosts may no longer agree."""
        if status == "exited" or len(self.hosts) > 1:
            self.reject(f"a job {status} on {name}")

    def reject(self, reason: str) -> None:
        """Mark it as not usable again. Keep the first reason."""
        self.unfit = self.unfit or reason

    def start(self, call: bytes, cwd: Path, search_path: tuple[str, ...], *, resets: bool) -> None:
        """Have every host run a pickled function with its arguments."""
        path = self._directory / "call.pickle"
        path.write_bytes(call)
        self.num_jobs += 1
        self._is_used = True
        self._tell(Job(self.num_jobs, path, cwd, search_path, resets))

    def output(self, host: int) -> str:
        """Return a host's output during its job, or only its end if it is long."""
        with contextlib.suppress(OSError), (self._directory / f"host-{host}" / OUTPUT).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _SHOWN))
            return file.read().decode("utf-8", "replace")
        return ""

    def end(self) -> None:
        """End every process of it and delete its folder."""
        with contextlib.suppress(Unavailable):
            self.running.end()
        remove_tree(self._directory)
