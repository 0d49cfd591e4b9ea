"""Define the plugin's entry point: options, the mark, fixtures. Heavy modules are imported when a test has a mark."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulate.imports import when_imported
from emulate.pytest_plugin.options import DESCRIPTION, HOST, NAME, add_options, settings

if TYPE_CHECKING:
    from emulate.pytest_plugin.fixtures import Programs
    from emulate.topology import Topology


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add gpudist's options, which all start with `gpudist`."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Announce the mark, and count tests where their reports arrive."""
    config.addinivalue_line("markers", DESCRIPTION)
    asked = settings(config)
    if HOST not in config.stash and not hasattr(config, "workerinput"):
        from emulate.pytest_plugin.summary import Summary

        config.pluginmanager.register(Summary(asked), "gpudist-summary")
    when_imported("absl.testing.parameterized", _keep_marks_of_absl)


def _keep_marks_of_absl() -> None:
    from emulate.pytest_plugin.upstream import keep_marks_of_absl

    keep_marks_of_absl()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each topology."""
    if metafunc.definition.get_closest_marker(NAME) is not None:
        from emulate.pytest_plugin.controller import expect_tests
        from emulate.pytest_plugin.marks import parametrize

        parametrize(metafunc)
        expect_tests(metafunc.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Make one test for each topology in unittest classes, in which pytest would ignore the mark."""
    report = yield
    if isinstance(collector, pytest.Class | pytest.Module) and report.passed:
        from emulate.pytest_plugin.marks import multiply

        multiply(collector, report)
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the controller to expect tests if a test has the mark."""
    if any(item.get_closest_marker(NAME) is not None for item in items):
        from emulate.pytest_plugin.controller import expect_tests

        expect_tests(config)


@pytest.fixture(name="_gpudist_topology")
def _topology(request: pytest.FixtureRequest) -> Topology:
    from emulate.pytest_plugin.fixtures import topology_of_request

    return topology_of_request(request)


@pytest.fixture
def topology(_gpudist_topology: Topology) -> Topology:
    """Provide the topology that this test runs on: `num_hosts`, `num_devices`, `num_ps`, `num_replicas`."""
    return _gpudist_topology


@pytest.fixture
def strategy(request: pytest.FixtureRequest, _gpudist_topology: Topology) -> Any:
    """Provide the tf.distribute.Strategy of this test's topology. The test runs on every host of it."""
    from emulate.pytest_plugin.fixtures import host_of

    return host_of(request, "strategy").make_strategy()


@pytest.fixture
def devices(request: pytest.FixtureRequest, _gpudist_topology: Topology) -> list[Any]:
    """Provide the logical devices of this host. The test runs on every host of its topology."""
    from emulate.pytest_plugin.fixtures import host_of

    host = host_of(request, "devices")
    if "strategy" in request.fixturenames:
        request.getfixturevalue("strategy")  # several hosts: before anything starts TensorFlow's runtime
    return host.logical_devices()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, _gpudist_topology: Topology) -> Iterator[Any]:
    """Provide an `emulate.Cluster` of this test's topology. With `strategy`: the cluster of the test, as its host sees it."""
    from emulate.pytest_plugin.fixtures import make_cluster

    with make_cluster(request, _gpudist_topology) as made:
        yield made


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """Provide a folder that all hosts of this test share. `tmp_path` is each host's own."""
    from emulate.pytest_plugin.fixtures import host_of

    return host_of(request, "shared_path").cluster.shared_path


@pytest.fixture
def gpudist(request: pytest.FixtureRequest) -> Programs:
    """Provide `gpudist.verify(program)` and `gpudist.assert_equivalent(program)` on this test's topology."""
    from emulate.pytest_plugin.fixtures import programs

    return programs(request)
