"""What the parts of the plugin find in pytest's config and in the reports of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from emulate.pytest_plugin.controller import Controller
    from emulate.pytest_plugin.host import Host

HOST: pytest.StashKey[Host] = pytest.StashKey()
"""In the config of a pytest that runs on an emulated host."""
CONTROLLER: pytest.StashKey[Controller] = pytest.StashKey()
"""In the config of a pytest that the user started, or a worker of pytest-xdist, once it met a test with a topology."""

TOPOLOGY, DEVICE, VERDICT, REASON = "gpudist_topology", "gpudist_device", "gpudist_verdict", "gpudist_reason"
NOTE = "gpudist_note"
"""Properties of tests with a topology, as strings: they are in the junit file, and survive pytest-xdist."""
EMULATED, NO_DEVICE = "emulated", "none"
