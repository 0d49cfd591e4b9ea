"""What hosts report becomes one report, whatever each of them did; and what the plugin rests on is still there."""

from __future__ import annotations

import inspect
import json
import time
from typing import Any

import pytest
from _pytest import capture, runner, unittest
from _pytest.config import Config
from absl.testing import parameterized

from emulate.cluster import HostResult
from emulate.devices import take_name
from emulate.pytest_plugin import upstream
from emulate.pytest_plugin.clusters import Turns
from emulate.pytest_plugin.merge import HostRun, merge, verdict_of
from emulate.pytest_plugin.wire import dump_report, load_report


def report(item: pytest.Item, when: str, outcome: str = "passed", text: str = "", **more: Any) -> pytest.TestReport:
    longrepr: Any = upstream.failure(text, "test_it.py", 3, text) if outcome == "failed" else None
    if outcome == "skipped":
        longrepr = ("test_it.py", 3, f"Skipped: {text}")
    made = pytest.TestReport(item.nodeid, item.location, {}, outcome, longrepr, when, stop=time.time())  # type: ignore[arg-type]
    made.__dict__.update(more)
    return made


def host(number: int, *reports: pytest.TestReport, status: str = "returned", **result: Any) -> HostRun:
    return HostRun(number, f"host {number}", list(reports), HostResult(number, status, **result))


@pytest.fixture
def item(request: pytest.FixtureRequest) -> pytest.Item:
    node: pytest.Item = request.node
    return node


def phases(item: pytest.Item, *call: tuple[str, str]) -> list[HostRun]:
    """Hosts whose call had these outcomes and texts."""
    return [
        host(number, report(item, "setup"), report(item, "call", outcome, text), report(item, "teardown"))
        for number, (outcome, text) in enumerate(call)
    ]


def test_hosts_that_pass_are_a_test_that_passes(item: pytest.Item) -> None:
    reports = merge(item, phases(item, ("passed", ""), ("passed", "")), 9, 10)
    assert [(one.when, one.outcome) for one in reports] == [("setup", "passed"), ("call", "passed"), ("teardown", "passed")]
    assert verdict_of(reports) == "passed"


def test_the_same_failure_is_told_once_whatever_addresses_it_names(item: pytest.Item) -> None:
    reports = merge(item, phases(item, ("failed", "<a at 0x1>"), ("failed", "<a at 0x2>"), ("failed", "other")), 9, 10)
    text = str(reports[1].longrepr)
    assert reports[1].longrepr.reprcrash.message == "hosts 0 and 1: <a at 0x1>"  # type: ignore[union-attr]
    assert "0x2" not in text
    assert "host 2, otherwise" in text
    assert reports[1].location[2].endswith("on hosts 0 and 1")


def test_who_left_by_itself_is_told_before_who_failed_because_of_that(item: pytest.Item) -> None:
    runs = phases(item, ("failed", "Connection reset by peer"))
    runs.append(host(1, report(item, "setup"), status="killed", code=-9))
    reports = merge(item, runs, 9, 10)
    assert reports[1].longrepr.reprcrash.message == "host 1: The host was killed by signal 9 (SIGKILL) while running the test."  # type: ignore[union-attr]
    assert "Connection reset by peer" in str(reports[1].longrepr)
    assert [one.outcome for one in reports] == ["passed", "failed", "passed"]


def test_who_was_ended_because_of_another_is_no_failure_of_its_own(item: pytest.Item) -> None:
    stack = '  File "/lib/_pytest/runner.py", line 1, in call\n  File "test_it.py", line 4, in test_one\n    wait()'
    runs = [*phases(item, ("failed", "cause")), host(1, status="ended", stack=stack)]
    reports = merge(item, runs, 9, 10)
    assert [one.outcome for one in reports] == ["passed", "failed", "passed"]
    assert "host 1 did not finish setting the test up; it was ended inside\n" in str(reports[1].longrepr)
    assert "_pytest" not in str(reports[1].longrepr)


def test_who_waited_for_an_expected_failure_does_not_make_it_unexpected(item: pytest.Item) -> None:
    expected = [report(item, "setup"), report(item, "call", "skipped", "", wasxfail="known"), report(item, "teardown")]
    reports = merge(item, [host(0, *expected), host(1, report(item, "setup"), status="ended")], 9, 10)
    assert [one.outcome for one in reports] == ["passed", "skipped", "passed"]
    assert reports[1].wasxfail == "known"  # type: ignore[attr-defined]


