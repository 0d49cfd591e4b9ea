"""Manage the clusters of one pytest process, and limit how many of them work at once.

A worker of pytest-xdist and its hosts end when its pytest was killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from emulate.devices import take_name
from emulate.pytest_plugin.options import DEFAULT_POOL_SIZE, PluginSettings
from emulate.pytest_plugin.upstream import plugin_modules
from emulate.topology import Topology

if TYPE_CHECKING:
    from emulate.cluster import Lease, Pool, Preload

# What hosts import at their first test, once instead of in every host.
_MODULES = (
    "pytest",
    "unittest.mock",
    "hypothesis",  # its plugin imports it in every host, which have its seed
    "emulate.pytest_plugin.host",
    "gpudist_core.strategies",
    "emulate.pytest_plugin.entry",
)


class Turns:
    """Limit how many clusters work at once, over all workers of a pytest-xdist run.

    A turn is a name among Linux's abstract sockets: it leaves no file, and is free again when its process ends, however.

    Args:
        run: Names the run; empty where there is only this process.
        count: How many clusters may work at once.
    """

    def __init__(self, run: str, count: int) -> None:
        self._names = [f"\0gpudist-{run}-{number}" for number in range(count)] if run else []
        self._held: socket.socket | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Wait for a turn, unless this process has one already."""
        if self._held is not None or not self._names:
            yield
            return
        self._held = self._wait()
        try:
            yield
        finally:
            self._held.close()
            self._held = None

    def _wait(self) -> socket.socket:
        while True:
            for name in self._names:
                if (turn := take_name(name)) is not None:
                    return turn
            time.sleep(0.01)


class Clusters:
    """Start clusters when they are needed.

    Args:
        settings: What the user asked for.
        config: Pytest's.
    """

    def __init__(self, settings: PluginSettings, config: pytest.Config) -> None:
        worker = getattr(config, "workerinput", {})
        self._settings = settings
        self._config = config
        self._is_worker = bool(worker)
        self._num_workers = int(worker.get("workercount", 1))
        self._turns = Turns(str(worker.get("testrunuid", "")), len(os.sched_getaffinity(0)))
        self._preload: Preload | None = None
        self._pool: Pool | None = None
        self._largest = 1

    def expect(self, topologies: Iterable[Topology]) -> None:
        """Note the topologies of one module, whose hosts are all kept until its last test."""
        self._largest = max(self._largest, sum(shape.num_hosts + (shape.num_ps and shape.num_ps + 1) for shape in topologies))

    def warm_up(self) -> Preload:
        """Return the process that clusters are forked from. It starts and imports in the background."""
        if self._preload is None:
            from emulate.cluster import Preload

            if self._is_worker:
                end_with_parent()
            self._preload = Preload(modules=(*_MODULES, *plugin_modules(self._config)))
        return self._preload

    @contextlib.contextmanager
    def turn(self) -> Iterator[Preload]:
        """Leave for a cluster outside of the pool to work."""
        with self._turns.one():
            yield self.warm_up()

    @contextlib.contextmanager
    def lease(self, topology: Topology, scope: str, *, fresh: bool = False) -> Iterator[Lease]:
        """Lease a cluster that runs the tests of this scope alone."""
        with self._turns.one():
            if self._pool is None:
                self._pool = self._new_pool()
            with self._pool.lease(topology, scope=scope, fresh=fresh) as lease:
                yield lease

    def has_idle(self, topology: Topology, scope: str) -> bool:
        """Return whether a cluster waits that has run tests of this scope."""
        return self._pool is not None and self._pool.has_idle(topology, scope)

    def _new_pool(self) -> Pool:
        from emulate.cluster import Pool

        size = self._settings.pool_size or DEFAULT_POOL_SIZE
        pool = Pool(
            max_hosts=max(self._largest, size // self._num_workers, 1),
            preload=self.warm_up(),
            device=self._settings.device,
            keeps_gpus=self._num_workers == 1,
        )
        # A worker whose pytest is gone does not come to `close`: an error ends it before that. Then this comes first of all.
        weakref.finalize(self, pool.close)
        return pool

    def history(self) -> list[str]:
        """Return what happened to the clusters of the pool, and why some were not used again."""
        if self._pool is None:
            return []
        return [str(self._pool.statistics), *(f"replaced {reason}" for reason in self._pool.statistics.reasons)]

    def close(self) -> None:
        """End every process."""
        for resource in (self._pool, self._preload):
            if resource is not None:
                resource.close()
        self._pool = self._preload = None


_POLL_SECONDS = 0.25


@functools.cache
def end_with_parent() -> None:
    """Interrupt this process, as Ctrl-C does, when the one that started it is gone.

    Execnet does so too, 5 seconds later, as it waits for tests to end by themselves; hosts would work on until then.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="gpudist-orphans", daemon=True).start()
