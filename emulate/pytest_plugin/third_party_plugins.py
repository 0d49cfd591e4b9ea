"""Handle other plugins of pytest: what they learn on hosts, and which of them do not run there.

If pytest-cov measures the run, the coverage of code on hosts is measured too, in files that pytest-cov combines at the end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from emulate.errors import UsageError

_OF_THE_WHOLE_RUN = ("pytest_cov", "_cov", "rerunfailures", "pytest-retry", "flaky")
"""Names under which plugins register that measure the processes of a run (`Measuring` does it on hosts), or repeat a test where
it failed: one host that runs a test again leaves the others alone in their collectives."""


_KEEPS_SNAPSHOTS = "syrupy deletes and reports no unused snapshots in a run with tests on hosts: it cannot know what they use."


def spare_snapshots(config: pytest.Config) -> list[str]:
    """Have syrupy leave snapshots alone that no test of this process has used: those on hosts have, and it knows of none.

    Args:
        config: The controller's.

    Returns:
        What the user is told of it.
    """
    if config.getoption("disable_unused_snapshots", True):  # which is so without syrupy, too
        return []
    config.option.disable_unused_snapshots = True
    return [_KEEPS_SNAPSHOTS]


def keep_off(config: pytest.Config, markers: list[str]) -> None:
    """Take away from a host's pytest, before it is configured, what has no part there.

    Args:
        config: The host's.
        markers: The lines of the ini value that the controller has; those of the plugins that go stay known.
    """
    for name in _OF_THE_WHOLE_RUN:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    for line in markers:
        config.addinivalue_line("markers", line)


def worker_input(config: pytest.Config) -> dict[str, Any]:
    """Return what makes a host's pytest look like a worker of pytest-xdist to other plugins, with their own worker data.

    Args:
        config: The controller's, which may be a worker itself.

    Returns:
        What can be sent of `config.workerinput`; where there is none, what plugins and conftest.py put into that of a worker.

    Raises:
        UsageError: When one of their hooks fails.
    """
    if hasattr(config, "workerinput"):
        return sendable(config.workerinput)
    worker_data = {"workerid": "master", "workercount": 1, "testrunuid": "gpudist", "mainargv": ["pytest"]}
    if config.getoption("randomly_seed", None) is not None:
        worker_data["randomly_seed"] = config.getoption("randomly_seed")  # pytest-randomly tells it through pytest-xdist alone
    if hasattr(config.hook, "pytest_configure_node"):
        plugins = (config.pluginmanager.get_plugin(name) for name in _OF_THE_WHOLE_RUN)
        hook = config.pluginmanager.subset_hook_caller("pytest_configure_node", [p for p in plugins if p is not None])
        gateway = SimpleNamespace(id="master", spec=SimpleNamespace(popen=True, chdir=None))
        try:
            hook(node=SimpleNamespace(config=config, workerinput=worker_data, gateway=gateway))
        except Exception as error:
            raise UsageError(
                "To other plugins hosts are workers of pytest-xdist, which pytest_configure_node gives what they need. "
                f"Received: {type(error).__name__}: {error} from it. Use node.config and node.workerinput alone there."
            ) from error
    return sendable(worker_data)


def sendable(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that can be sent to another process."""
    picklable = {}
    for name, value in values.items():
        with contextlib.suppress(Exception):  # what cannot be sent to pytest-xdist's workers either
            pickle.dumps(value)
            picklable[name] = value
    return picklable


@dataclass(frozen=True)
class CoverageMeasurement:
    """Describe how pytest-cov measures.

    Attributes:
        options: What it gave to coverage: packages and folders, whether branches count, the file of the configuration, and
            where the results go, without the endings of parts.
        by_test: Whether it is told which test ran what.
    """

    options: dict[str, Any]
    by_test: bool

    @classmethod
    def by(cls, config: pytest.Config) -> CoverageMeasurement | None:
        """Return how this run is measured, or None."""
        plugin = config.pluginmanager.get_plugin("_cov")
        measuring = getattr(getattr(plugin, "cov_controller", None), "cov", None)
        if measuring is None:
            return None
        asked, file = config.option, os.path.abspath(measuring.config.data_file)
        options = {"source": asked.cov_source or None, "branch": asked.cov_branch, "config_file": asked.cov_config}
        return cls({**options, "data_file": file}, by_test=getattr(asked, "cov_context", None) == "test")


class Measuring:
    """Measure coverage in this process.

    Args:
        plan: How; None for not at all.
    """

    def __init__(self, plan: CoverageMeasurement | None) -> None:
        self._plan = plan
        self._coverage: Any = None
        if plan is None:
            return
        import coverage

        self._coverage = coverage.Coverage(data_suffix=f"gpudist.{os.getpid()}.{uuid.uuid4().hex}", **plan.options)
        # A host runs some of the tests: that it did not import all is nothing to warn of.
        unimported = ["module-not-imported", "module-not-measured", "no-data-collected"]
        disabled = self._coverage.get_option("run:disable_warnings") or []
        self._coverage.set_option("run:disable_warnings", [*disabled, *unimported])

    @contextlib.contextmanager
    def during(self, test: str = "") -> Iterator[None]:
        """Measure what runs meanwhile, in this thread and those that it starts; what was measured is on disk afterwards.

        Args:
            test: The test that is run, if it is one.
        """
        if self._coverage is None or self._plan is None:
            yield
            return
        self._coverage.start()
        try:
            if self._plan.by_test and test:
                self._coverage.switch_context(f"{test}|run")
            yield
        finally:
            self._coverage.stop()
            self._coverage.save()
            self._coverage.get_data().close()
