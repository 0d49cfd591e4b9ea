"""Run the pre-loaded parent: a process that has imported TensorFlow and Keras, never starts their runtime, and forks keepers.

Started by `emulate.cluster.parent` with a socket to the supervisor; it ends when the supervisor does, and then deletes the
supervisor's scratch folder.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import linecache
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from emulate.cluster import system
from emulate.cluster.channel import Channel
from emulate.cluster.isolation import Capability, find_capability
from emulate.cluster.keeper import Wakeups, end_descendants, keep, wait_for_any
from emulate.cluster.upstream import TF_KERAS, is_runtime_initialized, without_matplotlib
from emulate.cluster.views import remove_tree

_PATIENCE = 10.0
# What TensorFlow and Keras import at their first use: once here instead of once in every host, and before a host
# that may not read the installation any more.
_LATE = (
    "multiprocessing.pool",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "concurrent.futures.thread",
    "emulate.devices",
    "emulate.evaluate",
    "emulate.probe",
    "emulate.program",
)


@dataclass(frozen=True)
class Hello:
    """Hold the supervisor's first message to its pre-loaded parent."""

    supervisor: int
    scratch: Path
    imports: bool
    modules: tuple[str, ...] = ()


def main(fd: int) -> None:
    """Serve the supervisor at the other end of the socket until it closes it or ends."""
    # A scheduler signals every process, and hosts that save need this one. Hosts get what comes before they can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    control = Channel(socket.socket(fileno=fd))
    hello: Hello = pickle.loads(control.receive()[1])
    keepers: set[int] = set()
    try:
        with _ending_with(control, hello.scratch):
            capability = find_capability()
            system.adopt_orphans()
            if hello.imports:
                _import_all(hello.modules)
        _serve(control, hello, capability, keepers)
        # The keepers, which end with the supervisor as well, clean up.
        deadline = time.monotonic() + _PATIENCE
        while keepers and time.monotonic() < deadline:
            _reap(keepers)
            time.sleep(0.005)
        end_descendants()
        remove_tree(hello.scratch)
    finally:  # after an error the supervisor is there and reads the log in that folder
        end_descendants()


@contextlib.contextmanager
def _ending_with(control: Channel, scratch: Path) -> Iterator[None]:
    """Ask the kernel for a signal if the supervisor exits during the imports, which take seconds."""
    import fcntl

    def look(*_: object) -> None:
        hung_up = select.poll()  # one for each call: a signal may come while another is looked at
        hung_up.register(control, select.POLLRDHUP)
        if hung_up.poll(0):
            remove_tree(scratch)
            os._exit(0)

    signal.signal(signal.SIGIO, look)
    # Python repeats its own system calls after a signal (PEP 475); those of the C++ that is imported must not be interrupted.
    signal.siginterrupt(signal.SIGIO, False)
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()
    yield
    fcntl.fcntl(control, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_DFL)


def _import_all(modules: tuple[str, ...]) -> None:
    gc.disable()  # collections take a fifth of the import: 1.76 s instead of 1.43 s (TensorFlow 2.21)
    with without_matplotlib():
        importlib.import_module("tensorflow")
        # The other Keras if tf_keras is not installed, because the program reports that itself.
        is_legacy = os.environ.get("TF_USE_LEGACY_KERAS") == "1" and importlib.util.find_spec("tf_keras") is not None
        importlib.import_module("tf_keras" if is_legacy else TF_KERAS)
    for name in (*_LATE, *modules):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.enable()
    linecache.clearcache()  # decorators that read their function's source: 5 MB that every host would have
    gc.freeze()  # else the first collections of each host look through TensorFlow's objects, and take 165 ms each
    system.release_clean_file_pages()
    assert not is_runtime_initialized(), "importing TensorFlow initialised its runtime"


def _serve(control: Channel, hello: Hello, capability: Capability, keepers: set[int]) -> None:
    with contextlib.closing(Wakeups(hello.supervisor)) as wakeups:
        while True:
            is_ready, is_alone = wakeups.wait(control.socket)
            _reap(keepers)
            if is_alone:
                return
            if is_ready:
                try:
                    control.receive()
                    [fd] = control.receive_fds(1)
                except (EOFError, ConnectionError):
                    return
                keepers.add(_fork_keeper(fd, control, wakeups, capability, hello.imports))


def _fork_keeper(fd: int, control: Channel, wakeups: Wakeups, capability: Capability, is_preloaded: bool) -> int:
    assert not is_runtime_initialized(), "TensorFlow's runtime was initialised before a fork"
    channel = Channel(socket.socket(fileno=fd))
    pid = os.fork()
    if pid == 0:
        wakeups.close()
        control.close()
        keep(channel, capability, is_preloaded=is_preloaded)
    channel.close()
    return pid


def _reap(keepers: set[int]) -> None:
    """Forget keepers that ended; what a killed one left behind becomes ours, bit by bit, and is ended too."""
    while (ended := wait_for_any(os.WNOHANG)) is not None and ended[0]:
        is_orphan = ended[0] not in keepers
        keepers.discard(ended[0])
        if is_orphan or ended[1]:
            for orphan in set(system.children_of(os.getpid())) - keepers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
