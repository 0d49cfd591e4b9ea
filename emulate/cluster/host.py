"""Run a host: the forked process that runs an entry on its main thread and reports how it ended.

Hosts are forks of one process and so have the seed of its hashes. What a program makes of the order of a set of strings is then
the same on all of them, and on real hosts it is not. So a host may run in a separate interpreter with its own hash seed.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from emulate.cluster import system, threads
from emulate.cluster.channel import RESULT, Channel
from emulate.cluster.context import HostContext
from emulate.cluster.environ import EnvironmentWatch
from emulate.cluster.plan import Order, RemoteError, roles_of
from emulate.cluster.upstream import wait_for_leader
from emulate.devices import GpuShare
from emulate.errors import Unavailable
from emulate.faults import Board, HostFaults, Late
from emulate.faults import install as install_faults
from emulate.imports import when_imported
from emulate.pickling import to_bytes
from emulate.program import name_originals, original, own_traceback

_NO_ROUTE = re.compile(
    r"URLError|gaierror|NameResolutionError|NewConnectionError|URL fetch failure|Max retries exceeded with url|libcurl code"
    r"|[Cc]ould(n't| not) resolve host|name resolution|Name or service not known|OSError: \[Errno 101\]"
)
"""Errors of Python, Keras, TensorFlow and common libraries for a download without a network."""
_OWN_NETWORK = (
    "The hosts have a private network without a way out, so a program cannot download there. "
    "Use --network host, or download before the run."
)


@dataclass(frozen=True)
class HostSettings:
    """Hold the keeper's settings for a host that it forks."""

    order: Order
    gpus: GpuShare | None
    environment: Mapping[str, str]
    tf_config: str
    is_preloaded: bool
    faults: HostFaults


def run(settings: HostSettings, context: HostContext, output: tuple[int, int] | None, parent: int) -> NoReturn:
    """Be a host, from the fork to the end of the process."""
    code = 70
    try:
        _become_a_process_of_its_own(context, output, parent)
        _set_environment(settings, context)
        context.send({"event": "started"})
        for number, fault in settings.faults.faults.items():
            if isinstance(fault, Late) and fault.host == context.host:
                place = {"host": fault.host, "step": 0, "phase": "start"}
                context.send({"event": "fired", "fault": number, "text": str(fault), **place})
                time.sleep(fault.seconds)
        code = _run_entry(settings, context)
        if code == 0 and len(roles_of(settings.order.plan.topology)) > 1:
            # Stay until all are over: a host that leaves first takes the connections of the others with it.
            with contextlib.suppress(OSError):
                context._channel.socket.recv(64)
    except Exception as error:  # our own fault, before the entry ran
        _send_result(context, "raised", RemoteError(type(error).__qualname__, str(error), traceback.format_exc()))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _become_a_process_of_its_own(context: HostContext, output: tuple[int, int] | None, parent: int) -> None:
    import resource  # not on every system that may import this file

    system.die_with_parent(parent)
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    context.directory.mkdir(exist_ok=True)
    _redirect(context.directory, output)
    threads.answer_signals(context.directory)
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv[:] = [""]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator is seeded anew by os.fork, NumPy's is not


