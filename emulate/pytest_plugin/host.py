"""Run one pytest session for the life of a host, and the tests of one module that the controller sends.

What the session reports and writes is forwarded to the controller.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from emulate.cluster import Reset, before_runtime, keep_meeting
from emulate.errors import UsageError
from emulate.pytest_plugin import host_session, upstream, wire
from emulate.pytest_plugin.merge import has_raised
from emulate.pytest_plugin.options import HOST
from emulate.pytest_plugin.third_party_plugins import Measuring, keep_off

if TYPE_CHECKING:
    from emulate.cluster import HostContext

_host: Host | None = None  # of this process


def run_test(context: HostContext, plan: wire.TestPlan) -> wire.Ended:
    """Run one test here; its reports are sent as they come.

    Args:
        context: The host's own.
        plan: Which test.

    Returns:
        How it ended, beside what its reports say.
    """
    global _host
    if context.role in ("worker", "ps") and context.topology.num_ps:
        # A task that the chief directs, until the cluster is ended.
        import gpudist_core

        gpudist_core.make_strategy()
        raise AssertionError("a server does not return")
    if _host is None:
        _host = Host(context, plan.session)
    return _host.run(plan)


def finish(context: HostContext) -> None:
    """End this host's session: what is still set up is torn down."""
    global _host
    if _host is not None:
        _host.finish()
    _host = None


