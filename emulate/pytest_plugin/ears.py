"""Forward what a host's pytest reports and writes to the controller."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from emulate.errors import UsageError
from emulate.pytest_plugin import upstream
from emulate.pytest_plugin.wire import LIMIT, OUTPUT, dump_warning

if TYPE_CHECKING:
    from emulate.pytest_plugin.host import Host


def listen(config: pytest.Config, host: Host) -> None:
    """Have a host hear what its pytest does.

    Args:
        config: Of the host's pytest.
        host: What is told.
    """
    config.pluginmanager.register(_Ears(host), "gpudist-host")
    shows_setup = any(config.getoption(name, False) for name in ("setupshow", "setuponly", "setupplan"))
    if shows_setup or pytest.version_tuple < (9,):  # whose failed assertions ask the terminal for colours
        config.pluginmanager.register(_Terminal(host.send), "terminalreporter")
    else:
        config.get_terminal_writer = lambda: upstream.terminal_writer(io.StringIO())  # type: ignore[method-assign]


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
            self._send({"event": OUTPUT, "text": done})
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


class _Ears:
    """Observe, in the host's pytest, what the controller must know."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._host.send_report(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool:
        """Leave the time limit to the controller, which watches all hosts at once."""
        self._host.send({"event": LIMIT, "seconds": settings.timeout})
        return True

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if when == "runtest":
            self._host.send(dump_warning(warning_message, when, nodeid, location))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            raise UsageError(f"Every host must be able to collect what pytest itself collected. Received:\n{report.longrepr}")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        __tracebackhide__ = True
        if fixturedef.scope == "function":
            self._host.own_part_begins(request.node)
            return (yield)
        with self._host.keeping():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._host.own_part_begins(item)

    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None:
            self._host.has_raised(call.excinfo.value)
