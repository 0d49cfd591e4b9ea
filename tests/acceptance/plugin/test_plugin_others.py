"""Other plugins of pytest beside ours: what they do to tests on hosts, and what they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.acceptance.plugin.conftest import Run

REPEATS = """
from _pytest.runner import runtestprotocol


def pytest_configure(config):
    config.addinivalue_line("markers", "flaky(reruns): run it again")
    if hasattr(config, "workerinput"):
        config.workerinput["sock_port"]


def pytest_runtest_protocol(item, nextitem):
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.failed:
            report.outcome = "rerun"
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""

FAILING = """
import pytest


@pytest.mark.flaky(reruns=1)
@pytest.mark.topology("2x1")
def test_host(strategy, cluster):
    assert cluster.host == 0
"""


def test_a_plugin_that_repeats_failed_tests_does_not_hide_that_one_failed_on_hosts(run: Run, suite: pytest.Pytester) -> None:
    (Path(suite.path) / "rerunfailures.py").write_text(REPEATS)  # under the name of pytest-rerunfailures, and as it does
    result = run(FAILING, "-p", "rerunfailures", "--strict-markers")
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_host?2x1? on host 1*", "FAILED test_it.py::test_host?2x1? - host 1: assert 1 == 0"])


def test_an_outcome_that_pytest_does_not_know_is_no_success(run: Run, suite: pytest.Pytester) -> None:
    (Path(suite.path) / "another.py").write_text(REPEATS.replace('config.workerinput["sock_port"]', "pass"))
    result = run(FAILING.replace("cluster.host == 0", "False"), "-p", "another")
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*must agree on what becomes of it: passed, skipped or failed. Received: rerun on all 2 hosts.*"]
    )


@pytest.mark.parametrize(
    "options", [pytest.param([], id="one process"), pytest.param(["-n", "1"], id="a worker", marks=pytest.mark.slow)]
)
def test_what_plugins_tell_the_workers_of_xdist_reaches_hosts(run: Run, suite: pytest.Pytester, options: list[str]) -> None:
    suite.makeconftest(
        """
        def pytest_configure_node(node):
            node.workerinput["key"] = [1, 2]

        def pytest_configure(config):
            if hasattr(config, "workerinput"):
                assert config.workerinput["key"] == [1, 2]
        """
    )
    source = """
    import pytest

    @pytest.mark.topology("2x1")
    def test_hosts(strategy, request):
        assert request.config.workerinput["key"] == [1, 2]
        assert request.config.get_terminal_writer().fullwidth > 0
    """
    run("\n".join(line[4:] for line in source.splitlines()), "-p", "xdist", *options).assert_outcomes(passed=1)


def test_a_hook_for_workers_that_asks_for_more_than_hosts_have_is_named(run: Run, suite: pytest.Pytester) -> None:
    suite.makeconftest("def pytest_configure_node(node):\n    node.workerinput['ours'] = node.workermanager\n")
    result = run('import pytest\n\n@pytest.mark.topology("1x2")\ndef test_it(devices): pass\n', "-p", "xdist")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*pytest_configure_node gives what they need. Received: AttributeError: * Use node.config and node.workerinput alone*"]
    )


@pytest.mark.parametrize("option", ["timeout_func_only=false", pytest.param("timeout_func_only=true", marks=pytest.mark.slow)])
def test_the_limit_of_pytest_timeout_is_a_deadline_on_hosts(run: Run, option: str) -> None:
    source = """
import time

import pytest


@pytest.mark.timeout(3)
@pytest.mark.topology("2x1")
def test_long(strategy, cluster):
    if cluster.host:
        time.sleep(60)


@pytest.mark.timeout(120)
@pytest.mark.topology("2x1")
def test_next(strategy, cluster):
    assert cluster.gather(cluster.host) == [0, 1]
"""
    result = run(source, "-o", option)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*test_long?2x1? on host 1*", "The host did not finish running the test within 3 s; it was in", "*in test_long"]
    )


