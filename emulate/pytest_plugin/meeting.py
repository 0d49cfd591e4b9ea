"""Show a test the cluster from one of its hosts: which host it is, and where the hosts meet.

Functions are imported by name: a test may put others in their place while hosts meet.
"""

from __future__ import annotations

import time
from os import replace
from os.path import exists
from pathlib import Path
from pickle import dumps, loads
from typing import TYPE_CHECKING, Any

from emulate.errors import UsageError
from emulate.topology import Topology

if TYPE_CHECKING:
    from types import TracebackType


class HostCluster:
    """Describe the cluster of a test, seen from one of its hosts.

    Args:
        topology: Its topology.
        host: The number of this host.
        folder: A folder of the test, the same on all hosts. It is made on first use.

    Attributes:
        topology: Its topology.
        host: The number of this host.
        num_hosts: The number of hosts that run the test.
        name: The name of this host in messages.

    Example:
        def test_hosts_agree(strategy, cluster):
            losses = cluster.gather(train(strategy))
            assert len(set(losses)) == 1
    """

    def __init__(self, topology: Topology, host: int, folder: Path) -> None:
        self.topology = topology
        self.host = host
        self.num_hosts = topology.num_stepping_hosts
        self.name = f"host {host}"
        self._folder = folder
        self._meetings = 0

    @property
    def shared_path(self) -> Path:
        """Return a folder that all hosts of this test share."""
        path = self._folder / "shared"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def gather(self, value: Any) -> list[Any]:
        """Meet the other hosts and exchange a value. Call it equally often on each host.

        Args:
            value: This host's value. It must be picklable.

        Returns:
            The values of all hosts, in host order.

        Raises:
            UsageError: If another host has ended the test without a call.
        """
        __tracebackhide__ = True
        folder = self._folder / f"meeting-{self._meetings}"
        self._meetings += 1
        folder.mkdir(parents=True, exist_ok=True)
        mine = folder / f".{self.host}"
        mine.write_bytes(dumps(value))
        replace(mine, folder / str(self.host))
        paths = [folder / str(host) for host in range(self.num_hosts)]
        while not all(exists(path) for path in paths):  # the test's deadline ends this
            self._check_presence(paths)
            time.sleep(0.002)
        return [loads(path.read_bytes()) for path in paths]

    def _check_presence(self, paths: list[Path]) -> None:
        __tracebackhide__ = True
        gone = [host for host in range(self.num_hosts) if exists(self._folder / f"left-{host}") and not exists(paths[host])]
        if gone:
            raise UsageError(
                f"Every host of a test calls gather and barrier equally often. Received: call {self._meetings} on {self.name}, "
                f"and host {gone[0]} is done with the test. Call it on every host, in no branch that only some of them take."
            )

    def barrier(self) -> None:
        """Wait until every host is here."""
        __tracebackhide__ = True
        self.gather(None)

    def run(self, *_: Any, **__: Any) -> None:
        """Refuse to run a function on a cluster from one of its hosts.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "cluster.run starts functions on hosts from beside them. Received: a call on a host, in a test that asks for "
            "`strategy`, `devices` or `shared_path`. Its body runs on every host already; leave these out to use cluster.run."
        )

    def __enter__(self) -> HostCluster:  # noqa: PYI034
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


def say_done(cluster: HostCluster) -> None:
    """Tell the other hosts of a cluster that this host has finished the test."""
    if cluster.num_hosts > 1:
        cluster._folder.mkdir(parents=True, exist_ok=True)
        (cluster._folder / f"left-{cluster.host}").touch()
