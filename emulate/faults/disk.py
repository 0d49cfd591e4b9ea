"""Fill the disk for one process: the kernel refuses calls that need space (a seccomp filter, which cannot be removed).

A file system of its own would be fuller of surprises: mounts over a folder in use, limits on stacked overlays, and none of it
where mounts are refused. A filter sees numbers and flags, not paths, so what is refused is any file that is made (`O_CREAT`,
`mkdir`) or made longer in place, wherever it lies; what is open already can be written at its end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

from emulate.errors import Unavailable

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


def why_not() -> str:
    """Return why a full disk cannot be emulated here; empty if it can."""
    if platform.machine() not in _CALLS:
        return f"processors of the kind {platform.machine()} are not known"
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        return "the kernel has no seccomp filters"
    return ""


def check() -> None:
    """Find out whether `fill` can work here.

    Raises:
        Unavailable: When it cannot.
    """
    if reason := why_not():
        raise Unavailable(
            f"A full disk must be possible to emulate. Received: fault='fill-disk', where {reason}. Leave the fault out here."
        )


def fill() -> None:
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
