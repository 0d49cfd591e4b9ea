"""Run one job after the other in the warm hosts of one cluster, each from its start to the last result."""

from __future__ import annotations

import contextlib
import math
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulate.cluster.hang import Stragglers
from emulate.cluster.parent import Preload
from emulate.cluster.plan import ClusterPlan, RemoteError
from emulate.cluster.supervision import DONE, FAILED, HANG, TIMEOUT, Event, Watch
from emulate.cluster.views import remove_tree
from emulate.cluster.warm_host import IDLE, JOB_DONE, NEEDS_PROCESS, OUTPUT, Job, Renew, WarmHost
from emulate.errors import Unavailable
from emulate.topology import Topology

_IDLE_SECONDS = 15.0  # in which a host must be idle after its job: it collects garbage
_SHOWN = 4 << 20  # bytes of a job's output that are kept
_AFTER_KILL = 1.0  # seconds of grace at most: what the others say then is of little interest, and the user waits

_STATUS = {FAILED: "ended", TIMEOUT: "timeout", HANG: "waiting"}
_UNFIT = {
    FAILED: "hosts were ended during a job",
    TIMEOUT: "a job took too long",
    HANG: "hosts waited for one that was done with their job",
}


@dataclass
class HostResult:
    """Describe how a job ended on one host.

    Attributes:
        host: Its number.
        status: `returned`; `raised`; `exited` (`sys.exit`, or the process left by itself); `killed` (by a signal; `code` is
            minus its number); `ended` (by the pool, because another host has failed); `timeout` (ended because the job's time
            had passed); `waiting` (ended because it waited forever for a host that had finished).
        value: The function's result.
        error: The exception that it raised.
        code: The exit code, if the host left or was killed.
        stack: Where the host was when it was ended or crashed, outermost call first.
        output: The host's standard output and standard error during the job, in the order of writing.
        step: The last `step` among the events that it sent, or None.
    """

    host: int
    status: str
    value: Any = None
    error: RemoteError | None = None
    code: int | None = None
    stack: str = ""
    output: str = ""
    step: int | None = None


class Session:
    """Control a cluster whose hosts run job after job.

    Args:
        preload: What forks its hosts.
        topology: Its shape.
        device: `cpu` or `gpu`.
        options: More about it, as `ClusterPlan` has them.

    Attributes:
        topology: Its shape.
        device: `cpu` or `gpu`.
        running: The cluster itself.
        hosts: The numbers of its hosts.
        scope: Whose jobs it runs; None until its first lease.
        num_jobs: How many jobs it was given.
        unfit: Why it cannot be used again; empty while it can.
    """

    def __init__(self, preload: Preload, topology: Topology, device: str, options: Mapping[str, Any]) -> None:
        self.topology = topology
        self.device = device
        self.scope: str | None = None
        self.num_jobs = 0
        self.unfit = ""
        self._idle: set[int] = set()
        self._has_old_collectives = False
        self._first_keys: dict[int, int] = {}
        directory = Path(tempfile.mkdtemp(dir=preload.directory))
        self.running = preload.launch(ClusterPlan(topology, WarmHost(), directory, device=device, **options))
        self.hosts = range(len(self.running.roles))

    def settle(self) -> str:
        """Wait until every host is idle; why the cluster cannot be used, empty where it can."""
        watch = Watch(self.running, _IDLE_SECONDS if self.num_jobs else self.running.plan.start_timeout + _IDLE_SECONDS)
        self._wait_until_idle(watch)
        if not self.unfit and self._has_old_collectives and self.topology.has_several_hosts:
            # Only when no host is in a collective any more, and on all before one is in the next.
            self._tell(Renew(max(self._first_keys.values())))
            self._has_old_collectives = False
            self._wait_until_idle(watch)
        if not self.unfit:
            for host, event in self.running.events(0.0):  # one may have ended since
                self.take(host, event)
        return self.unfit

    def _wait_until_idle(self, watch: Watch) -> None:
        if watch.follow(lambda: bool(self.unfit) or len(self._idle) == len(self.hosts), self.take) == TIMEOUT:
            self.reject("a host was not idle in time after its job")

    def _tell(self, message: Job | Renew) -> None:
        self._idle.clear()
        for host in self.hosts:
            self.running.tell(host, pickle.dumps(message))

    def take(self, host: int, event: Event) -> None:
        """Note an event that says what may become of the cluster."""
        name, kind = self.running.name(host), event["event"]
        if kind == IDLE:
            self._idle.add(host)
            self._first_keys[host] = event["first_key"]
        elif kind == "exit":
            self.reject(f"{name} ended ({event['status']}, {event['code']})")
        elif kind == JOB_DONE and event["status"] != "returned":
            # One host that raised is back in its loop; several may no longer agree.
            if event["status"] == "exited" or len(self.hosts) > 1:
                self.reject(f"a job {event['status']} on {name}")
        elif kind == NEEDS_PROCESS:
            self.reject(f"{name}: its job sets {event['name']}, which TensorFlow reads when it is imported")

    def reject(self, reason: str) -> None:
        """Mark it as not usable again. Keep the first reason."""
        self.unfit = self.unfit or reason

    def start(self, call: bytes, cwd: Path, search_path: tuple[str, ...], *, resets: bool) -> None:
        """Have every host run a pickled function with its arguments."""
        path = self.running.plan.directory / "call.pickle"
        path.write_bytes(call)
        self.num_jobs += 1
        self._has_old_collectives = True
        self._tell(Job(self.num_jobs, path, cwd, search_path, resets))

    def output(self, host: int) -> str:
        """Return a host's output during its job, or only its end if it is long."""
        path = self.running.plan.directory / f"host-{host}" / OUTPUT
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _SHOWN))
            return file.read().decode("utf-8", "replace")
        return ""

    def end(self) -> None:
        """End every process of it and delete its folder."""
        with contextlib.suppress(Unavailable):
            self.running.end()
        remove_tree(self.running.plan.directory)


