"""Provide the fixtures' values: on a host from the host, beside the hosts from the controller."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulate.pytest_plugin.controller import controller_of
from emulate.pytest_plugin.keys import HOST, IN_PROCESS
from emulate.pytest_plugin.marks import topology_of
from emulate.pytest_plugin.programs import Programs
from emulate.topology import Topology

if TYPE_CHECKING:
    from emulate.pytest_plugin.host import Host
    from emulate.pytest_plugin.in_process import InProcess


def topology_of_request(request: pytest.FixtureRequest) -> Topology:
    """Return the topology of the requesting test."""
    topology = getattr(request, "param", None) or topology_of(request.node)
    if not isinstance(topology, Topology):
        pytest.fail(
            "A test that asks for strategy, cluster, topology or devices names its topologies. "
            f'Received: {request.node.nodeid}, without any. Write @pytest.mark.topology("1x4", "2x2") above it.',
            pytrace=False,
        )
    return topology


def _host(request: pytest.FixtureRequest, name: str) -> Host | InProcess:
    """Return the host that the test runs on."""
    own: InProcess | None = request.node.stash.get(IN_PROCESS, None)
    if own is not None:
        return own
    if HOST not in request.config.stash:
        pytest.fail(
            f"A test that uses {name} runs on hosts, which must be known before it starts. Received: a fixture or a "
            f"getfixturevalue({name!r}) in {request.node.nodeid}. Name {name} in its arguments, or in "
            f'@pytest.mark.usefixtures("{name}"), and do not ask for `gpudist`.',
            pytrace=False,
        )
    return request.config.stash[HOST]


def make_strategy(request: pytest.FixtureRequest) -> Any:
    """See the fixture `strategy`."""
    return _host(request, "strategy").make_strategy(request.node)


def logical_devices(request: pytest.FixtureRequest) -> list[Any]:
    """See the fixture `devices`."""
    host = _host(request, "devices")
    if "strategy" in request.fixturenames:
        request.getfixturevalue("strategy")  # several hosts: before anything starts TensorFlow's runtime
    return host.logical_devices()


def shared_folder(request: pytest.FixtureRequest) -> Path:
    """See the fixture `shared_path`."""
    return _host(request, "shared_path").shared_folder()


def make_cluster(request: pytest.FixtureRequest, topology: Topology) -> AbstractContextManager[Any]:
    """See the fixture `cluster`."""
    if HOST in request.config.stash or IN_PROCESS in request.node.stash:
        return _host(request, "cluster").cluster()
    return controller_of(request.config).cluster(request.node, topology)


def programs(request: pytest.FixtureRequest) -> Programs:
    """See the fixture `gpudist`."""
    if HOST in request.config.stash:
        pytest.fail(
            "`gpudist` verifies programs outside of the hosts. Received: a test that runs on hosts and asks for it. "
            "Leave out strategy, devices and shared_path, or make two tests of it.",
            pytrace=False,
        )
    return Programs(controller_of(request.config), request.node)
