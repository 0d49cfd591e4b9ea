"""Provide the fixtures' values: on a host from the host, beside the hosts from the controller.

The fixture `gpudist` verifies programs on the topology of its test.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from emulate.pytest_plugin.controller import controller_of
from emulate.pytest_plugin.marks import topology_of
from emulate.pytest_plugin.options import DEVICE, EMULATED, HOST, IN_PROCESS, TOPOLOGY, VERDICT
from emulate.topology import Topology

if TYPE_CHECKING:
    from emulate.pytest_plugin.controller import Controller
    from emulate.pytest_plugin.host_session import TestHost
    from emulate.verify import Verdict


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


def host_of(request: pytest.FixtureRequest, name: str) -> TestHost:
    """Return the host that the test runs on."""
    own: TestHost | None = request.node.stash.get(IN_PROCESS, None)
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


def make_cluster(request: pytest.FixtureRequest, topology: Topology) -> AbstractContextManager[Any]:
    """See the fixture `cluster`."""
    if HOST in request.config.stash or IN_PROCESS in request.node.stash:
        return host_of(request, "cluster").cluster
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


class Programs:
    """Verify programs in a test, with the settings of the run. All tests share one process to fork from.

    Args:
        controller: The controller of this pytest.
        item: The test.

    Example:
        @pytest.mark.topology("1x4", "2x2")
        def test_training(gpudist):
            gpudist.assert_equivalent("train.py")
    """

    def __init__(self, controller: Controller, item: pytest.Item) -> None:
        self._controller = controller
        self._item = item

    def verify(self, program: Any, topology: Any = None, **options: Any) -> Verdict:
        """Verify a program as `emulate.verify` does.

        Args:
            program: As for `emulate.verify`.
            topology: As for `emulate.verify`. Default: the test's own.
            **options: As for `emulate.verify`.

        Returns:
            The verdict. The test's properties also carry it.
        """
        from emulate.verify import verify

        wanted = topology or topology_of(self._item) or "1x4"
        asked = self._controller.settings
        options = {"device": asked.device, "seed": asked.seed, "timeout": self._controller.deadline_of(self._item), **options}
        with self._controller.clusters.turn() as preload:
            verdict = verify(program, wanted, preload=preload, **options)
        self._note(verdict)
        return verdict

    def assert_equivalent(self, program: Any, topology: Any = None, **options: Any) -> None:
        """Raise AssertionError with the report unless the program trains the same model, as `emulate.assert_equivalent` does.

        Args:
            program: As for `emulate.verify`.
            topology: As for `emulate.verify`. Default: the test's own.
            **options: As for `emulate.verify`.

        Raises:
            AssertionError: With the whole report as its text.
        """
        from emulate.report import check_equivalent

        __tracebackhide__ = True
        check_equivalent(self.verify(program, topology, **options))

    def _note(self, verdict: Verdict) -> None:
        runs = verdict.runs
        kind = EMULATED if verdict.device == "cpu" else verdict.device
        properties = {
            TOPOLOGY: ", ".join(run.topology for run in runs),
            DEVICE: kind,
            VERDICT: ", ".join(run.verdict for run in runs),
        }
        kept = [pair for pair in self._item.user_properties if pair[0] not in properties]
        self._item.user_properties[:] = kept + list(properties.items())
