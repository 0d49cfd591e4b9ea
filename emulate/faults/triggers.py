"""Track the step and phase in a host, and trigger its faults, which are carried out from inside its process.

The states of a cluster's hosts are in a page of shared memory.

The disk is filled for one process: the kernel refuses calls that need space (a seccomp filter, which cannot be removed). A file
system of its own would be fuller of surprises: mounts over a folder in use, limits on stacked overlays, and none of it where
mounts are refused. A filter sees numbers and flags, not paths, so what is refused is any file that is made (`O_CREAT`, `mkdir`)
or made longer in place, wherever it lies; what is open already can be written at its end.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emulate.errors import Unavailable
from emulate.faults.values import AtStep, Disconnect, Fault, FillDisk, Kill, Preempt, Slow, Stop

PEER_SECONDS = 60.0
"""Seconds for which a host waits, before an all-reduce, until a peer has started it."""
_A_MOMENT = 0.05  # from a peer's announcement to its operation's start
_POLL = 0.002

Send = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class HostFaults:
    """Describe what a host needs to know about the faults of its cluster.

    Attributes:
        host: Its number.
        faults: Those still to come, by their place in the list that the user gave.
        board: Shared with the other hosts.
    """

    host: int
    faults: Mapping[int, Fault]
    board: Board

    @property
    def own(self) -> dict[int, AtStep]:
        """Return the faults of this host that occur in a step."""
        return {k: fault for k, fault in self.faults.items() if isinstance(fault, AtStep) and fault.host == self.host}

    @property
    def announces(self) -> bool:
        """Return whether a fault of another host waits until this host enters an all-reduce."""
        others = (fault for fault in self.faults.values() if isinstance(fault, AtStep) and fault.host != self.host)
        return any(fault.phase == "all-reduce" for fault in others)


@dataclass
class Site:
    """Describe a place in the program's graphs, or a moment of its eager code, where a collective starts.

    Attributes:
        is_inside: Whether an optimizer's apply starts it.
        is_of_gradients: Whether it sums the gradients of a step, as far as is known.
    """

    is_inside: bool
    is_of_gradients: bool


@dataclass
class Counter:
    """Count the steps of one optimizer.

    Attributes:
        made: Those whose gradients were there, with those of the run that it was restored from.
    """

    made: int = 0


@dataclass
class Triggers:
    """Count steps and trigger faults.

    Attributes:
        known: What this host has to know.
        send: Tells the supervisor.
    """

    known: HostFaults
    send: Send
    _pending: dict[int, AtStep] = field(init=False)
    _slow: dict[int, Slowness] = field(init=False)
    _made: int = field(default=0, init=False)
    _step: int = field(default=0, init=False)
    _told: set[int] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._pending = dict(self.known.own)
        self._slow = {k: Slowness(fault) for k, fault in self._pending.items() if isinstance(fault, Slow)}

    @property
    def phases(self) -> set[str]:
        """Return the phases in which a fault may occur here."""
        return {fault.phase for fault in self.known.own.values()}

    def input(self) -> None:
        """Note that the data of the next step is about to reach a replica."""
        self._arrive("input", self._made + 1)

    def entering_apply(self, counter: Counter) -> None:
        """Note that the gradients exist and an optimizer is about to apply them."""
        counter.made += 1
        self._step = counter.made
        self._made = max(self._made, counter.made)
        for phase in ("input", "before-all-reduce"):
            self._arrive(phase, self._step)

    def entering(self, site: Site) -> None:
        """Note that a collective is about to start."""
        if not site.is_of_gradients:
            return
        step = self._step_at(site)
        self._arrive("before-all-reduce", step)
        self.known.board.enter(self.known.host, step)
        if any(fault.phase == "all-reduce" and step >= fault.step for fault in list(self._pending.values())):
            deadline = time.monotonic() + PEER_SECONDS
            while not self.known.board.has_peer_entered(self.known.host, step) and time.monotonic() < deadline:
                time.sleep(_POLL)
            time.sleep(_A_MOMENT)
            self._arrive("all-reduce", step)

    def leaving(self, site: Site) -> None:
        """Note that a collective is complete on this host."""
        if site.is_of_gradients:
            self._arrive("after-all-reduce", self._step_at(site))

    def applied(self, counter: Counter) -> None:
        """Note that the weights are updated. If nothing was summed between replicas, faults that wait for a sum occur now."""
        for phase in ("all-reduce", "after-all-reduce"):
            self._arrive(phase, counter.made)

    def writing(self, step: int | None = None) -> None:
        """Handle a half-written checkpoint of this step or of the last one."""
        self._arrive("checkpoint", self._made if step is None else step)

    def _step_at(self, site: Site) -> int:
        return self._step if site.is_inside else self._made + 1

    def _arrive(self, phase: str, step: int) -> None:
        for number, fault in list(self._pending.items()):
            if fault.phase != phase or step < fault.step:
                continue
            if number in self._slow:
                self._tell_once(number, fault, step)
                self._slow[number].slow_down(step)
            elif self._tell_once(number, fault, step):
                inject(fault, self.known.host, self.known.board)
                self._pending.pop(number, None)

    def _tell_once(self, number: int, fault: AtStep, step: int) -> bool:
        """Return whether the fault occurs now, and report it once."""
        with self._lock:
            if number in self._told:
                return False
            self._told.add(number)
        self.send(
            {"event": "fired", "fault": number, "text": str(fault), "host": fault.host, "step": step, "phase": fault.phase}
        )
        return True


_ENTERED, _DOWN = struct.Struct("<q"), struct.Struct("<d")
_SIZE = _ENTERED.size + _DOWN.size


class Board:
    """Hold the shared page. It is made before the hosts are forked; each host writes only its own place.

    Args:
        num_hosts: How many there are.
    """

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._memory = mmap.mmap(-1, max(1, num_hosts) * _SIZE)

    def enter(self, host: int, step: int) -> None:
        """Record that the host is in the all-reduce of a step."""
        _ENTERED.pack_into(self._memory, host * _SIZE, step)

    def has_peer_entered(self, host: int, step: int) -> bool:
        """Return whether another host is, or was, in the all-reduce of that step."""
        entered = (_ENTERED.unpack_from(self._memory, peer * _SIZE)[0] for peer in range(self._num_hosts) if peer != host)
        return any(peer_step >= step for peer_step in entered)

    def disconnect(self, host: int, seconds: float | None) -> None:
        """Take the host's link down for some seconds, or forever."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        _DOWN.pack_into(self._memory, host * _SIZE + _ENTERED.size, until)

    def is_down(self, host: int) -> bool:
        """Return whether the host's link is down."""
        until: float = _DOWN.unpack_from(self._memory, host * _SIZE + _ENTERED.size)[0]
        return until > 0 and time.monotonic() < until


