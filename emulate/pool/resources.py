"""Find what a job leaves behind and nobody can remove: threads, files, sockets, processes, memory."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time

_PATIENCE = 1.0  # seconds for threads that are about to end
_GROWTH = 512 << 20
"""Bytes by which a host's own memory may grow over that of its first use."""
_MORE_DESCRIPTORS = 64
"""Number of file descriptors that TensorFlow's servers may open later, mainly for connections to peers."""


class Resources:
    """Hold what a host holds at one moment."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = _open_files()
        self._num_sockets, self._num_others = _count_others()
        self._sockets = {id(one) for one in _python_sockets()}
        self._memory = own_memory()

    def check(self) -> list[str]:
        """Return what was added since then, one sentence each."""
        found = [self._threads_left(), self._files_left(), self._sockets_left(), self._children_left(), self._memory_grown()]
        return [one for one in found if one]

    def _threads_left(self) -> str:
        deadline = time.monotonic() + _PATIENCE
        while (left := set(threading.enumerate()) - self._threads) and time.monotonic() < deadline:
            time.sleep(0.01)
        return f"threads still run: {', '.join(sorted(one.name for one in left))}" if left else ""

    def _files_left(self) -> str:
        left = sorted(path for path, count in _open_files().items() if count > self._files.get(path, 0))
        return f"files are still open: {', '.join(left)}" if left else ""

    def _sockets_left(self) -> str:
        num_sockets, num_others = _count_others()
        if num_sockets > self._num_sockets:  # looking at all objects takes milliseconds; TensorFlow's are none of Python's
            left = [one for one in _python_sockets() if id(one) not in self._sockets]
            if left:
                return f"{len(left)} sockets are still open"
        more = num_sockets + num_others - self._num_sockets - self._num_others
        return f"{more} more pipes or sockets are open than before" if more > _MORE_DESCRIPTORS else ""

    def _children_left(self) -> str:
        """Return the text about child processes. A host starts without children, so any child is new."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ""
        return "child processes are still there, or were not waited for"

    def _memory_grown(self) -> str:
        grown = own_memory() - self._memory
        return f"its memory grew by {grown >> 20} MiB" if grown > _GROWTH else ""


def end_resource_tracker() -> None:
    """Have Python's own helper unlink what shared memory was left, as it does when a process ends, and leave."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    if tracker is None or tracker._fd is None:
        return
    os.close(tracker._fd)
    pid, tracker._fd, tracker._pid = tracker._pid, None, None
    deadline = time.monotonic() + _PATIENCE
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:  # a process that was forked holds it up
            time.sleep(0.005)


def own_memory() -> int:
    """Return the bytes in memory that belong to no file."""
    with open("/proc/self/statm", encoding="ascii") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> dict[str, int]:
    """Return how often each path is open."""
    found: dict[str, int] = {}
    for target in _descriptors():
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/sys/", "/memfd:")):
            found[target] = found.get(target, 0) + 1
    return found


def _count_others() -> tuple[int, int]:
    """Return the number of open sockets, and of pipes and other things without a path."""
    targets = _descriptors()
    num_sockets = sum(target.startswith("socket:") for target in targets)
    return num_sockets, sum(not target.startswith("/") for target in targets) - num_sockets


def _descriptors() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one that lists the folder
            continue
    return found


def _python_sockets() -> list[socket.socket]:
    return [one for one in gc.get_objects() if type(one) is socket.socket and one.fileno() >= 0]
