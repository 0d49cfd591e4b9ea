"""With --gpudist-in-process a test of one host runs in pytest's own process, where a debugger works."""

from __future__ import annotations

import sys

import pytest

from tests.acceptance.plugin.conftest import Run

CONFTEST = """
import os

os.environ.setdefault("FIRST_PID", str(os.getpid()))  # hosts inherit it
"""
TESTS = """
import os
import random
import unittest

import pytest
import tensorflow as tf


def is_here():
    return os.environ["FIRST_PID"] == str(os.getpid())


@pytest.mark.topology("1x2")
def test_trains(strategy, devices, cluster, shared_path):
    assert is_here() and random.random() == random.Random(0).random()
    total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([])))
    assert [float(one) for one in strategy.experimental_local_results(total)] == [2.0, 2.0]
    assert (len(devices), cluster.num_hosts, cluster.gather(3)) == (2, 1, [3])
    assert shared_path.is_dir()
    answer = 42
    breakpoint()


@pytest.mark.topology("1x2")
class TestOfUnittest(unittest.TestCase):
    def test_it(self):
        assert is_here() and self.strategy.num_replicas_in_sync == len(self.devices) == 2


@pytest.mark.topology("1x4")
def test_another_topology(strategy): pass


@pytest.mark.topology("2x1")
def test_several_hosts(strategy):
    assert not is_here()
"""


def test_a_test_of_one_host_runs_in_the_process_of_pytest_where_breakpoint_works(run: Run, suite: pytest.Pytester) -> None:
    suite.makeconftest(CONFTEST)
    suite.makepyfile(test_it=TESTS)
    command = (sys.executable, "-m", "pytest", "-ra", "--gpudist-in-process")
    result = suite.run(*command, timeout=300, stdin=b"p f'the answer is {answer}'\nc\n")
    result.assert_outcomes(passed=3, errors=1)
    text = result.stdout.str()
    assert "the answer is 42" in text
    assert (
        "With --gpudist-in-process all tests of one host need the same topology. "
        "Received: topology='1x4', after tests on '1x2'. Choose tests: -k 1x4."
    ) in text
    result.stdout.fnmatch_lines(["gpudist: * ran on emulated devices (1x2: 2*2x1: 1*"])
