"""Read `@pytest.mark.topology(...)`: the topologies of a test, its options, and where the test runs.

One test is made for each topology, also from unittest classes, which pytest does not parametrize.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from emulate.errors import UsageError
from emulate.pytest_plugin import upstream
from emulate.pytest_plugin.options import HOST, IN_PROCESS, NAME
from emulate.topology import Topology

PARAMETER = "_gpudist_topology"
"""Name of the hidden fixture whose parameter is the topology."""
STRATEGIES = ("auto", "one-device", "mirrored", "central-storage", "multi-worker", "parameter-server", "default")
_EXAMPLE = '@pytest.mark.topology("1x4", "2x2")'


@dataclass(frozen=True)
class Wanted:
    """Hold what the marks of a test say.

    Attributes:
        topologies: The topologies that it runs on.
        strategy: The kind of strategy that it gets: one of `STRATEGIES`, or None.
        deadline: The time limit in seconds; None for the default of the options.
        fresh: Whether it gets hosts that have run no other test, and that no other test gets.
    """

    topologies: tuple[Topology, ...]
    strategy: str | None = "auto"
    deadline: float | None = None
    fresh: bool = False


def wanted_by(node: pytest.Item) -> Wanted | None:
    """Return what the nearest marks of a test say: its own, else those of its class, else those of its module.

    Args:
        node: The test, or the definition from which tests are generated.

    Returns:
        The content of the marks, or None.

    Raises:
        UsageError: If a mark is not valid.
    """
    marks = list(node.iter_markers_with_node(NAME))
    if not marks:
        return None
    nearest = [mark for owner, mark in reversed(marks) if owner is marks[0][0]]  # as they are written
    options: dict[str, Any] = {}
    for name, value in (option for mark in nearest for option in mark.kwargs.items()):
        if options.setdefault(name, value) != value:
            raise UsageError(
                f"The marks of one test must agree. Received: {name}={options[name]!r} and {name}={value!r}. Keep one of them."
            )
    shapes = [Topology.parse(shape) for mark in nearest for shape in mark.args]
    if not shapes:
        raise UsageError(f"A mark names the topologies of its test. Received: {_shown(nearest[0])}. Write {_EXAMPLE}.")
    return Wanted(tuple(dict.fromkeys(shapes)), **_checked(options))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(options.keys() - {"strategy", "deadline", "fresh"})
    if unknown:
        raise UsageError(
            "A mark has topologies and the keywords strategy, deadline and fresh. "
            f"Received: {unknown[0]}={options[unknown[0]]!r}. "
            f'Write {_EXAMPLE[:-1]}, strategy="mirrored").'
        )
    kind, deadline = options.get("strategy", "auto"), options.get("deadline")
    if kind is not None and kind not in STRATEGIES:
        raise UsageError(
            f"A strategy is one of {', '.join(STRATEGIES)}, or None for none. Received: strategy={kind!r}. Choose one of them."
        )
    if deadline is not None and not (isinstance(deadline, (int, float)) and deadline > 0):
        raise UsageError(f"A deadline is a positive number of seconds. Received: deadline={deadline!r}.")
    if not isinstance(fresh := options.get("fresh", False), bool):
        raise UsageError(f"fresh must be True or False. Received: fresh={fresh!r}.")
    return options


def _shown(mark: pytest.Mark) -> str:
    words = [repr(argument) for argument in mark.args] + [f"{name}={value!r}" for name, value in mark.kwargs.items()]
    return f"@pytest.mark.{NAME}({', '.join(words)})"


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one test for each topology that the marks of a function name."""
    try:
        wanted, wrong = wanted_by(metafunc.definition), None
    except UsageError as error:
        wanted, wrong = None, error
    if wrong is not None:  # said here, so that pytest does not tell of two errors
        pytest.fail(f"{metafunc.definition.nodeid}: {wrong}", pytrace=False)
    if wanted is not None:
        # pytest parametrizes only what a function asks for; whether this one asks for anything does not matter.
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(
            PARAMETER, wanted.topologies, indirect=True, ids=[str(topology) for topology in wanted.topologies], scope="function"
        )


def check_places(item: pytest.Item) -> None:
    """Refuse a mark where pytest has made tests already: it would be passed over.

    Args:
        item: A test.
    """
    of_parameters = any(mark.name == NAME for mark in getattr(getattr(item, "callspec", None), "marks", ()))
    if of_parameters or (topology_of(item) is None and item.get_closest_marker(NAME) is not None):
        pytest.fail(
            f"A mark {NAME} stands on a test function, a class or a module. Received: one on {item.nodeid}, where pytest "
            "does not look for it before it makes tests (in pytest.param(marks=...), say). "
            "Write @pytest.mark.topology(...) on the function.",
            pytrace=False,
        )


def is_of_framework(item: pytest.Item) -> bool:
    """Return whether a test comes from TensorFlow's own classes (`test_session`, which skips itself)."""
    return str(getattr(getattr(item, "obj", None), "__module__", "")).startswith("tensorflow.")


def topology_of(item: pytest.Item) -> Topology | None:
    """Return the topology that a test was generated for."""
    callspec = getattr(item, "callspec", None)
    topology = callspec.params.get(PARAMETER) if callspec is not None else getattr(item, "gpudist_topology", None)
    return topology if isinstance(topology, Topology) else None


_ON_HOSTS = ("strategy", "devices", "shared_path")
_BESIDE = ("cluster", "topology", "gpudist")

Place = tuple[Path, Topology]
"""The test file and the topology whose tests share hosts."""


def hosts_of(item: pytest.Item) -> Topology | None:
    """Return the topology on whose hosts a test runs; None for a test beside them, or one that is skipped."""
    names = set(getattr(item, "fixturenames", ()))
    runs_beside = names.intersection(_BESIDE) and not names.intersection(_ON_HOSTS)
    return None if runs_beside or item.get_closest_marker("skip") is not None else topology_of(item)


def place_of(item: pytest.Item) -> Place | None:
    """Return what a test shares its hosts by; None if it shares none."""
    topology = hosts_of(item)
    if topology is None:
        return None
    wanted = wanted_by(item)
    return None if wanted is None or wanted.fresh else (item.path, topology)


def multiply(collector: pytest.Class | pytest.Module, report: pytest.CollectReport) -> None:
    """Put one test for each of its topologies in the place of each test of a class of unittest.

    Args:
        collector: Whose tests they are.
        report: What was collected; failed where a mark cannot be meant, or where Python has lost one.
    """
    try:
        _refuse_lost_marks(collector)
        if isinstance(collector, pytest.Class) and upstream.is_test_case(collector):
            # pytest makes the tests of a unittest class without `pytest_generate_tests`: marks.parametrize never sees them.
            report.result = [variant for test in report.result or [] for variant in _per_topology(test)]
    except UsageError as error:
        report.outcome, report.longrepr, report.result = "failed", str(error), []


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
