"""A failure names its host and says what the others did; the next test runs on a healthy cluster."""

from __future__ import annotations

import pytest

from tests.acceptance.plugin.conftest import Run

FAILURES = """
import os
import signal
import time

import pytest


@pytest.mark.topology("2x1")
def test_one_host(strategy, cluster):
    print("said by", cluster.host)
    expected = {"loss": 0}
    if cluster.host == 1:
        assert {"loss": cluster.host} == expected
    cluster.barrier()


@pytest.mark.topology("2x1")
def test_next_is_healthy(strategy, cluster):
    assert cluster.gather(cluster.host) == [0, 1]


@pytest.mark.topology("2x1")
def test_all_hosts(cluster, devices):
    assert sorted([3, 1]) == [1, 2]


@pytest.mark.topology("2x1")
def test_each_otherwise(cluster, devices):
    if cluster.host == 0:
        raise ValueError("one thing")
    raise KeyError("another")


@pytest.fixture
def breaks(cluster):
    if cluster.host == 1:
        raise RuntimeError("setup breaks")
    yield


@pytest.mark.topology("2x1")
def test_setup(devices, breaks): pass


@pytest.fixture
def breaks_late(cluster):
    yield
    if cluster.host == 1:
        raise RuntimeError("teardown breaks")


@pytest.mark.topology("2x1")
def test_teardown(devices, breaks_late): pass


@pytest.mark.topology("2x1")
def test_disagree(devices, cluster):
    if cluster.host == 0:
        pytest.skip("only here")


@pytest.mark.topology("2x1")
@pytest.mark.xfail(raises=ValueError, reason="known")
def test_expected(devices, cluster):
    if cluster.host == 0:
        raise ValueError
    cluster.barrier()


@pytest.mark.topology("2x1")
def test_killed(devices, cluster):
    print("last words")
    if cluster.host == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    cluster.barrier()


@pytest.mark.topology("2x1", deadline=2)
def test_hangs(devices):
    while True:
        time.sleep(0.1)


@pytest.mark.topology("2x1")
def test_left(devices, cluster):
    if cluster.host == 0:
        os._exit(7)
    cluster.barrier()


@pytest.mark.topology("1x2")
def test_debugger(devices):
    breakpoint()


def test_no_mark(strategy): pass


@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.topology("1x2"))])
def test_mark_of_a_parameter(x): pass


@pytest.mark.topology("1x2")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.topology("2x1"))])
def test_mark_of_a_parameter_beside(x, strategy): pass


@pytest.mark.topology("1x2")
def test_program_on_hosts(strategy, gpudist): pass


@pytest.mark.topology("2x1")
def test_still_healthy(strategy, cluster):
    assert cluster.gather(cluster.host) == [0, 1]
"""


def test_a_failure_names_its_host_and_says_what_the_others_did(run: Run) -> None:
    result = run(FAILURES)
    text = result.stdout.str()
    result.assert_outcomes(passed=3, failed=8, errors=6, xfailed=1)
    for expected in (
        "test_one_host[2x1] on host 1 ___",
        'assert {"loss": cluster.host} == expected',
        "AssertionError: assert {'loss': 1} == {'loss': 0}",
        "host 0 did not finish running the test; it was ended inside",
        "test_all_hosts[2x1] on all 2 hosts ___",
        "otherwise ---",
        "ERROR at setup of test_setup[2x1] on host 1 ___",
        "ERROR at teardown of test_teardown[2x1] on host 1 ___",
        "Received: skipped (only here) on host 0, passed on host 1. Skip, or expect a failure, on every host.",
        "The host was killed by signal 9 (SIGKILL) while running the test.",
        "last words",
        "The host did not finish running the test within 2 s; it was in",
        "The host's process left with exit code 7 while running the test.",
        "A debugger needs a terminal, and a host has none.",
        "A test that asks for strategy, cluster, topology or devices names its topologies. Received: test_it.py::test_no_mark",
        "Received: one on test_it.py::test_mark_of_a_parameter[1]",
        "Received: one on test_it.py::test_mark_of_a_parameter_beside[1x2-1]",
        "`gpudist` verifies programs outside of the hosts.",
        "FAILED test_it.py::test_one_host[2x1] - host 1: AssertionError: assert {'loss'",
        "FAILED test_it.py::test_all_hosts[2x1] - all 2 hosts: assert [1, 3] == [1, 2]",
        "FAILED test_it.py::test_killed[2x1] - host 1: The host was killed by signal 9",
    ):
        assert expected in text, expected
    assert text.count("assert sorted([3, 1]) == [1, 2]") == 1  # the same on all hosts: shown once
    assert "_pytest/" not in text
    assert "said by 0" in text
    assert "said by 1" in text