def inject(fault: AtStep, host: int, board: Board) -> None:
    """Let a fault that comes to pass once do so; of one that kills there is no return."""
    if isinstance(fault, Kill):
        os.kill(os.getpid(), signal.SIGKILL)
    elif isinstance(fault, Stop):  # whoever supervises lets it go on
        os.kill(os.getpid(), signal.SIGSTOP)
    elif isinstance(fault, Preempt):
        timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        os.kill(os.getpid(), signal.SIGTERM)
    elif isinstance(fault, Disconnect):
        board.disconnect(host, fault.seconds)
    elif isinstance(fault, FillDisk):
        fill_disk()


class Slowness:
    """Slow down each step of a host.

    Args:
        fault: By how much.
    """

    def __init__(self, fault: Slow) -> None:
        self._fault = fault
        self._step = 0
        self._last: float | None = None

    def slow_down(self, step: int) -> None:
        """Wait, once a step."""
        if step <= self._step:
            return
        self._step = step
        if self._fault.seconds is not None:
            time.sleep(self._fault.seconds)
        elif self._last is not None:
            assert self._fault.factor is not None
            time.sleep((self._fault.factor - 1) * (time.monotonic() - self._last))
        self._last = time.monotonic()


_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _TSYNC = 1, 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_INSTRUCTION = struct.Struct("=HBBI")


@dataclass(frozen=True)
class _Calls:
    """Hold the numbers of system calls.

    Attributes:
        architecture: As the filter sees it.
        seccomp: The call that installs a filter.
        making: Those that make or lengthen whatever their arguments are.
        opening: Those that do where their flags say so, with the place of the flags among the arguments.
    """

    architecture: int
    seccomp: int
    making: tuple[int, ...]
    opening: tuple[tuple[int, int], ...]


_CALLS = {
    # creat, mkdir, mkdirat, pwrite64, pwritev, fallocate; open, openat
    "x86_64": _Calls(0xC000003E, 317, (85, 83, 258, 18, 296, 285), ((2, 1), (257, 2))),
    # mkdirat, pwrite64, pwritev, fallocate; openat
    "aarch64": _Calls(0xC00000B7, 277, (34, 68, 70, 47), ((56, 2),)),
}


def check_disk() -> None:
    """Find out whether `fill` can work here.

    Raises:
        Unavailable: When it cannot.
    """
    reason = ""
    if platform.machine() not in _CALLS:
        reason = f"processors of the kind {platform.machine()} are not known"
    elif not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        reason = "the kernel has no seccomp filters"
    if reason:
        raise Unavailable(
            f"A full disk must be possible to emulate. Received: fault='fill-disk', where {reason}. Leave the fault out here."
        )


def fill_disk() -> None:
    """Let this process, all its threads and the processes it starts get ENOSPC for calls that need space.

    Raises:
        OSError: When the kernel refuses the filter.
    """
    calls = _CALLS[platform.machine()]
    program = _program(calls)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and where they are.
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(calls.seccomp, _SET_MODE_FILTER, _TSYNC, filter_):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _program(calls: _Calls) -> bytes:
    """Return the filter program: refuse the known calls, allow all others."""
    refuse, allow = (_RETURN, 0, 0, _ERRNO | errno.ENOSPC), (_RETURN, 0, 0, _ALLOW)
    lines = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, calls.architecture), allow, (_LOAD, 0, 0, _NUMBER_AT)]
    for number in calls.making:
        lines += [(_EQUAL, 0, 1, number), refuse]
    for number, place in calls.opening:
        flags = _ARGUMENTS_AT + 8 * place  # the low half of 64 bits, on these little-endian machines
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, flags), (_ANY_BIT, 0, 1, os.O_CREAT), refuse, allow]
    return b"".join(_INSTRUCTION.pack(*line) for line in [*lines, allow])
