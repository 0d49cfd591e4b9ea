"""Give a host of a private network names, as real hosts have them: a hosts file and a host name of its own."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from emulate.cluster import system
from emulate.cluster.host import HostContext
from emulate.errors import Unavailable

_HOSTS = "/etc/hosts"


def take_names(context: HostContext, names: Sequence[Sequence[str]]) -> None:
    """Give this process the name of its host, and let it find all hosts by their names.

    Args:
        context: This host.
        names: The names of each host; the last one is the name that the host itself sees.

    Raises:
        Unavailable: If the hosts have no private network, or the system refuses the mount.
    """
    file = context.directory / "hosts"
    lines = ["127.0.0.1 localhost", *(f"127.0.0.1 {' '.join(own)}" for own in names)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not context.has_own_network:
        raise Unavailable(
            "Hosts with names need a private network. Received: this system refuses one. 'gpudist devices' says why."
        )
    try:
        system.unshare(system.CLONE_NEWNS | system.CLONE_NEWUTS)
        system.mount("none", "/", None, system.MS_REC | system.MS_PRIVATE)
        system.mount(str(file), _HOSTS, None, system.MS_BIND)
        socket.sethostname(names[context.host][-1])
    except OSError as error:
        raise Unavailable(f"Hosts with names need a hosts file of their own. Received: {error}.") from None
