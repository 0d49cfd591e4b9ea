"""Describe what a cluster runs, the roles of its hosts with their TF_CONFIG, and how each of them ended.

The arguments of a call are checked before anything is started, and who makes it: only the process that made a cluster can use
and end it, not a process forked from that one.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from emulate.cluster.context import HostContext
from emulate.devices import GpuShare
from emulate.errors import UsageError
from emulate.faults import Fault
from emulate.grouping import grouped
from emulate.topology import Topology


@dataclass(frozen=True)
class ClusterPlan:
    """Describe one launch of a cluster.

    Attributes:
        topology: Its shape.
        entry: Called on every host's main thread, after the devices were installed. Sent with cloudpickle.
        directory: An existing folder; host i writes `host-<i>/stdout`, `stderr` and `stack.txt` there. What the
            program puts into its temporary folder, and copies of the user's folders, lie there until the end too.
        device: `cpu`, or `gpu`: hosts get this machine's GPUs, or slices of them (`emulate.devices.choose_device` decides).
        all_reduce: Handed to `emulate.devices`.
        network: `own` (several hosts get a network of their own) or `host`.
        tf_config: Whether TF_CONFIG is set; None means: where the topology has several hosts.
        reference: Handed to `emulate.devices`: longer device lists are cut to what there is.
        views: Folders whose files the program sees and may change without the user's being changed.
        cwd: The working directory, None for the one of the caller.
        environment: Set on top of the caller's.
        emulated: False leaves devices, environment and network calls as they are on this machine: the plain program.
        own_hashes: Every host after the first is an interpreter of its own, which hashes strings in its own way, as on real
            hosts, and imports TensorFlow itself; without faults alone.
        virtual_host: Of virtual hosts the number that the program finds in TF_CONFIG.
        echo: Pass output through instead of capturing it.
        start_timeout: Seconds until every host must have started, the pre-loaded parent's imports included.
        shutdown_timeout: Seconds a host gets to leave by itself once all are over.
        faults: The faults to inject into the hosts and their links.
        fired: Places in `faults` of those that came to pass in an earlier life of this cluster.
    """

    topology: Topology
    entry: Callable[[HostContext], Any]
    directory: Path
    device: str = "cpu"
    all_reduce: str = "auto"
    network: str = "own"
    tf_config: bool | None = None
    reference: bool = False
    views: tuple[Path, ...] = ()
    cwd: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    emulated: bool = True
    own_hashes: bool = False
    virtual_host: int = 0
    echo: bool = False
    start_timeout: float = 60
    shutdown_timeout: float = 5
    faults: tuple[Fault, ...] = ()
    fired: frozenset[int] = frozenset()

    def for_keeper(self) -> ClusterPlan:
        """Return the plan without the entry, which is pickled for the hosts only."""
        return replace(self, entry=_no_entry, directory=self.directory.resolve())

    @property
    def faults_to_come(self) -> dict[int, Fault]:
        """Return the faults that have not occurred yet, by their place in `faults`."""
        return {number: fault for number, fault in enumerate(self.faults) if number not in self.fired}

    @property
    def sets_tf_config(self) -> bool:
        """Return whether hosts find TF_CONFIG in their environment."""
        return self.topology.has_several_hosts if self.tf_config is None else self.tf_config


def _no_entry(context: object) -> None:
    raise AssertionError("a keeper does not run the entry")


@dataclass(frozen=True)
class Order:
    """Hold the supervisor's order to the keeper: the plan without its entry, which is pickled for the hosts only."""

    plan: ClusterPlan
    entry: bytes
    search_path: tuple[str, ...]
    cwd: Path
    supervisor: int
    gpus: tuple[GpuShare, ...] = ()


AGAIN = b"again "
"""Precedes an order to end the hosts and to fork them again: plan and entry may differ."""


@dataclass(frozen=True)
class RemoteError:
    """Describe an exception that ended the entry on a host.

    Attributes:
        kind: Its class, with its module where that is not `builtins`.
        message: Its text.
        traceback_text: The traceback as Python prints it, frames of gpudist removed.
    """

    kind: str
    message: str
    traceback_text: str
    pickled: bytes | None = field(default=None, repr=False)
    module: str = field(default="builtins", repr=False)

    def exception(self) -> BaseException | None:
        """Return the exception with its traceback, if that needs no heavy import here."""
        if self.pickled is None or self.module.partition(".")[0] not in sys.modules:
            return None
        from tblib import pickling_support

        pickling_support.install()
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # its class or what it carries cannot be rebuilt in this process
            return None
        return error if isinstance(error, BaseException) else None


