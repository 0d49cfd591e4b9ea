"""Assign roles to hosts, and write their TF_CONFIG."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

from emulate.topology import Topology

FIRST_PORT = 2222
"""In a network of its own every cluster uses the same ports, the ones of TensorFlow's own examples."""


def roles_of(topology: Topology) -> tuple[str, ...]:
    """Return the role of each host: workers; with parameter servers a chief, then workers, then ps.

    Args:
        topology: The cluster's shape.

    Returns:
        `chief`, `worker` or `ps` for each host.

    Example:
        >>> roles_of(Topology.parse("2x4"))
        ('worker', 'worker')
        >>> roles_of(Topology.parse("1x1+2ps"))
        ('chief', 'worker', 'ps', 'ps')
    """
    workers = ("worker",) * (1 if topology.is_virtual else topology.num_hosts)
    return ("chief", *workers, *("ps",) * topology.num_ps) if topology.num_ps else workers


def tf_config(roles: Sequence[str], places: Sequence[str], host: int) -> str:
    """Return the text of TF_CONFIG for one host, as a real cluster sets it. `places` lists all addresses with ports."""
    cluster: dict[str, list[str]] = {}
    for role, place in zip(roles, places, strict=True):
        cluster.setdefault(role, []).append(place)
    task = {"type": roles[host], "index": roles[:host].count(roles[host])}
    return json.dumps({"cluster": cluster, "task": task})


def host_name(roles: Sequence[str], host: int) -> str:
    """Return a host's name for messages: `host 1`, or `host 1 (worker 0)` with several roles."""
    if len(set(roles)) == 1:
        return f"host {host}"
    return f"host {host} ({roles[host]} {roles[:host].count(roles[host])})"


def hold_ports(count: int) -> list[socket.socket]:
    """Reserve free ports of this machine for as long as the sockets stay open.

    A socket that is bound but does not listen keeps its port from being chosen for anybody else (`bind` to port 0, the near
    end of a connection, another call of this) and from being bound as sockets are bound by default, while TensorFlow's server,
    which sets SO_REUSEADDR as this does, still gets it. Somebody who names the very port and sets SO_REUSEADDR gets it too;
    the server then says that the address is in use.
    """
    held = []
    for _ in range(count):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", 0))
        held.append(sock)
    return held
