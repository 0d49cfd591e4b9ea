"""Prepare what a test finds around it on a host, where that differs from a pytest that a user starts.

A test of one host may run in pytest's own process instead, where `breakpoint()`, `--pdb` and the debugger of an IDE work.

A test sees the cluster from one of its hosts: which host it is, and where the hosts meet. For that, functions are imported by
name: a test may put others in their place while hosts meet.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import time
import warnings
from contextlib import AbstractContextManager
from os import replace
from os.path import exists
from pathlib import Path
from pickle import dumps, loads
from typing import Any

import pytest

from emulate.errors import UsageError
from emulate.imports import tf
from emulate.pytest_plugin.wire import SessionPlan
from emulate.topology import Topology

LATE_SETTING = re.compile(r"cannot be modified after (being )?initializ|must be configured at program startup")
"""TensorFlow's words for a setting that comes after the first operation of a process."""
ABOUT_LATE_SETTING = (
    "TensorFlow allows this setting only before the first operation of a process. Received: a host that has run other "
    'tests of this file. Give the test hosts of its own: @pytest.mark.topology("1x2", fresh=True).'
)


_CHOOSING = ("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "cacheclear", "looponfail")
_OFF = ("usepdb", "trace", "pyargs", "loadgroup", "distload", *_CHOOSING)
"""Options that choose among all tests, need a terminal, or distribute tests: a host runs one test at a time."""


def host_options(plan: SessionPlan, folder: str, name: str) -> dict[str, Any]:
    """Return the user's options, without those that concern the run as a whole."""
    options = {
        **plan.options,
        **dict.fromkeys(_OFF, False),
        "basetemp": folder,
        "plugins": [*plan.options.get("plugins", []), "no:terminal"],
        "maxfail": 0,
        "keyword": "",
        "markexpr": "",
        "deselect": None,
        "dist": "no",
        "numprocesses": None,
        "maxprocesses": None,
        "tx": [],
        "cov_source": [],  # pytest-cov begins while options are read, by deleting what others have measured
    }
    options.pop("file_or_dir", None)  # argparse warns of it
    if options.get("log_file"):
        options["log_file"] = f"{options['log_file']}.{name}"
    return options


def refuse_debugger(*args: Any, **kwargs: Any) -> None:
    """Replace `breakpoint` and `pdb.set_trace`."""
    __tracebackhide__ = True
    raise UsageError(
        "A debugger needs a terminal, and a host has none. Received: breakpoint() or pdb.set_trace() in a test that runs on "
        "hosts. Run a test on 1xN in pytest's own process: pytest --gpudist-in-process -k 1x2."
    )


def seed_everything(seed: int) -> None:
    """Seed every generator a test may use."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)
    for name in ("keras", "tf_keras"):
        if name in sys.modules:
            sys.modules[name].utils.set_random_seed(seed)


class HostCluster(AbstractContextManager["HostCluster"]):
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
            gone = [host for host, path in enumerate(paths) if exists(self._folder / f"left-{host}") and not exists(path)]
            if gone:
                raise UsageError(
                    "Every host of a test calls gather and barrier equally often. "
                    f"Received: call {self._meetings} on {self.name}, and host {gone[0]} is done with the test. "
                    "Call it on every host, in no branch that only some of them take."
                )
            time.sleep(0.002)
        return [loads(path.read_bytes()) for path in paths]

    def barrier(self) -> None:
        """Wait until every host is here."""
        __tracebackhide__ = True
        self.gather(None)

    def say_done(self) -> None:
        """Tell the other hosts that this one has finished the test."""
        if self.num_hosts > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"left-{self.host}").touch()

    def run(self, *_: Any, **__: Any) -> None:
        """Refuse to run a function on a cluster from one of its hosts.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "cluster.run starts functions on hosts from beside them. Received: a call on a host, in a test that asks for "
            "`strategy`, `devices` or `shared_path`. Its body runs on every host already; leave these out to use cluster.run."
        )

    def __exit__(self, *_: object) -> None:
        pass


class TestHost:
    """Provide what a test asks of the host that it runs on.

    Attributes:
        cluster: The cluster as this host sees it.
        strategy: The kind of strategy that the test's mark asks for.
    """

    __test__ = False  # not a test, whatever its name
    cluster: HostCluster
    strategy: str | None = None

    def make_strategy(self) -> Any:
        """Return the strategy of the test."""
        if self.strategy == "default":
            return tf.distribute.get_strategy()
        import gpudist_core

        return gpudist_core.make_strategy(self.strategy or "auto")

    def logical_devices(self) -> list[Any]:
        """Return the devices that a program sees on this host. TensorFlow lists those of a whole cluster."""
        host = self.cluster.host
        # Asked from a frame that is not ours: to gpudist's own calls TensorFlow tells the truth, to tests what is emulated.
        for kind in ("GPU", "CPU"):
            call = pytest.CallInfo.from_call(
                functools.partial(tf.config.list_logical_devices, kind), "setup", reraise=Exception
            )
            own = [device for device in call.result or [] if "/task:" not in device.name or f"/task:{host}/" in device.name]
            if own:
                return own
        return []


class InProcess(TestHost):
    """Be the one host of a topology.

    Args:
        topology: The topology, of one host and without parameter servers.

    Raises:
        UsageError: If TensorFlow has run an operation in this process already.
    """

    def __init__(self, topology: Topology) -> None:
        from emulate.devices import DevicePlan, install

        self._topology = topology
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
        self.strategy = strategy
        self.cluster = HostCluster(topology, 0, folder)
        seed_everything(seed)
