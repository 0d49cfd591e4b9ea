"""The fixture that runs a program in a host with emulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulate.devices.hosts import Hosts


@pytest.fixture(scope="session")
def run() -> Iterator[Hosts]:
    """Runs a function in a host with emulated GPUs."""
    hosts = Hosts()
    yield hosts
    hosts.close()