LEFT_ALONE = """
import pytest
import tensorflow as tf


@pytest.mark.topology("2x1")
def test_one_more_sum(strategy, cluster):
    def total():
        return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
    strategy.run(total)
    if cluster.host == 1:
        strategy.run(total)


@pytest.mark.topology("2x1")
def test_skipped_on_one(strategy, cluster):
    if cluster.host == 1:
        pytest.skip("not here")
    cluster.barrier()


@pytest.mark.topology("2x1")
def test_still_healthy(strategy, cluster):
    assert cluster.gather(cluster.host) == [0, 1]
"""


def test_a_host_that_waits_for_one_that_is_done_fails_long_before_its_deadline(run: Run) -> None:
    result = run(LEFT_ALONE, "--gpudist-deadline=100", "--gpudist-patience=3")
    result.assert_outcomes(failed=2, passed=1)
    assert result.duration < 90
    result.stdout.fnmatch_lines(
        [
            "*test_one_more_sum[[]2x1[]] on host 1*",
            "The host has done nothing for 3 s while running the test: it waits for host 0, done with the test already, in",
            "*strategy.run(total)*",
            "Every host of a test runs the same collectives, in no branch that some do not take.",
            "*host 0 passed*",
            "*Every host of a test calls gather and barrier equally often. Received: call 1 on host 0, and host 1 is done *",
            "*host 1 skipped (not here)*",
        ]
    )


EXITS = """
import pytest


@pytest.mark.topology("2x1")
def test_leaves_on_one_host(strategy, cluster):
    if cluster.host == 1:
        EXIT
    cluster.barrier()


@pytest.mark.topology("2x1")
def test_is_not_reached(strategy): pass
"""


@pytest.mark.parametrize(
    ("exit_", "reason", "code"),
    [
        pytest.param("pytest.exit('enough', 7)", "enough", 7, id="pytest.exit"),
        pytest.param("raise KeyboardInterrupt", "KeyboardInterrupt", 2, id="KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_ends_the_run_ends_the_others_too(run: Run, exit_: str, reason: str, code: int) -> None:
    result = run(EXITS.replace("EXIT", exit_), "--gpudist-deadline=250", "-o", "gpudist_patience=200")
    assert result.ret == code
    result.stdout.fnmatch_lines([f"*Exit: {reason} (host 1 of test_it.py::test_leaves_on_one_host[[]2x1[]])*"])
    result.assert_outcomes()


@pytest.mark.parametrize("folder", [pytest.param(".", marks=pytest.mark.slow), "unit/gpu"])
def test_a_tensor_that_conftest_makes_does_not_come_before_hosts_find_each_other(
    run: Run, suite: pytest.Pytester, folder: str
) -> None:
    where = suite.path / folder  # pytest imports the conftest.py of folders further down later
    where.mkdir(parents=True, exist_ok=True)
    (where / "conftest.py").write_text("import tensorflow as tf\n\nMEAN = tf.constant([0.5])\n")
    run(
        """
import pytest
from conftest import MEAN


@pytest.mark.topology("2x1", "1x2")
def test_uses_it(strategy):
    assert MEAN.numpy() == 0.5 and strategy.num_replicas_in_sync == 2
""",
        name=f"{folder}/test_it.py",
    ).assert_outcomes(passed=2)