def test_hosts_that_disagree_are_a_failure_that_says_so(item: pytest.Item) -> None:
    reports = merge(item, phases(item, ("skipped", "why"), ("passed", "")), 9, 10)
    assert "Received: skipped (why) on host 0, passed on host 1." in str(reports[1].longrepr)


def test_hosts_that_ran_out_of_time_are_told_with_their_stacks(item: pytest.Item) -> None:
    runs = [host(number, report(item, "setup"), status="timeout", stack='  File "a.py", line 1, in f') for number in (0, 1)]
    text = str(merge(item, runs, 7, 10)[1].longrepr)
    assert text.count("The host did not finish running the test within 7 s; it was in") == 1
    assert 'File "a.py"' in text


def test_a_setup_that_failed_has_no_call(item: pytest.Item) -> None:
    runs = [host(0, report(item, "setup", "failed", "no"), report(item, "teardown")), *phases(item, ("passed", ""))]
    runs[1].name = "host 1"
    assert [(one.when, one.outcome) for one in merge(item, runs, 9, 10)] == [("setup", "failed"), ("teardown", "passed")]


def test_a_report_arrives_as_it_was_sent(item: pytest.Item) -> None:
    sent = report(item, "call", "skipped", "why", sections=[("title", "text")], user_properties=[("a", object)])
    event = json.loads(json.dumps(dump_report(item.config, sent)))
    received = load_report(item.config, event)
    assert (received.longrepr, received.sections, received.location) == (sent.longrepr, sent.sections, sent.location)
    assert received.user_properties == [("a", repr(object))]


def test_only_so_many_clusters_work_at_once() -> None:
    first, second = (Turns("run-of-a-test", 1) for _ in range(2))
    with first.one(), first.one():  # one that has a turn needs no second
        assert first._held is not None
        assert take_name(second._names[0]) is None
    with second.one():
        assert second._held is not None


def test_what_the_plugin_takes_from_pytest_and_absl_is_there() -> None:
    assert list(inspect.signature(Config.fromdictargs).parameters) == ["option_dict", "args"]
    assert callable(Config._do_configure)
    assert callable(Config._ensure_unconfigure)
    assert hasattr(capture, "TemporaryFile")
    assert callable(capture.CaptureManager.suspend_global_capture)
    assert list(inspect.signature(runner.SetupState.teardown_exact).parameters) == ["self", "nextitem"]
    assert "genitems" in inspect.signature(pytest.Session.perform_collect).parameters
    assert callable(unittest.TestCaseFunction._getinstance)
    assert callable(unittest.TestCaseFunction._getobj)
    assert callable(parameterized._ParameterizedTestIter.__iter__)


def test_a_test_that_hung_took_as_long_as_it_did(item: pytest.Item) -> None:
    hung = host(0, report(item, "setup", stop=time.time() - 7), status="timeout")
    call = merge(item, [hung], 5, 5, started=time.time() - 8)[1]
    assert call.failed
    assert call.duration >= 7


def test_a_test_that_hung_on_one_host_took_as_long_as_it_did_there(item: pytest.Item) -> None:
    early = time.time() - 7
    runs = [
        host(0, report(item, "setup", stop=early), report(item, "call", start=early, stop=early), report(item, "teardown")),
        host(1, report(item, "setup", stop=early), status="timeout"),
    ]
    call = merge(item, runs, 5, 5, started=early - 1)[1]
    assert call.failed
    assert call.duration >= 7


def test_of_a_dump_of_pythons_own_the_head_is_shown(item: pytest.Item) -> None:
    dump = ["Fatal Python error: Segmentation fault", "", "Current thread 0x1 (most recent call first):"]
    dump += ['  File "/home/me/test_it.py", line 3 in test_it', '  File "/x/_pytest/python.py", line 1 in runtest']
    dump += [f'  File "/x/emulate/pool/{k}.py", line 1 in run' for k in range(30)] + ["Extension modules: a, b"]
    killed = host(0, report(item, "setup"), status="killed", code=-11, output="before\n" + "\n".join(dump))
    text = str(merge(item, [killed], 5, 5)[1].longrepr)
    assert "Segmentation fault" in text
    assert "test_it.py" in text
    assert not any(word in text for word in ("before", "_pytest", "emulate", "Extension"))
