"""Define the names that all parts of the plugin use: the mark, keys of pytest's config, properties of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from emulate.pytest_plugin.controller import Controller
    from emulate.pytest_plugin.host import Host
    from emulate.pytest_plugin.in_process import InProcess

NAME = "topology"
"""Name of the mark."""
DESCRIPTION = (
    'topology(shape, ..., strategy="auto", deadline=None, fresh=False): run the test on each of these topologies ("1x4": one '
    "host with four devices). A test that uses `strategy`, `devices`, `shared_path` or no fixture of gpudist runs on every "
    "host. With `cluster`, `topology` or `gpudist` alone it runs once, outside of the hosts. Tests of one file share hosts, "
    "except with fresh=True."
)

HOST: pytest.StashKey[Host] = pytest.StashKey()
"""In the config of a pytest that runs on an emulated host."""
CONTROLLER: pytest.StashKey[Controller] = pytest.StashKey()
"""In the config of a pytest that the user started, or a worker of pytest-xdist, once it met a test with a topology."""

IN_PROCESS: pytest.StashKey[InProcess] = pytest.StashKey()
"""In a test that runs in pytest's own process: its host."""

TOPOLOGY, DEVICE, VERDICT, REASON = "gpudist_topology", "gpudist_device", "gpudist_verdict", "gpudist_reason"
NOTE = "gpudist_note"
"""Properties of tests with a topology, as strings: they are in the junit file, and survive pytest-xdist."""
EMULATED, NO_DEVICE = "emulated", "none"
