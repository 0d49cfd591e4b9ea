"""Define `Cluster`: run a function on every host of a topology."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, final

from emulate.cluster.context import HostContext
from emulate.cluster.environ import is_read_at_import
from emulate.cluster.hang import Follower, explain_hang
from emulate.cluster.lives import Standstill, asks_to_go_on, first_cause, is_for_ever, next_life, patience_after, telling
from emulate.cluster.parent import Preload, share_preload
from emulate.cluster.plan import ClusterPlan, HostOutcome, Owner, check_function, check_time_limit, checked_environment
from emulate.cluster.supervision import RunningCluster
from emulate.cluster.views import remove_tree
from emulate.devices import choose_device
from emulate.errors import Hung, ProgramFailed, UsageError
from emulate.faults import Fault, Fired, check_fired, check_for, parse_all
from emulate.program import pickle_by_value, shorten_traceback
from emulate.topology import Topology


@final
class Cluster:
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
        _check_one_of("all_reduce", all_reduce, ("auto", "ring", "hierarchical", "one-device"))
        _check_one_of("network", network, ("own", "host"))
        check_time_limit(timeout)
        choice = choose_device(device, [self.topology])
        self.device = choice.kind
        self._all_reduce = all_reduce
        self._network = network
        self._timeout = timeout
        self._own_environment = checked_environment(environment)
        self._echo = echo
        self._owner = Owner()
        self._preload: Preload | None = preload
        self._environment = self._own_environment
        if self._preload is None:
            self._preload, self._environment = share_preload(self._own_environment)
        self.fired: list[Fired] = []
        self.restarts = 0
        self._steps: Callable[[int], int | None] = lambda host: None
        self._arrived: set[int] = set()
        self.notes: list[str] = [choice.why] if choice.why else []

    def _early(self) -> dict[str, str]:
        return {name: value for name, value in self._own_environment.items() if is_read_at_import(name)}

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
        self._owner.check("A cluster")
        check_function(function)
        wanted_faults = parse_all(faults)
        check_for(wanted_faults, self.topology)
        if not (isinstance(restarts, int) and restarts >= 0):
            raise UsageError(f"A number of restarts must not be negative. Received: restarts={restarts!r}. Use 0 for none.")
        call = _Call(
            pickle_by_value(functools.partial(function, *args, **kwargs), getattr(function, "__qualname__", repr(function)))
        )
        try:
            return self._run_once(self._preload, call, wanted_faults, restarts)
        except _NeedsFreshProcessError:
            with Preload(environment=self._early(), imports=False) as preload:
                return self._run_once(preload, call, wanted_faults, restarts)

    def _run_once(self, preload: Preload, call: _Call, faults: tuple[Fault, ...], restarts: int) -> list[Any]:
        directory = Path(tempfile.mkdtemp(dir=preload.directory))
        try:
            with preload.launch(replace(self._plan(call, directory), faults=faults)) as running:
                self.fired = running.fired
                self._live(running, restarts)
            check_fired(faults, running.fired)
            self.notes += [note for note in running.notes if note not in self.notes]
            return _values(running)
        finally:
            remove_tree(directory)

    def _plan(self, call: _Call, directory: Path) -> ClusterPlan:
        return ClusterPlan(
            topology=self.topology,
            entry=call,
            directory=directory,
            device=self.device,
            all_reduce=self._all_reduce,
            network=self._network,
            environment=self._environment,
            echo=self._echo,
        )

    def _live(self, running: RunningCluster, restarts: int) -> None:
        """Supervise it through all its lives."""
        self.restarts = 0
        self._arrived.clear()
        while not self._is_done(running, self.restarts < restarts):
            self.restarts += 1
            running.restart(next_life(running, self.restarts))

    def _is_done(self, running: RunningCluster, may_restart: bool) -> bool:
        """Supervise it through one life; False where it is to have another."""
        try:
            cause = self._supervise(running)
        except Hung:
            if may_restart and any(is_for_ever(fired.fault) for fired in running.fired_now):
                return False
            raise
        if cause is not None and not (may_restart and asks_to_go_on(running)):
            _fail(running, cause, self._steps(cause.host), has_arrived=cause.host in self._arrived)
        return cause is None

    def _supervise(self, running: RunningCluster) -> HostOutcome | None:
        """Wait until the run is over or has failed. Return the host whose end gives the reason."""
        until = given_up = failed_at = float("inf")
        limit = self._timeout or float("inf")
        standstill, follower = Standstill(running), Follower(running)
        self._steps = follower.step
        while not running.is_over and time.monotonic() < given_up:
            for host, event in running.events(0.2):
                self._react(host, event)
                follower.feed(host, event)
                if event["event"] == "started":  # how long the start may take has a limit of its own
                    until = time.monotonic() + limit
            if (cause := first_cause(running.outcomes)) is not None:
                failed_at = min(failed_at, time.monotonic())
                given_up = failed_at + patience_after(cause)
            elif (hang := follower.hang()) is not None:
                raise _hung(follower, f"no host can go on ({hang.code}: {hang.description})", "hang")
            elif time.monotonic() > until or standstill.is_reached():
                raise _hung(follower, f"timeout={limit:g} s", "timeout")
        return first_cause(running.outcomes)

    def _react(self, host: int, event: Mapping[str, Any]) -> None:
        if event["event"] == _ARRIVED:
            self._arrived.add(host)
        if event["event"] == "needs-fresh-process":
            raise _NeedsFreshProcessError
        if event["event"] == "note" and event["text"] not in self.notes:
            self.notes.append(event["text"])

    def close(self) -> None:
        """Refuse further runs. The hosts of each `run` have ended with it."""
        self._preload = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_ARRIVED = "arrived"  # the function, with its arguments, on a host


class _NeedsFreshProcessError(Exception):
    pass


@dataclass(frozen=True)
class _Call:
    """Hold a pickled function with its arguments, as an entry."""

    pickled: bytes

    def __call__(self, context: HostContext) -> Any:
        from emulate.probe import Pulse  # it imports NumPy, which the caller need not

        if not context.topology.num_ps:
            Pulse(context.send, several_hosts=context.topology.has_several_hosts).install()
        function = pickle.loads(self.pickled)
        context.send({"event": _ARRIVED})
        return function()


def _check_one_of(name: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise UsageError(f"{name} must be one of {', '.join(possible)}. Received: {name}={value!r}. Choose one of them.")


def _values(running: RunningCluster) -> list[Any]:
    by_host = {outcome.host: outcome for outcome in running.outcomes}
    for outcome in running.outcomes:
        if outcome.status == "exited":  # os._exit(0), where sys.exit(0) returns None
            _fail(running, outcome, None, has_arrived=True)
    return [_value(running, by_host[host]) for host in range(len(running.roles))]


def _value(running: RunningCluster, outcome: HostOutcome) -> Any:
    try:
        return outcome.value
    except Exception as error:  # a class that only the host knows, or that cannot be made again
        text = (
            "The process that calls a function must be able to unpickle what it returns. "
            f"Received: {type(error).__name__}: {error}, of what {running.name(outcome.host)} returned. "
            "Return numbers, NumPy arrays and containers of them."
        )
        raise ProgramFailed(text, host=outcome.host, traceback_text="") from error


def _hung(follower: Follower, what: str, reason: str) -> Hung:
    running = follower.cluster
    stacks, explained = running.stacks(), explain_hang(follower)
    waits = f"{running.first_use}. " if running.first_use and reason == "timeout" else ""
    return Hung(
        f"A function must end in time on every host. Received: {what}, topology={str(running.plan.topology)!r}. {waits}"
        f"Give it more time, or see where each host was:\n{explained}",
        reason=reason,
        stacks=stacks,
    )


def _fail(running: RunningCluster, outcome: HostOutcome, step: int | None, *, has_arrived: bool) -> NoReturn:
    name, output = running.name(outcome.host), _last_output(running, outcome.host)
    expected = "".join(f"A fault was injected: {fired}. " for fired in running.fired)
    after = "" if step is None else f" after step {step}"
    if outcome.error is not None:
        said = f"{outcome.error.kind} on {name}:\n{shorten_traceback(outcome.error.traceback_text)}{output}"
        text = f"{_NOT_RAISE if has_arrived else _ARRIVE} {expected}Received: {said}"
        raise ProgramFailed(text, host=outcome.host, traceback_text=outcome.error.traceback_text) from outcome.error.exception()
    how = f"signal {-(outcome.code or 0)}" if outcome.status == "killed" else f"exit code {outcome.code}"
    text = f"A function must return. Received: {name} ended with {how}{after}. {expected}{output}".rstrip()
    if outcome.stack:
        text += f"\nPython's stack there:\n{outcome.stack}"
    raise ProgramFailed(text, host=outcome.host, traceback_text="")


_NOT_RAISE = "A function must not raise."
_ARRIVE = (
    "A host must be able to unpickle a function and its arguments, as it can numbers, NumPy arrays and containers of them, "
    "before it calls it."
)


def _last_output(running: RunningCluster, host: int) -> str:
    """Return the end of the host's output, for the message."""
    shown = ""
    for name in ("stdout", "stderr"):
        path = running.plan.directory / f"host-{host}" / name
        lines = telling(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []
        shown += f"\n{name} of the host:{os.linesep}" + os.linesep.join(lines) if lines else ""
    return shown