class Host(host_session.TestHost):
    """Hold this process as its pytest sees it.

    Args:
        context: The host's own.
        plan: How to start pytest.
    """

    def __init__(self, context: HostContext, plan: wire.SessionPlan) -> None:
        self._context = context
        self._plan: wire.TestPlan | None = None
        self._found: list[pytest.Item] | None = None
        self._last: pytest.Item | None = None
        self._has_failed = self._failed_in_tensorflow = False
        self._reset: Reset | None = None  # of the present test's own part
        name = f"{context.topology}-host{context.host}"
        folder = tempfile.mkdtemp(prefix=f"{name}-", dir=plan.temporary)
        self._measuring = Measuring(plan.measured)
        self._captured = [Path(f"{folder}.{stream}") for stream in ("stdout", "stderr")]
        with self._meeting_first():
            self._config = upstream.make_config(host_session.host_options(plan, folder, name), list(plan.args), self._captured)
        self._config.workerinput = {**plan.worker, "workerid": f"{plan.worker['workerid']}-{name}"}  # type: ignore[attr-defined]
        keep_off(self._config, plan.markers)
        self._config.stash[HOST] = self
        self._config.pluginmanager.register(self, "gpudist-host")
        shows_setup = any(self._config.getoption(name, False) for name in ("setupshow", "setuponly", "setupplan"))
        if shows_setup or pytest.version_tuple < (9,):  # whose failed assertions ask the terminal for colours
            self._config.pluginmanager.register(_Terminal(self.send), "terminalreporter")
        else:
            self._config.get_terminal_writer = lambda: upstream.terminal_writer(io.StringIO())  # type: ignore[method-assign]
        upstream.refuse_debugger(host_session.refuse_debugger)
        with self._measuring.during(), self._meeting_first():
            self._session = upstream.start_session(self._config)
        if self._config.getoption("capture", "fd") == "no":
            sys.stdout, sys.stderr = ForwardedStream(self.send, sys.stdout), ForwardedStream(self.send, sys.stderr)
        with self._meeting_first():  # here conftest.py of folders further down are imported
            self._collector = upstream.collector_of(self._session, plan.path)
        upstream.stop_capturing(self._config)

    def run(self, plan: wire.TestPlan) -> wire.Ended:
        """Run a test."""
        self._plan = plan
        self.send({"event": wire.CAPTURED, "paths": [str(path) for path in self._captured]})
        self.strategy = plan.strategy
        self.cluster = host_session.HostCluster(self._context.topology, self._context.host, plan.shared)
        try:
            item = self._item(plan.nodeid)
            # Earlier tests left this set up, because the next test was unknown.
            last = self._last
            if last is not None:
                self._tear_down(last, item)
            self.send({"event": wire.READY})
            host_session.seed_everything(plan.seed)
            self._has_failed = self._failed_in_tensorflow = False
            with self._measuring.during(plan.nodeid):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=self._following(plan, item))
            if not self._has_failed:  # else the others are ended, and need not say whom they miss
                self.cluster.say_done()
            self._last = item
        except pytest.exit.Exception as leave:
            return self._leave(str(leave.msg), leave.returncode)
        except KeyboardInterrupt:  # raised by the test: hosts get no Ctrl-C
            return self._leave("KeyboardInterrupt", pytest.ExitCode.INTERRUPTED)
        finally:
            upstream.stop_capturing(self._config)
        return wire.Ended(stop=str(self._session.shouldstop or ""), failed_in_tensorflow=self._failed_in_tensorflow)

    def _leave(self, reason: str, code: int | None) -> wire.Ended:
        """End the whole run, together with the other hosts."""
        self.send({"event": wire.LEAVING})
        return wire.Ended(exit_reason=reason, exit_code=code)

    def _item(self, nodeid: str) -> pytest.Item:
        for item in self._items():
            if item.nodeid == nodeid:
                return item
        raise UsageError(
            f"Every host finds the tests that pytest itself found. Received: {nodeid}, which is not among the tests of "
            f"{self._collector.path} on {self.cluster.name}. Parametrize and name tests in the same way in every process."
        )

    def _items(self) -> list[pytest.Item]:
        if self._found is None:
            self._find_each_other()
            self._found = upstream.items_of(self._session, self._collector)
            upstream.stop_capturing(self._config)
        return self._found

    def _find_each_other(self) -> None:
        # TensorFlow wants that before its runtime is up, and the module of a test may start it.
        if self._context.topology.num_stepping_hosts > 1:
            import gpudist_core

            gpudist_core.make_strategy()
            keep_meeting()

    def _meeting_first(self) -> contextlib.AbstractContextManager[None]:
        """Let the hosts find each other before conftest.py makes a tensor, which starts TensorFlow's runtime."""
        return before_runtime(self._find_each_other)

    def _tear_down(self, last: pytest.Item, keep: pytest.Item | None) -> None:
        report = upstream.tear_down(last, keep)
        if report is not None:
            self.pytest_runtest_logreport(report)

    def _following(self, plan: wire.TestPlan, item: pytest.Item) -> Any:
        """Return the next test; where it is not known, a stand-in for pytest, so that what it needs stays set up."""
        if plan.is_last:
            return None
        chain = item.listchain()[:-1]
        stand_in = SimpleNamespace(nodeid=chain[-1].nodeid, listchain=lambda: chain)
        return next((test for test in self._items() if test.nodeid == plan.next_nodeid), stand_in)

    def finish(self) -> None:
        """Tear everything down and end the session."""
        if self._last is not None:
            self._tear_down(self._last, None)
        upstream.end_session(self._session)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell the controller."""
        if upstream.subtest_name(report) is None:
            self._has_failed |= has_raised(report)
        if report.failed and self._last is not None and host_session.LATE_SETTING.search(report.longreprtext):
            report.sections.append(("gpudist", host_session.ABOUT_LATE_SETTING))
        self._context.send(wire.dump_report(self._config, report))

    def send(self, event: dict[str, Any]) -> None:
        """Tell the controller something else."""
        self._context.send(event)

    def _begin_own_part(self, item: pytest.Item) -> None:
        """Have what the test's own fixtures and its body change undone, before fixtures of wider scope are torn down."""
        if self._reset is None:
            assert self._plan is not None
            self._reset = Reset()
            item.addfinalizer(self._end_own_part)  # the first, so that it is called after all others
            # Again: what a fixture of wider scope drew depends on which test came first.
            host_session.seed_everything(self._plan.seed)

    def _end_own_part(self) -> None:
        current = os.environ["PYTEST_CURRENT_TEST"]  # of pytest, and of this phase
        reset, self._reset = self._reset, None
        assert reset is not None
        reset.undo()
        os.environ["PYTEST_CURRENT_TEST"] = current

    def logical_devices(self) -> list[Any]:
        self._find_each_other()  # to list them starts TensorFlow's runtime
        return super().logical_devices()

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool:
        """Leave the time limit to the controller, which watches all hosts at once."""
        self.send({"event": wire.LIMIT, "seconds": settings.timeout})
        return True

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        """Tell the controller."""
        if when == "runtest":
            self.send(wire.dump_warning(warning_message, when, nodeid, location))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Refuse a file that cannot be collected here."""
        if report.failed:
            raise UsageError(f"Every host must be able to collect what pytest itself collected. Received:\n{report.longrepr}")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Leave alone what a fixture of wider scope changes, although the test's own part has begun (`getfixturevalue`)."""
        __tracebackhide__ = True
        if fixturedef.scope == "function":
            self._begin_own_part(request.node)
        elif self._reset is not None:
            with self._reset.keeping():
                return (yield)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Begin the test's own part, if no fixture has."""
        self._begin_own_part(item)

    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        """Note whether TensorFlow raised an exception, or one that led to it."""
        error = call.excinfo.value if call.excinfo is not None else None
        while error is not None:
            self._failed_in_tensorflow |= type(error).__module__.startswith("tensorflow.")
            error = error.__cause__ or error.__context__


class ForwardedStream(io.TextIOBase):
    """Forward what is written to a stream to the controller, line by line.

    Args:
        send: Sends an event.
        stream: Where it is written besides.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], stream: TextIO | None = None) -> None:
        self._send = send
        self._stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        done, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._send({"event": wire.OUTPUT, "text": done})
        if self._stream is not None:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()


class _Terminal:
    """Receive what pytest writes if there is no terminal: --setup-show, live logs."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._told = ForwardedStream(send)
        self._tw = upstream.terminal_writer(self._told)
        self.verbosity = 0

    def write(self, content: str, **_: Any) -> None:
        """Write text as it is."""
        self._told.write(content)

    def section(self, title: str, **_: Any) -> None:
        """Write a heading."""
        self._told.write(f"{title}\n")

    def flush(self) -> None:
        """Do nothing: no text is held back."""
