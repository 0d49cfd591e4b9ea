"""Make one test for each topology from unittest classes, which pytest does not parametrize."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from emulate.errors import UsageError
from emulate.pytest_plugin.marks import HOST, IN_PROCESS, NAME, Wanted, is_of_framework, wanted_by

if TYPE_CHECKING:
    from emulate.topology import Topology


def multiply(collector: pytest.Class | pytest.Module, report: pytest.CollectReport) -> None:
    """Put one test for each of its topologies in the place of each test of a class of unittest.

    Args:
        collector: Whose tests they are.
        report: What was collected; failed where a mark cannot be meant, or where Python has lost one.
    """
    try:
        _refuse_lost_marks(collector)
        if isinstance(collector, pytest.Class) and _is_of_unittest(collector):
            # pytest makes the tests of a unittest class without `pytest_generate_tests`: marks.parametrize never sees them.
            report.result = [variant for test in report.result or [] for variant in _per_topology(test)]
    except UsageError as error:
        report.outcome, report.longrepr, report.result = "failed", str(error), []


def _is_of_unittest(collector: pytest.Class) -> bool:
    from emulate.pytest_plugin import upstream  # what a suite of functions need not import

    return upstream.is_test_case(collector)


def _per_topology(test: Any) -> list[Any]:
    wanted = wanted_by(test)
    if wanted is None or is_of_framework(test):
        return [test]
    return [
        _class().from_parent(test.parent, name=f"{test.name}[{topology}]", method=test.name, topology=topology, wanted=wanted)
        for topology in wanted.topologies
    ]


def _refuse_lost_marks(collector: pytest.Class | pytest.Module) -> None:
    """Refuse a lost mark: a decorator that returns nothing (parameterized.expand) leaves it in place of a test."""
    for name, value in list(vars(getattr(collector, "obj", None) or object).items()):
        if isinstance(value, pytest.MarkDecorator) and value.name == NAME and collector.funcnamefilter(name):
            raise UsageError(
                f"A mark stands on a test. Received: {collector.nodeid}::{name}, which is only the mark: the decorator below "
                "it returns no test, or a name like a test's was given to a mark. Write @pytest.mark.topology(...) below "
                "@parameterized.expand(...), or name the mark otherwise."
            )


@functools.cache
def _class() -> Any:
    """Return the class, created at first use, because its base is private to pytest."""
    from emulate.pytest_plugin import upstream

    class TopologyTestCase(upstream.test_case_function()):  # type: ignore[misc]
        """Run a unittest test on one topology: `self.topology` and, on hosts, `self.strategy`."""

        def __init__(self, *, method: str, topology: Topology, wanted: Wanted, **more: Any) -> None:
            self._method = method
            super().__init__(**more)
            self.originalname = method
            self.gpudist_topology = topology
            self._wanted = wanted

        def _getinstance(self) -> Any:
            return self.parent.obj(self._method)

        def _getobj(self) -> Any:
            return getattr(self.instance, self._method)

        def setup(self) -> None:
            super().setup()
            if HOST in self.config.stash or IN_PROCESS in self.stash:
                names = ("topology", *(["strategy"] if self._wanted.strategy is not None else []), "devices")
                for name in names:
                    if not hasattr(type(self.instance), name):
                        setattr(self.instance, name, upstream.fixture_request(self).getfixturevalue(name))

    return TopologyTestCase
