"""Run a host in a separate interpreter with its own hash seed, like that of every real host.

Hosts are forks of one process and so have the seed of its hashes. What a program makes of the order of a set of strings is then
the same on all of them, and on real hosts it is not.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from typing import NoReturn

from emulate.cluster import host
from emulate.cluster.channel import Channel
from emulate.faults import Board, HostFaults

_START = "import sys; sys.path[:] = sys.argv[2:]; from emulate.cluster.own_interpreter import main; main(int(sys.argv[1]))"


def run_in_own_interpreter(
    settings: host.HostSettings, context: host.HostContext, output: tuple[int, int] | None, parent: int
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
    context = host.HostContext(**place, _channel=Channel(socket.socket(fileno=channel)), _views=views)
    settings = host.HostSettings(**values, faults=HostFaults(context.host, {}, Board(1)))
    host.run(settings, context, output, parent)
