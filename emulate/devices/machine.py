"""What this machine has and what can be emulated on it, for `gpudist devices`."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
from typing import Any

import psutil

from emulate.topology import MAX_DEVICES_PER_HOST, MAX_HOSTS

# Measured: the first host of a cluster costs about 500 MB, each further one about 100 MB (pages are shared with the parent).
_FIRST_HOST_BYTES = 500 * 2**20
_HOST_BYTES = 100 * 2**20
_LIMIT_SECONDS = 120
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000

_ASK_TENSORFLOW = """
import json, sys
import tensorflow as tf
gpus = [{"name": d.name, **{k: str(v) for k, v in tf.config.experimental.get_device_details(d).items()}}
        for d in tf.config.list_physical_devices("GPU")]
print("\\n" + json.dumps({"tensorflow": tf.__version__, "gpus": gpus}))
"""


def describe_machine() -> dict[str, Any]:
    """Look at this machine; TensorFlow is asked in a process of its own.

    Returns:
        `system`, `python`, `cpus`, `memory_bytes` (`total`, `available`), `tensorflow` (version or None), `gpus` (a list of
        dictionaries with a name), `emulation` (`devices_per_host`, `hosts` as far as memory goes), and for `own_network` and
        `copy_on_write`: `available` and, where not, `why`.

    Example:
        >>> describe_machine()["emulation"]["devices_per_host"]
        256
    """
    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpus": _num_cpus(),
        "memory_bytes": {"total": memory.total, "available": memory.available},
        **_ask_tensorflow(),
        "emulation": {"devices_per_host": MAX_DEVICES_PER_HOST, "hosts": _hosts_in(memory.available)},
        "own_network": _availability(_check_network),
        "copy_on_write": _availability(_check_overlay),
    }


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hosts_in(available: int) -> int:
    return min(MAX_HOSTS, max(1, 1 + (available - _FIRST_HOST_BYTES) // _HOST_BYTES))


def _ask_tensorflow() -> dict[str, Any]:
    """TensorFlow's version and the GPUs it sees, or why it could not be asked."""
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        command = [sys.executable, "-c", _ASK_TENSORFLOW]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, env=quiet, check=False)
    except subprocess.TimeoutExpired:
        return {"tensorflow": None, "gpus": [], "tensorflow_error": f"import tensorflow took more than {_LIMIT_SECONDS} s"}
    if done.returncode:
        return {"tensorflow": None, "gpus": [], "tensorflow_error": (done.stderr.strip().splitlines() or ["it ended"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _availability(check: Any) -> dict[str, Any]:
    """Run a check in a forked child, which it may leave in namespaces of its own."""
    if sys.platform != "linux":
        return {"available": False, "why": f"it needs Linux namespaces, and this is {platform.system()}"}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer_and_exit(check, reader, writer)
    os.close(writer)
    with os.fdopen(reader) as stream:
        why = stream.read()
    os.waitpid(child, 0)
    return {"available": not why, "why": why or None}


def _answer_and_exit(check: Any, reader: int, writer: int) -> None:
    why = ""
    try:
        os.close(reader)
        check()
    except BaseException as error:  # the parent must hear of it whatever it is
        why = f"{error}" or type(error).__name__
    finally:
        os.write(writer, why.encode())
        os._exit(0)


def _check_network() -> None:
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNET, "a user and a network namespace")


def _check_overlay() -> None:
    uid, gid = os.getuid(), os.getgid()
    with tempfile.TemporaryDirectory() as folder:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNS, "a user and a mount namespace")
        _become_root(uid, gid)
        _mount_overlay(folder)


def _unshare(flags: int, what: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(f"the system refuses {what}: {os.strerror(ctypes.get_errno())}")


def _become_root(uid: int, gid: int) -> None:
    """In the new user namespace only."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _mount_overlay(folder: str) -> None:
    parts = {name: os.path.join(folder, name) for name in ("lower", "upper", "work", "view")}
    for part in parts.values():
        os.mkdir(part)
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']},userxattr"
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (b"overlay", parts["view"].encode(), b"overlay", 0, options.encode())
    if libc.mount(*arguments):
        raise OSError(f"the system refuses an overlay mount: {os.strerror(ctypes.get_errno())}")
    libc.umount2(parts["view"].encode(), 2)
