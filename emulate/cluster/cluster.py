"""Define `Cluster`: run a function on every host of a topology."""

from __future__ import annotations

import functools
import math
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, final

from emulate.cluster.context import HostContext
from emulate.cluster.environ import read_at_import
from emulate.cluster.hang import Hang, HangJudge, explain_hang
from emulate.cluster.parent import Preload, share_preload
from emulate.cluster.plan import (
    ClusterPlan,
    ForkGuard,
    HostOutcome,
    check_function,
    check_one_of,
    check_time_limit,
    checked_environment,
)
from emulate.cluster.restarts import Standstill, asks_to_go_on, first_cause, is_for_ever, next_life, patience_after, telling
from emulate.cluster.supervision import HANG, TIMEOUT, Event, RunningCluster, Watch
from emulate.cluster.views import remove_tree
from emulate.devices import choose_device
from emulate.errors import Hung, ProgramFailed, UsageError
from emulate.faults import Fault, Fired, check_fired, check_for, parse_all
from emulate.program import pickle_by_value, shorten_traceback
from emulate.topology import Topology


@final
class Cluster(AbstractContextManager["Cluster"]):
    """Run functions on emulated hosts on this machine, each a process with its own devices.

    Every `run` forks fresh hosts from one process that has imported TensorFlow. So a run takes tenths of a second and finds
    nothing of the previous one. All clusters of this process share that process, which ends with it. The caller's process
    imports no TensorFlow.

    Args:
        topology: `"2x2"` or a Topology.
        device: `cpu`, `gpu` (this machine's GPUs, or slices of them), or `auto`: GPUs if each device can have its own.
        all_reduce: How replicas of one host are summed: `auto`, `ring`, `hierarchical` or `one-device`.
        network: `own`: several hosts get a private network without access to the outside. `host`: this machine's network.
        timeout: The time limit of one `run` in seconds; None for no limit.
        environment: Environment variables for every host, added to those of this process.
        echo: Relay the hosts' output to this process's output instead of keeping it for error messages.
        preload: The process to fork from. Default: the one that all clusters of this process share.

    Attributes:
        device: The device that computes: `cpu` or `gpu`.
        fired: The faults that occurred in the last `run`.
        restarts: How often the last `run` was restarted.
        notes: What the user should know, each once.

    Raises:
        UsageError: If the topology or an option is not valid.
        Unavailable: If hosts cannot be emulated, or lack GPUs.

    Example:
        >>> from emulate import Cluster
        >>> with Cluster("2x1") as cluster:
        ...     cluster.run(lambda a, b: a + b, 1, b=2)
        [3, 3]
    """

    def __init__(
        self,
        topology: str | Topology,
        *,
        device: str = "auto",
        all_reduce: str = "auto",
        network: str = "own",
        timeout: float | None = 600,
        environment: Mapping[str, str] | None = None,
        echo: bool = False,
        preload: Preload | None = None,
    ) -> None:
        self.topology = Topology.parse(topology)
        check_one_of("all_reduce", all_reduce, ("auto", "ring", "hierarchical", "one-device"))
        check_one_of("network", network, ("own", "host"))
        check_time_limit(timeout)
        choice = choose_device(device, [self.topology])
        self.device = choice.kind
        self._options: dict[str, Any] = {"all_reduce": all_reduce, "network": network, "echo": echo}
        self._timeout = timeout
        self._own_environment = checked_environment(environment)
        self._fork_guard = ForkGuard()
        self._preload: Preload | None = preload
        self._environment = self._own_environment
        if self._preload is None:
            self._preload, self._environment = share_preload(self._own_environment)
        self.fired: list[Fired] = []
        self.restarts = 0
        self.notes: list[str] = [choice.why] if choice.why else []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        faults: str | Fault | Iterable[str | Fault] = (),
        restarts: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on every host at the same time.

        Args:
            function: The function. It is sent by value if it is local to a script or a test. TensorFlow is already imported
                there.
            *args: Its arguments, the same on every host.
            faults: Faults for the hosts, such as `"kill:host=1,step=5"` or `emulate.faults.Kill(host=1, step=5)`. Those that
                occurred are in `fired` afterwards.
            restarts: How often all hosts are restarted, if a fault ends them or they exit with code 75. Files stay.
            **kwargs: Its keyword arguments.

        Returns:
            One result per host, in host order. With parameter servers the order is the chief, the workers, the servers.
            Hosts that still serve when the chief has finished are ended, and their result is None.

        Raises:
            ProgramFailed: If a host raised or ended by itself, with the host's name and its traceback. The exception itself is
                the `__cause__` if this process knows its class.
            Hung: If the time limit passed.
            UsageError: If the cluster was left or belongs to another process, or a fault is not valid or did not occur.
        """
        if self._preload is None:
            raise UsageError(
                f"A cluster runs functions inside its `with` only. Received: topology={str(self.topology)!r}, left. "
                "Make a new one."
            )
        self._fork_guard.check("A cluster")
        check_function(function)
        wanted_faults = parse_all(faults)
        check_for(wanted_faults, self.topology)
        if not (isinstance(restarts, int) and restarts >= 0):
            raise UsageError(f"A number of restarts must not be negative. Received: restarts={restarts!r}. Use 0 for none.")
        name = getattr(function, "__qualname__", repr(function))
        call = _Call(pickle_by_value(functools.partial(function, *args, **kwargs), name))
        try:
            return self._run_once(self._preload, call, wanted_faults, restarts)
        except _NeedsFreshProcessError:
            with Preload(environment=read_at_import(self._own_environment), imports=False) as preload:
                return self._run_once(preload, call, wanted_faults, restarts)

    def _run_once(self, preload: Preload, call: _Call, faults: tuple[Fault, ...], restarts: int) -> list[Any]:
        directory = Path(tempfile.mkdtemp(dir=preload.directory))
        plan = ClusterPlan(self.topology, call, directory, device=self.device, environment=self._environment, **self._options)
        try:
            with preload.launch(replace(plan, faults=faults)) as running:
                self.fired = running.faults.fired
                life = self._live(running, restarts)
            check_fired(faults, self.fired)
            self.notes += [note for note in running.notes if note not in self.notes]
            return life.values()
        finally:
            remove_tree(directory)

    def _live(self, running: RunningCluster, restarts: int) -> _Life:
        """Follow it through all its lives. Return the last one."""
        self.restarts = 0
        while True:
            life = _Life(running, self._timeout, self.notes)
            ending, cause = life.follow(), first_cause(running.outcomes)
            is_hung = ending in (HANG, TIMEOUT)
            if not is_hung and cause is None:
                return life
            is_expected = any(is_for_ever(fired.fault) for fired in running.faults.now) if is_hung else asks_to_go_on(running)
            if self.restarts == restarts or not is_expected:
                life.fail(cause, life.judge.state(cause.host).step) if cause is not None else life.fail_to_end(ending)
            self.restarts += 1
            running.restart(next_life(running, self.restarts))

    def close(self) -> None:
        """Refuse further runs. The hosts of each `run` have ended with it."""
        self._preload = None

    def __exit__(self, *_: object) -> None:
        self.close()


class _NeedsFreshProcessError(Exception):
    pass


_ARRIVED = "arrived"  # the function, with its arguments, on a host


@dataclass(frozen=True)
class _Call:
    """Hold a pickled function with its arguments, as an entry."""

    pickled: bytes

    def __call__(self, context: HostContext) -> Any:
        from emulate.instrument import Pulse  # it imports NumPy, which the caller need not

        if not context.topology.num_ps:
            Pulse(context.send, several_hosts=context.topology.has_several_hosts).install()
        function = pickle.loads(self.pickled)
        context.send({"event": _ARRIVED})
        return function()


_NOT_RAISE = "A function must not raise."
_ARRIVE = (
    "A host must be able to unpickle a function and its arguments, as it can numbers, NumPy arrays and containers of them, "
    "before it calls it."
)


class _Life:
    """Follow a cluster from the start of its hosts to their end, or to the next start.

    Args:
        running: The cluster.
        timeout: The time limit in seconds, from the moment at which the hosts have started.
        notes: Gets what the user should know.
    """

    def __init__(self, running: RunningCluster, timeout: float | None, notes: list[str]) -> None:
        self.running = running
        self.judge = HangJudge(running.plan.topology)
        self._arrived: set[int] = set()
        self._timeout = timeout
        self._notes = notes
        self._watch = Watch(running)
        self._standstill = Standstill(running)
        self._hang: Hang | None = None
        self._failed_at = math.inf

    def follow(self) -> str:
        """Wait until the run is over or has failed."""
        return self._watch.follow(lambda: self.running.is_over, self._take, self._find_hang)

    def _take(self, host: int, event: Event) -> None:
        self.judge.feed(host, event)
        kind = event["event"]
        if kind == "needs-fresh-process":
            raise _NeedsFreshProcessError
        if kind == _ARRIVED:
            self._arrived.add(host)
        elif kind == "note" and event["text"] not in self._notes:
            self._notes.append(event["text"])
        elif kind == "started" and self._failed_at == math.inf:  # how long the start may take has a limit of its own
            self._watch.allow(self._timeout)
        elif kind == "exit" and (cause := first_cause(self.running.outcomes)) is not None:
            self._failed_at = min(self._failed_at, time.monotonic())
            self._watch.given_up_at = self._failed_at + patience_after(cause)
            self._watch.deadline = math.inf  # the failure says more

    def _find_hang(self) -> str:
        # A standstill that a fault made is none.
        self._hang = None if self.running.faults.now else self.judge.verdict(self.running)
        if self._hang is not None:
            return HANG
        return TIMEOUT if self._standstill.is_reached() else ""

    def values(self) -> list[Any]:
        """Return what each host returned."""
        for outcome in self.running.outcomes:
            if outcome.status == "exited":  # os._exit(0), where sys.exit(0) returns None
                self.fail(outcome, None)
        return [self._value(outcome) for outcome in sorted(self.running.outcomes, key=lambda outcome: outcome.host)]

    def _value(self, outcome: HostOutcome) -> Any:
        try:
            return outcome.value
        except Exception as error:  # a class that only the host knows, or that cannot be made again
            text = (
                "The process that calls a function must be able to unpickle what it returns. "
                f"Received: {type(error).__name__}: {error}, of what {self.running.name(outcome.host)} returned. "
                "Return numbers, NumPy arrays and containers of them."
            )
            raise ProgramFailed(text, host=outcome.host, traceback_text="") from error

    def fail(self, outcome: HostOutcome, step: int | None) -> NoReturn:
        """Raise the error about the end of a host."""
        name, output = self.running.name(outcome.host), self._last_output(outcome.host)
        expected = "".join(f"A fault was injected: {fired}. " for fired in self.running.faults.fired)
        after = "" if step is None else f" after step {step}"
        if (error := outcome.error) is not None:
            rule = _NOT_RAISE if outcome.host in self._arrived else _ARRIVE
            text = f"{rule} {expected}Received: {error.kind} on {name}:\n{shorten_traceback(error.traceback_text)}{output}"
            raise ProgramFailed(text, host=outcome.host, traceback_text=error.traceback_text) from error.exception()
        how = f"signal {-(outcome.code or 0)}" if outcome.status == "killed" else f"exit code {outcome.code}"
        text = f"A function must return. Received: {name} ended with {how}{after}. {expected}{output}".rstrip()
        if outcome.stack:
            text += f"\nPython's stack there:\n{outcome.stack}"
        raise ProgramFailed(text, host=outcome.host, traceback_text="")

    def _last_output(self, host: int) -> str:
        shown = ""
        for name in ("stdout", "stderr"):
            path = self.running.plan.directory / f"host-{host}" / name
            lines = telling(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []
            shown += f"\n{name} of the host:{os.linesep}" + os.linesep.join(lines) if lines else ""
        return shown

    def fail_to_end(self, reason: str) -> NoReturn:
        """Raise the error that says that the hosts did not end."""
        running = self.running
        if self._hang is not None:
            what = f"no host can go on ({self._hang.code}: {self._hang.description})"
        else:
            what = f"timeout={self._timeout or math.inf:g} s"
        stacks, explained = running.stacks(), explain_hang(running, self.judge)
        waits = f"{running.first_use}. " if running.first_use and reason == TIMEOUT else ""
        raise Hung(
            f"A function must end in time on every host. Received: {what}, topology={str(running.plan.topology)!r}. {waits}"
            f"Give it more time, or see where each host was:\n{explained}",
            reason=reason,
            stacks=stacks,
        )