def _redirect(directory: Path, output: tuple[int, int] | None) -> None:
    """Output by descriptor, so that what C++ writes is captured too."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if output is None:
            fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        else:
            fd = output[number - 1]
        os.dup2(fd, number)
        os.close(fd)
        # By line: a host that is killed has said what it said.
        binary = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(io.BufferedWriter(binary), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_environment(settings: HostSettings, context: HostContext) -> None:
    os.environ.update(settings.environment)
    tempfile.tempdir = None  # the new TMPDIR counts
    os.environ.pop("TF_CONFIG", None)
    if settings.order.plan.sets_tf_config:
        os.environ["TF_CONFIG"] = settings.tf_config
    _keep_proxies_out(settings.tf_config)
    sys.path[:] = settings.order.search_path
    if context.views.copies:
        name_originals(context.views.copies_root)
    os.chdir(context.path(settings.order.cwd))
    if not settings.order.plan.emulated:
        return

    def park(name: str, value: str | None) -> None:
        context.send({"event": "needs-fresh-process", "name": name, "value": value})
        while True:
            signal.pause()

    fresh = park if settings.is_preloaded else None
    EnvironmentWatch(settings.tf_config, settings.order.plan.sets_tf_config, context.note, fresh).start()


def _keep_proxies_out(tf_config: str) -> None:
    """Keep proxies out: otherwise gRPC sends even traffic for another host of the cluster to a proxy."""
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    if any(os.environ.get(name) for name in names):
        exempt = "no_grpc_proxy"
        existing = os.environ.get(exempt) or os.environ.get(exempt.replace("grpc_", "")) or ""
        addresses = dict.fromkeys(re.findall(r'"([\d.]+):\d+"', tf_config))
        os.environ[exempt] = ",".join(filter(None, (existing, *(addresses or ["127.0.0.1"]))))


def _run_entry(settings: HostSettings, context: HostContext) -> int:
    """Run it and send how it ended; the exit code."""
    try:
        entry = pickle.loads(settings.order.entry)
        if settings.order.plan.emulated:
            _install_devices(settings, context)
        install_faults(settings.faults, context.send)
        value = entry(context)
    except SystemExit as leave:
        if leave.code is None or leave.code == 0:
            _send_result(context, "returned", None)
            return 0
        return exit_code(leave.code)
    except BaseException as error:
        said = describe(error)
        note_no_route(said, context)
        said = replace(said, message=original(said.message), traceback_text=original(said.traceback_text))
        _send_result(context, "raised", said)
        return 1
    try:
        pickled = sendable(value, "a function returns on a host")
    except TypeError as error:
        _send_result(context, "raised", describe(TypeError(*error.args)))  # its traceback says nothing more
        return 1
    _send_result(context, "returned", pickled)
    return 0


def sendable(value: Any, what: str) -> bytes:
    """Return a value in the form that is sent to the supervisor.

    Args:
        value: What a host made.
        what: What it is, for the message.

    Returns:
        The pickled value.

    Raises:
        TypeError: If it cannot be pickled.
    """
    try:
        return to_bytes(value)
    except Exception as error:  # objects refuse in many ways
        raise TypeError(
            f"What {what} must be sendable to another process. Received: a {type(value).__name__}, which is not "
            f"({type(error).__name__}: {error}). Return numbers, NumPy arrays and containers of them."
        ) from error


def _install_devices(settings: HostSettings, context: HostContext) -> None:
    from emulate.devices import DevicePlan, install

    plan = settings.order.plan
    topology = plan.topology
    if topology.has_several_hosts and not topology.is_virtual:
        when_imported("tensorflow.python.eager.context", wait_for_leader)
    num_devices = topology.num_devices if context.role == "worker" else 1
    is_virtual = topology.is_virtual and not plan.reference
    devices = DevicePlan(num_devices, topology.num_hosts, plan.all_reduce, plan.reference, settings.gpus, is_virtual)
    try:
        install(devices, context.note)
    except Unavailable as error:
        context.send({"event": "unavailable", "text": str(error)})
        raise


def exit_code(code: Any) -> int:
    """Return the exit code of a Python program that ends with `sys.exit(code)`."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _send_result(context: HostContext, status: str, content: Any) -> None:
    with contextlib.suppress(OSError):
        context._channel.send(RESULT, pickle.dumps((status, content)))


def note_no_route(error: RemoteError, context: HostContext) -> None:
    """Tell the user why an error arose that says that nothing outside can be reached, where the cluster's network is why."""
    if context.has_own_network and _NO_ROUTE.search(error.traceback_text):
        context.note("own-network", _OWN_NETWORK)


def describe(error: BaseException) -> RemoteError:
    """Return an exception in the form that is sent to the supervisor."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        said = str(error)
    except Exception:  # as Python's own tracebacks say it
        said = "<exception str() failed>"
    from tblib import pickling_support

    pickled = None
    with contextlib.suppress(Exception):  # the text says it all the same
        pickling_support.install(error)
        pickled = to_bytes(error)
    return RemoteError(name, said, own_traceback(error), pickled, kind.__module__)


_START = "import sys; sys.path[:] = sys.argv[2:]; from emulate.cluster.host import main; main(int(sys.argv[1]))"


def run_in_own_interpreter(
    settings: HostSettings, context: HostContext, output: tuple[int, int] | None, parent: int
) -> NoReturn:
    """Be a host, from the fork to the end of the process, in an interpreter that has imported nothing yet.

    Args:
        settings: Of the host; it has no faults to come, for what tells hosts of them does not outlast the change.
        context: The host's.
        output: Where its standard output and error go; None for files.
        parent: The keeper's process id.
    """
    assert not settings.faults.faults, "faults do not reach a host with an interpreter of its own"
    channel, views = context.fileno(), context.views
    values = {name: value for name, value in vars(settings).items() if name != "faults"} | {"is_preloaded": False}
    place = {name: getattr(context, name) for name in ("topology", "host", "role", "directory", "has_own_network")}
    file = os.memfd_create("gpudist")
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(pickle.dumps((values, place, views, channel, output, parent)))
    for fd in (file, channel, *(output or ())):
        os.set_inheritable(fd, True)
    # One seed for each host; what the program's own child processes hash is then as on this host.
    environment = {**os.environ, "PYTHONHASHSEED": str(1 + context.host)}
    os.execve(sys.executable, [sys.executable, "-c", _START, str(file), *sys.path], environment)


def main(file: int) -> NoReturn:
    """Be the host that the file tells of."""
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(file, "rb") as stream:
        values, place, views, channel, output, parent = pickle.load(stream)
    for fd in (channel, *(output or ())):
        os.set_inheritable(fd, False)
    context = HostContext(**place, _channel=Channel(socket.socket(fileno=channel)), views=views)
    settings = HostSettings(**values, faults=HostFaults(context.host, {}, Board(1)))
    run(settings, context, output, parent)
