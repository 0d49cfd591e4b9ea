"""Isolate the keeper of a cluster and its hosts: a private network and copy-on-write views of folders.

In a private network hosts have names, as real ones have: a hosts file and a host name of each.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulate.cluster import system
from emulate.cluster.host import HostContext
from emulate.cluster.links import why_no_devices
from emulate.cluster.views import Views
from emulate.errors import Unavailable


@dataclass(frozen=True)
class Capability:
    """Describe what this system lets gpudist isolate.

    Attributes:
        flags: What has to be given to `unshare` besides the namespaces themselves (0 for root, else a user namespace);
            None where namespaces are refused.
        network: Why there can be no network of its own; empty where there can.
        overlay: Why there can be no overlay mounts; empty where there can.
    """

    flags: int | None
    network: str = ""
    overlay: str = ""


_UNPROTECTED = (
    "Ports are reserved until the run ends, so that runs do not collide. Nothing else protects them: TensorFlow's servers "
    "listen on all interfaces and have no authentication. During the run, anyone who can reach this machine can run "
    "operations, and read and write files, as its user."
)


@dataclass
class Isolation:
    """Describe the isolation of a cluster."""

    own_network: bool = False
    notes: list[str] = field(default_factory=list)
    views: Views = field(default_factory=Views)

    def __str__(self) -> str:
        return f"{'own network' if self.own_network else 'host network'}, {self.views}"


def find_capability() -> Capability:
    """Try out, in children that end at once, what the system allows: a namespace that was entered cannot be left."""
    if sys.platform != "linux":
        return Capability(None, "only Linux has namespaces", "only Linux has namespaces")
    tried = [_try(flags) for flags in ((0,) if os.geteuid() == 0 else ()) + (system.CLONE_NEWUSER,)]
    return min(tried, key=lambda capability: bool(capability.network) + bool(capability.overlay))


def _try(flags: int) -> Capability:
    network, overlay = _refusal(flags, _use_network), _refusal(flags, _use_overlay)
    return Capability(None if network and overlay else flags, network, overlay)


def _refusal(flags: int, use: Callable[[int], None]) -> str:
    """Return why a namespace cannot be used; empty if it can. The check runs in a child, because there is no way back."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(10)
            use(flags)
            os.write(writer, b"ok")
        except OSError as error:
            os.write(writer, str(error.strerror or error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read().replace("\n", " ")
    os.waitpid(pid, 0)
    return "" if text == "ok" else text or "the attempt ended without an answer"


def enter(flags: int) -> None:
    """Leave the namespaces for new ones and keep one's identity."""
    uid, gid = os.getuid(), os.getgid()
    system.unshare(flags)
    if flags & system.CLONE_NEWUSER:
        system.map_own_ids(uid, gid)
    if flags & system.CLONE_NEWNS:
        # Where `/` is shared, as systemd makes it, root's mounts would show in the whole system.
        system.mount("none", "/", None, system.MS_REC | system.MS_PRIVATE)
    if flags & system.CLONE_NEWNET:
        system.bring_up_loopback()


def _use_network(flags: int) -> None:
    enter(flags | system.CLONE_NEWNET)


def _use_overlay(flags: int) -> None:
    enter(flags | system.CLONE_NEWNS)
    place = Path(tempfile.gettempdir())
    system.mount("tmpfs", str(place), "tmpfs")
    for name in ("lower", "upper", "work"):
        (place / name).mkdir()
    options = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
    # Only root outside of user namespaces may write the `trusted.*` attributes of an overlay: `userxattr` is of Linux 5.11.
    system.mount("overlay", str(place / "lower"), "overlay", 0, options + (",userxattr" if flags else ""))
    (place / "lower" / "file").touch()


def describe_isolation() -> dict[str, dict[str, Any]]:
    """Describe what this system lets clusters isolate, and what protects the ports of their hosts.

    Returns:
        For `own_network`, `copy_on_write` and `faults_of_links`: `available` and, where not, `why`; for `own_network` also
        `ports`.

    Example:
        >>> sorted(describe_isolation())
        ['copy_on_write', 'faults_of_links', 'own_network']
    """
    capability = find_capability()
    no_links = capability.network or why_no_devices()
    inside = "The ports of several hosts are in a private network, which other machines and users cannot reach."
    ports = _UNPROTECTED if capability.network else inside
    return {
        "own_network": {"available": not capability.network, "why": capability.network or None, "ports": ports},
        "copy_on_write": {"available": not capability.overlay, "why": capability.overlay or None},
        "faults_of_links": {"available": not no_links, "why": no_links or None},
    }


def isolate(capability: Capability, *, network: str | None, folders: tuple[Path, ...], directory: Path) -> Isolation:
    """Isolate this process and those it forks from now on; it must have one thread.

    Args:
        capability: What the system allows.
        network: `own` or `host`, as it is wanted for several hosts; None for one, which needs none.
        folders: Folders that get a copy-on-write view.
        directory: The run's folder, which stays real wherever it lies.

    Returns:
        What is in force now.

    Raises:
        Unavailable: When a folder is too large for the working copy that has to take a view's place.
    """
    isolation = Isolation(own_network=network == "own" and capability.flags is not None and not capability.network)
    if network and not isolation.own_network:
        why = "it was asked for" if network == "host" else f"the system refuses them one of their own ({capability.network})"
        isolation.notes.append(f"The hosts share this machine's network: {why}. {_UNPROTECTED}")
    overlay = bool(folders) and capability.flags is not None and not capability.overlay
    flags = (system.CLONE_NEWNET if isolation.own_network else 0) | (system.CLONE_NEWNS if overlay else 0)
    if flags:
        enter(flags | (capability.flags or 0))
    isolation.views = Views(directory, in_user_namespace=bool(capability.flags))
    isolation.notes += isolation.views.show(folders, "" if overlay else capability.overlay)
    return isolation


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