class NeedsBareClusterError(Exception):
    """Report that the job sets what TensorFlow reads at its import, and needs hosts that have not imported it."""

    def __init__(self, reason: str, host: int) -> None:
        super().__init__(reason)
        self.host = host


class Round:
    """Watch a job that was started in a session.

    Args:
        session: Where it runs.
        timeout: Seconds after which all are ended; None for as long as it takes.
        grace: Seconds that the others get when one host is done for.
        patience: Seconds that a host may wait, doing nothing, when another one is done; None for as long as it takes.
        on_event: Called with each event of the job.
        note: Called with what the user should know.

    Attributes:
        watch: Knows when the job has to be over.
    """

    def __init__(
        self,
        session: Session,
        *,
        timeout: float | None,
        grace: float,
        patience: float | None,
        on_event: Callable[[int, Event], None],
        note: Callable[[str], None],
    ) -> None:
        self._session = session
        self._grace = grace
        self._on_event = on_event
        self._note = note
        self._results: dict[int, HostResult] = {}
        self._steps: dict[int, int] = {}
        self.watch = Watch(session.running, timeout)
        with_servers = session.topology.num_ps > 0  # where hosts that are done go on serving
        self._stragglers = Stragglers(session.running, math.inf if patience is None or with_servers else patience)

    def hurry(self, grace: float = math.inf) -> None:
        """Give the unfinished hosts only this many more seconds. If all finish in time, the cluster stays."""
        self.watch.give_up_in(min(grace, self._grace))

    def results(self) -> list[HostResult]:
        """Wait for all.

        Returns:
            The result of each host.

        Raises:
            NeedsBareClusterError: When the job cannot run on this cluster.
        """
        num_hosts = len(self._session.hosts)
        ending = self.watch.follow(
            lambda: not self._pending(),
            self._take,
            lambda: HANG if self._stragglers.are_lost(self._pending(), num_hosts) else "",
        )
        if ending != DONE:
            self._session.reject(_UNFIT[ending])
            stacks = self._session.running.stacks()
            for host in self._pending():
                self._add(HostResult(host, _STATUS[ending], stack=stacks.get(host, "")))
            self._session.running.end()
        return [self._results[host] for host in self._session.hosts]

    def _pending(self) -> list[int]:
        return [host for host in self._session.hosts if host not in self._results]

    def _take(self, host: int, event: Event) -> None:
        self._session.take(host, event)
        kind = event["event"]
        if kind == JOB_DONE:
            self._take_end_of_job(host, event)
        elif kind == "exit":
            if host not in self._results:
                outcome = next(outcome for outcome in self._session.running.outcomes if outcome.host == host)
                self._add(HostResult(host, outcome.status, code=outcome.code, stack=outcome.stack))
            self.hurry(_AFTER_KILL)
            self._on_event(host, event)
        elif kind == "note":
            self._note(event["text"])
        elif kind == NEEDS_PROCESS:
            raise NeedsBareClusterError(f"the job sets {event['name']}, which TensorFlow reads when it is imported", host)
        elif kind not in (IDLE, "started"):
            if isinstance(event.get("step"), int):
                self._steps[host] = event["step"]
            self._on_event(host, event)

    def _take_end_of_job(self, host: int, event: Event) -> None:
        result = HostResult(host, event["status"], error=event.get("error"), code=event.get("code"))
        try:
            result.value = None if event.get("pickled") is None else pickle.loads(event["pickled"])
        except Exception as error:  # a class that only the host knows
            result.status = "raised"
            said = f"{type(error).__name__}: {error}"
            text = f"The process that submits a job must be able to unpickle what it returns. Received: {said}."
            result.error = RemoteError("TypeError", f"{text} Return numbers, NumPy arrays and containers of them.", "")
        self._add(result)
        has_failed = result.status != "returned" and len(self._session.hosts) > 1
        if has_failed or (result.status == "returned" and self._session.running.roles[host] == "chief"):
            self.hurry()

    def _add(self, result: HostResult) -> None:
        result.output = self._session.output(result.host)
        result.step = self._steps.get(result.host)
        self._results[result.host] = result
