"""The entry point of the pytest plugin: options, the mark, fixtures. What is heavy is imported when a test has a mark."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emulate.imports import when_imported
from emulate.pytest_plugin.keys import CONTROLLER, DESCRIPTION, HOST, NAME

if TYPE_CHECKING:
    from emulate.pytest_plugin.programs import Programs
    from emulate.topology import Topology


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options, all of them named gpudist."""
    from emulate.pytest_plugin.options import add_options

    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Announce the mark, and count tests where their reports arrive."""
    from emulate.pytest_plugin.options import settings

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
    """One test for each topology."""
    if metafunc.definition.get_closest_marker(NAME) is not None:
        from emulate.pytest_plugin.controller import expect_tests
        from emulate.pytest_plugin.marks import parametrize

        parametrize(metafunc)
        expect_tests(metafunc.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """One test for each topology in classes of unittest, where pytest would ignore the mark."""
    report = yield
    if isinstance(collector, pytest.Class | pytest.Module) and report.passed:
        from emulate.pytest_plugin.testcases import multiply

        multiply(collector, report)
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever has the mark is ours to run, or to refuse."""
    if any(item.get_closest_marker(NAME) is not None for item in items):
        from emulate.pytest_plugin.controller import expect_tests

        expect_tests(config)


@pytest.fixture(name="_gpudist_topology")
def _topology(request: pytest.FixtureRequest) -> Topology:
    from emulate.pytest_plugin.fixtures import topology_of_request

    return topology_of_request(request)


@pytest.fixture
def topology(_gpudist_topology: Topology) -> Topology:
    """The topology that this test runs on: `num_hosts`, `num_devices`, `num_ps`, `num_replicas`."""
    return _gpudist_topology


@pytest.fixture
def strategy(request: pytest.FixtureRequest, _gpudist_topology: Topology) -> Any:
    """The tf.distribute.Strategy of this test's topology; the test runs on every host of it."""
    from emulate.pytest_plugin.fixtures import make_strategy

    return make_strategy(request)


@pytest.fixture
def devices(request: pytest.FixtureRequest, _gpudist_topology: Topology) -> list[Any]:
    """The logical devices of this host; the test runs on every host of its topology."""
    from emulate.pytest_plugin.fixtures import logical_devices

    return logical_devices(request)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, _gpudist_topology: Topology) -> Iterator[Any]:
    """An `emulate.Cluster` of this test's topology; with `strategy`, the cluster that the test runs on, as its host sees it."""
    from emulate.pytest_plugin.fixtures import make_cluster

    with make_cluster(request, _gpudist_topology) as made:
        yield made


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """A folder of this test that all its hosts share; `tmp_path` is each host's own."""
    from emulate.pytest_plugin.fixtures import shared_folder

    return shared_folder(request)


@pytest.fixture
def gpudist(request: pytest.FixtureRequest) -> Programs:
    """Programs under test: `gpudist.verify(program)`, `gpudist.assert_equivalent(program)`, on this test's topology."""
    from emulate.pytest_plugin.fixtures import programs

    return programs(request)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What is set up on hosts is torn down."""
    if CONTROLLER in session.config.stash:
        session.config.stash[CONTROLLER].finish(session)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing outlives the run."""
    if CONTROLLER in config.stash:
        config.stash[CONTROLLER].close()