@dataclass
class HostOutcome:
    """Describe how one host ended.

    Attributes:
        host: Its number.
        status: `returned`; `raised`; `exited` (the process left by itself, `sys.exit(1)` say); `killed` (by a
            signal, `code` is minus its number); `ended` (by `RunningCluster.end`, before it was over); `missing` (a
            fault kept it from starting).
        code: The exit code, where the process left by itself or was killed.
        error: What was raised.
        stack: Where it was when a fault of its process ended it (a segmentation fault, an abort), outermost call first.
    """

    host: int
    status: str
    code: int | None = None
    error: RemoteError | None = None
    stack: str = ""
    pickled: bytes | None = field(default=None, repr=False)

    @property
    def value(self) -> Any:
        """Return the entry's result."""
        return None if self.pickled is None else pickle.loads(self.pickled)


FIRST_PORT = 2222
"""In a network of its own every cluster uses the same ports, the ones of TensorFlow's own examples."""


def roles_of(topology: Topology) -> tuple[str, ...]:
    """Return the role of each host: workers; with parameter servers a chief, then workers, then ps.

    Args:
        topology: The cluster's shape.

    Returns:
        `chief`, `worker` or `ps` for each host.

    Example:
        >>> roles_of(Topology.parse("2x4"))
        ('worker', 'worker')
        >>> roles_of(Topology.parse("1x1+2ps"))
        ('chief', 'worker', 'ps', 'ps')
    """
    workers = ("worker",) * (1 if topology.is_virtual else topology.num_hosts)
    return ("chief", *workers, *("ps",) * topology.num_ps) if topology.num_ps else workers


def tf_config(roles: Sequence[str], places: Sequence[str], host: int) -> str:
    """Return the text of TF_CONFIG for one host, as a real cluster sets it. `places` lists all addresses with ports."""
    cluster = grouped(zip(roles, places, strict=True))
    task = {"type": roles[host], "index": roles[:host].count(roles[host])}
    return json.dumps({"cluster": cluster, "task": task})


def host_name(roles: Sequence[str], host: int) -> str:
    """Return a host's name for messages: `host 1`, or `host 1 (worker 0)` with several roles."""
    if len(set(roles)) == 1:
        return f"host {host}"
    return f"host {host} ({roles[host]} {roles[:host].count(roles[host])})"


def hold_ports(count: int) -> list[socket.socket]:
    """Reserve free ports of this machine for as long as the sockets stay open.

    A socket that is bound but does not listen keeps its port from being chosen for anybody else (`bind` to port 0, the near
    end of a connection, another call of this) and from being bound as sockets are bound by default, while TensorFlow's server,
    which sets SO_REUSEADDR as this does, still gets it. Somebody who names the very port and sets SO_REUSEADDR gets it too;
    the server then says that the address is in use.
    """
    held = []
    for _ in range(count):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", 0))
        held.append(sock)
    return held


def check_function(function: object) -> None:
    """Refuse what cannot be called.

    Args:
        function: What hosts are to run.

    Raises:
        UsageError: When it cannot be called.
    """
    if not callable(function):
        raise UsageError(
            f"What hosts run must be callable. Received: function={function!r}. "
            "Give a function; `gpudist run` and emulate.verify take files."
        )


def check_one_of(name: str, value: str, possible: tuple[str, ...]) -> None:
    """Refuse a value that is not possible.

    Args:
        name: The name of the argument.
        value: The value.
        possible: Those that are.

    Raises:
        UsageError: If it is none of these.
    """
    if value not in possible:
        raise UsageError(f"{name} must be one of {', '.join(possible)}. Received: {name}={value!r}. Choose one of them.")


def check_time_limit(timeout: object) -> None:
    """Refuse what is no time limit.

    Args:
        timeout: Seconds, or None.

    Raises:
        UsageError: When it is no positive number.
    """
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"A time limit must be a positive number. Received: timeout={timeout!r}. Use None for no limit.")


def checked_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment variables for the hosts.

    Args:
        environment: Their values by name; None for none.

    Returns:
        A copy of it.

    Raises:
        UsageError: When it is no mapping of texts.
    """
    if environment is None:
        return {}
    if not isinstance(environment, Mapping):
        raise UsageError(
            f"An environment must have a text for each name. Received: environment={environment!r}. Give a dict of texts."
        )
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(
                f"An environment must have a text for each name. Received: environment={{{name!r}: {value!r}}}. "
                f"Write it as {{{str(name)!r}: {str(value)!r}}}."
            )
    return dict(environment)


@final
class ForkGuard:
    """Remember the process that made something."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Return whether this is that process, not one forked from it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Refuse the use in a process that was forked.

        Args:
            what: What it owns, for the message: `A cluster`.

        Raises:
            UsageError: In another process.
        """
        if not self.is_here:
            raise UsageError(
                f"{what} serves the process that made it. Received: process={os.getpid()}, which was forked from "
                f"{self._pid}. Make another one in this process, or use it in that one."
            )
