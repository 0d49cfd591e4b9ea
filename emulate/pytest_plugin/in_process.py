"""Run tests of one host in pytest's own process, where `breakpoint()`, `--pdb` and the debugger of an IDE work."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.errors import UsageError
from emulate.pytest_plugin.meeting import HostCluster
from emulate.pytest_plugin.surroundings import logical_devices, make_strategy, seed_everything
from emulate.topology import Topology

if TYPE_CHECKING:
    import pytest


class InProcess:
    """Be the one host of a topology.

    Args:
        topology: The topology, of one host and without parameter servers.

    Raises:
        UsageError: If TensorFlow has run an operation in this process already.
    """

    def __init__(self, topology: Topology) -> None:
        from emulate.devices import DevicePlan, install

        self._topology = topology
        self._strategy: str | None = None
        install(DevicePlan(topology.num_devices), lambda code, text: warnings.warn(text, stacklevel=2))

    def begin(self, topology: Topology, strategy: str | None, folder: Path, seed: int) -> None:
        """Prepare for one test.

        Args:
            topology: The test's topology.
            strategy: The kind of strategy that it gets.
            folder: A folder of the test.
            seed: What everything is seeded with.

        Raises:
            UsageError: If it is another topology: TensorFlow splits the devices of a process once.
        """
        if topology != self._topology:
            raise UsageError(
                "With --gpudist-in-process all tests of one host need the same topology. "
                f"Received: topology={str(topology)!r}, after tests on {str(self._topology)!r}. Choose tests: -k {topology}."
            )
        self._strategy = strategy
        self._cluster = HostCluster(topology, 0, folder)
        seed_everything(seed)

    def make_strategy(self, item: pytest.Item) -> Any:
        """Return the strategy that the test's mark asks for."""
        return make_strategy(self._strategy)

    def logical_devices(self) -> list[Any]:
        """Return the devices that a program sees."""
        return logical_devices(0)

    def shared_folder(self) -> Path:
        """Return a folder of the test."""
        return self._cluster.shared_path

    def cluster(self) -> HostCluster:
        """Return the cluster as its only host sees it."""
        return self._cluster
