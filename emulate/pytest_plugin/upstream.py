"""Collect the private names of pytest for the plugin. Tests cover each."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from emulate.errors import UsageError
from emulate.point import instead_of


def make_config(options: dict[str, Any], args: list[str], captured: Sequence[Path]) -> pytest.Config:
    """Return a config for a process that another pytest directs, as pytest-xdist makes one for its workers.

    Args:
        options: The values of all options.
        args: What is to be collected.
        captured: The files for captured stdout and stderr: what a process said that was killed can be read there.

    Returns:
        The config, not configured yet.
    """
    capture: Any = importlib.import_module("_pytest.capture")
    from _pytest.assertion.rewrite import AssertionRewritingHook
    from _pytest.config import Config

    # A host is forked from a process that has imported this package, which holds no assertions to rewrite.
    AssertionRewritingHook._warn_already_imported = lambda self, name: None  # type: ignore[method-assign]
    paths, real = iter(captured), capture.TemporaryFile

    def named_file(*args: Any, **kwargs: Any) -> Any:
        path = next(paths, None)
        return real(*args, **kwargs) if path is None else path.open("w+b", buffering=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "TemporaryFile", named_file)
        return Config.fromdictargs(options, args)


def plugin_modules(config: pytest.Config) -> list[str]:
    """Return the names of the modules that are plugins of pytest itself or of an installed package."""
    modules = [plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, ModuleType)]
    installed = [plugin for plugin, _ in config.pluginmanager.list_plugin_distinfo()]
    return sorted(module.__name__ for module in modules if module in installed or module.__name__.startswith("_pytest."))


def start_session(config: pytest.Config) -> pytest.Session:
    """Do what pytest does before it collects."""
    from _pytest import assertion

    config._do_configure()
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    assertion.pytest_collection(session)  # which rewrites assertions in test modules from now on
    return session


def end_session(session: pytest.Session) -> None:
    """Do what pytest does at the end."""
    session.exitstatus = pytest.ExitCode.OK  # plugins read it there
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
    session.config._ensure_unconfigure()


def collector_of(session: pytest.Session, path: Path) -> pytest.Collector:
    """Return the collector of a test file, which is not imported yet."""
    nodes = session.perform_collect([str(path)], genitems=False)
    return next(node for node in nodes if isinstance(node, pytest.Collector))


def items_of(session: pytest.Session, collector: pytest.Collector) -> list[pytest.Item]:
    """Return the tests of a file, after the hooks that may change them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the process that directs this one has collected the file too, and shown them
        items = list(session.genitems(collector))
        session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
    session.items.extend(items)
    return items


def tear_down(item: pytest.Item, keep: pytest.Item | None) -> pytest.TestReport | None:
    """Tear down what is set up and not needed by the test `keep`; what went wrong, as a report of the test `item`."""
    start = time.time()
    leaves = (pytest.exit.Exception, KeyboardInterrupt)
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(keep), "teardown", reraise=leaves)
    if call.excinfo is None:
        return None
    report = pytest.TestReport.from_item_and_call(item, call)
    report.start = start
    return report


def stop_capturing(config: pytest.Config) -> None:
    """Give the process its own streams back until the next phase of a test."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)


def terminal_writer(stream: Any) -> Any:
    """Return pytest's writer for terminals."""
    from _pytest._io import TerminalWriter

    return TerminalWriter(stream)


def base_folder(config: pytest.Config) -> Path:
    """Return the folder of this run's temporary folders."""
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        raise UsageError(
            "Hosts have their folders in pytest's temporary one. Received: a run without its plugin tmpdir. "
            "Leave out -p no:tmpdir."
        )
    return Path(factory.getbasetemp())


def nodeid_of(item: pytest.Item) -> str:
    """Return the node id without the group that pytest-xdist appends."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"


def fixture_request(item: pytest.Item) -> Any:
    """Return the request of a test during its setup."""
    return item._request  # type: ignore[attr-defined]


def failure(text: str, path: str, line: int, message: str) -> Any:
    """Return a failure without a Python traceback, in a form that keeps its message when it is serialized."""
    from _pytest._code.code import ReprExceptionInfo, ReprFileLocation, ReprTracebackNative

    return ReprExceptionInfo(
        reprtraceback=ReprTracebackNative([f"{text}\n"]), reprcrash=ReprFileLocation(path=path, lineno=line, message=message)
    )


def subtest_name(report: pytest.TestReport) -> str | None:
    """Return what identifies a subtest (unittest's `subTest`, the fixture `subtests`) in its test; None for a phase."""
    context = getattr(report, "context", None)
    return None if context is None else f"{context.msg} {sorted(context.kwargs.items())}"


def is_doctest(item: pytest.Item) -> bool:
    """Return whether a test is an example in a docstring, which asks for no strategy, whatever its module's mark."""
    from _pytest.doctest import DoctestItem

    return isinstance(item, DoctestItem)


def is_test_case(collector: pytest.Collector) -> bool:
    """Return whether a collector is a unittest class."""
    from _pytest.unittest import UnitTestCase

    return isinstance(collector, UnitTestCase)


def test_case_function() -> Any:
    """Return the class of a unittest test."""
    from _pytest.unittest import TestCaseFunction

    return TestCaseFunction


def refuse_debugger(refuse: Callable[..., Any]) -> None:
    """Have `breakpoint()` and `pdb.set_trace()` call something else."""
    import pdb
    import sys

    from _pytest.debugging import pytestPDB

    pytestPDB.set_trace = refuse  # type: ignore[method-assign]
    pdb.set_trace = refuse
    sys.breakpointhook = refuse


def keep_marks_of_absl() -> None:
    """Keep a mark above absl's `@parameterized.parameters`: absl loses what is set on its iterator."""
    from absl.testing import parameterized

    iterator = getattr(parameterized, "_ParameterizedTestIter", None)
    if iterator is None:
        return

    @instead_of(iterator, "__iter__")
    def with_marks(real: Any, self: Any) -> Any:
        for test in real(self):
            marks = self.__dict__.get("pytestmark", [])
            if marks:
                test.pytestmark = [*getattr(test, "pytestmark", []), *marks]
            yield test
