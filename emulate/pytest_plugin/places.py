"""Find out where a test runs: on hosts that tests of its file share, on hosts of its own, or beside hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulate.pytest_plugin.marks import topology_of, wanted_by
from emulate.topology import Topology

_ON_HOSTS = ("strategy", "devices", "shared_path")
_BESIDE = ("cluster", "topology", "gpudist")

Place = tuple[Path, Topology]
"""The test file and the topology whose tests share hosts."""


def runs_on_hosts(item: pytest.Item) -> bool:
    """Return whether the body of a test runs on every host, or once beside them."""
    names = set(getattr(item, "fixturenames", ()))
    return bool(names.intersection(_ON_HOSTS)) or not names.intersection(_BESIDE)


def hosts_of(item: pytest.Item) -> Topology | None:
    """Return the topology on whose hosts a test runs; None for a test beside them, or one that is skipped."""
    topology = topology_of(item)
    if topology is None or not runs_on_hosts(item) or item.get_closest_marker("skip") is not None:
        return None
    return topology


def place_of(item: pytest.Item) -> Place | None:
    """Return what a test shares its hosts by; None if it shares none."""
    topology = hosts_of(item)
    if topology is None:
        return None
    wanted = wanted_by(item)
    return None if wanted is None or wanted.fresh else (item.path, topology)


def nodeid_of(item: pytest.Item) -> str:
    """Return the node id without the group that pytest-xdist appends."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"
