"""Call what Linux offers and Python does not: namespaces, mounts, the loopback network, ties between processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import struct
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_MADV_DONTNEED = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by the flags for new ones; only before there are threads."""
    _check(_libc().unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    """Enter a namespace that a descriptor stands for."""
    _check(_libc().setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    """Mount, as the system call of that name does."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc().mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {kind or 'bind'} on {target}")


def release_clean_file_pages() -> None:
    """Unmap what was read of files and never written (code, constants): it stays in the page cache, and is mapped again on use.

    A mapping with a page of its own (relocated, say) is left alone: that page would be lost.
    """
    mapping = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if fields and "-" in fields[0] and not fields[0].endswith(":"):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            mapping = (start, end - start) if fields[1] in ("r-xp", "r--p") and fields[4] != "0" else None
        elif fields[0] == "Anonymous:" and fields[1] == "0" and mapping is not None:
            _libc().madvise(ctypes.c_void_p(mapping[0]), ctypes.c_size_t(mapping[1]), _MADV_DONTNEED)


def unmount(target: Path) -> None:
    """Take a mount away, now or as soon as nothing uses it."""
    _check(_libc().umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def bring_up(device: bytes) -> None:
    """Set a network device up: `lo` in a new network namespace, say."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        flags = struct.unpack_from("16sh", fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh22x", device, 0)))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", device, flags | _IFF_UP))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (what daemonises itself is still found)."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed as soon as the parent ends, however it ends."""
    # TensorFlow's server for MultiWorkerMirroredStrategy handles SIGTERM itself, and the process lives on (2.21).
    _libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    parent = [str(pid).encode()]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _fields(Path(f"/proc/{name}/stat"))[1:2] == parent]


def _fields(stat: Path) -> list[bytes]:
    """Return what the kernel says of a process or thread, from its state on; nothing if it is gone."""
    with contextlib.suppress(OSError):
        # The command, in parentheses before the fields, may itself contain spaces and parentheses (proc(5)).
        return stat.read_bytes().rpartition(b")")[2].split()
    return []


def _state(stat: Path) -> bytes:
    return b"".join(_fields(stat)[:1])


def is_runnable(pid: int) -> bool:
    """Return whether a thread of a process computes, or waits for a processor or a disk."""
    return any(_state(task) in (b"R", b"D") for task in Path(f"/proc/{pid}/task").glob("*/stat"))


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal."""
    return _state(Path(f"/proc/{pid}/stat")) in (b"T", b"t")


_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def has_working_child(pid: int) -> bool:
    """Return whether a process has started another that still exists, except for idle helpers of `multiprocessing`."""
    for child in children_of(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if _state(Path(f"/proc/{child}/stat")) in (b"", b"Z"):
            continue
        if not any(helper in command for helper in _HELPERS) or has_working_child(child):
            return True
    return False


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time that a process has used; None if it does not exist."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None