def test_devices_may_be_listed_before_the_strategy_is_made_by_hand(run: Run) -> None:
    source = """
import gpudist_core
import pytest


@pytest.mark.topology("2x1")
def test_first(devices):
    assert devices


@pytest.mark.topology("2x1")
def test_by_hand(devices):
    assert gpudist_core.make_strategy().num_replicas_in_sync == 2


@pytest.mark.topology("2x1")
def test_by_request(devices, request):
    assert request.getfixturevalue("strategy").num_replicas_in_sync == 2
"""
    run(source).assert_outcomes(passed=3)


def test_what_fails_at_the_end_of_a_session_on_hosts_is_told(run: Run, suite: pytest.Pytester) -> None:
    suite.makeconftest(
        """
        def pytest_sessionfinish(session, exitstatus):
            assert session.exitstatus == exitstatus
            if hasattr(session.config, "workerinput"):
                raise OSError("no place for the results")
        """
    )
    source = """
import pytest


@pytest.fixture(scope="session")
def kept():
    yield 1


@pytest.mark.topology("2x1")
def test_it(strategy, kept):
    assert kept == 1


def test_beside():
    pass
"""
    result = run(source)
    result.stdout.fnmatch_lines(["*The session of pytest on hosts of 2x1 did not end well:*", "*no place for the results*"])


def test_hypothesis_draws_the_same_examples_on_all_hosts(run: Run) -> None:
    source = """
import pytest
from hypothesis import HealthCheck, given, settings, strategies


@pytest.mark.topology("2x1")
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(number=strategies.integers(), text=strategies.text())
def test_examples(strategy, cluster, number, text):
    assert len(set(cluster.gather((number, text)))) == 1
"""
    run(source).assert_outcomes(passed=1)


MEASURED = """
import pytest


@pytest.mark.topology("2x1", "1x2")
def test_first(strategy, cluster):
    from measured import sign
    assert sign(cluster.host - 0.5) in (-1, 1)


@pytest.mark.topology("2x1")
def test_second(strategy, cluster):
    from measured import sign
    assert sign(0) == 0
"""

SIGN = """def sign(x):
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def nobody_calls():
    return 3
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="one process"),
        pytest.param(["-n", "1", "--cov-branch", "--cov-context=test"], id="a worker", marks=pytest.mark.slow),
    ],
)
def test_pytest_cov_measures_what_runs_on_hosts(run: Run, suite: pytest.Pytester, options: list[str]) -> None:
    """The first host returns the one number, the second the other, and a warm one runs the second test."""
    (Path(suite.path) / "measured.py").write_text(SIGN)
    result = run(MEASURED, "--cov=measured", "--cov-report=json", "--cov-report=term", *options)
    assert result.ret == 0
    found = json.loads((Path(suite.path) / "coverage.json").read_text())["files"]["measured.py"]
    assert (found["missing_lines"], len(found["executed_lines"])) == ([10], 7)
    assert sorted(path.name for path in Path(suite.path).glob(".coverage*")) == [".coverage"]


LIKE_SYRUPY = """
def pytest_addoption(parser):
    parser.addoption("--snapshot-disable-unused", action="store_true", dest="disable_unused_snapshots")


def pytest_sessionfinish(session):
    print("\\ndeletes what no test used:", not session.config.option.disable_unused_snapshots)
"""


def test_syrupy_does_not_take_what_tests_on_hosts_use_for_unused(run: Run, suite: pytest.Pytester) -> None:
    suite.makeconftest(LIKE_SYRUPY)
    beside = run("def test_it(): pass\n")
    beside.stdout.fnmatch_lines(["deletes what no test used: True"])
    on_hosts = run('import pytest\n\n@pytest.mark.topology("1x1")\ndef test_it(strategy): pass\n')
    on_hosts.stdout.fnmatch_lines(
        ["deletes what no test used: False", "gpudist: syrupy deletes and reports no unused snapshots in a run with tests on*"]
    )
