"""Tests on hosts among tests beside them: subtests, fixtures of both, marks with a name, runs that only set up."""

from __future__ import annotations

import pytest

from tests.acceptance.plugin.conftest import Run

SUBTESTS = """
import unittest

import pytest


@pytest.mark.topology("2x1")
class TestParts(unittest.TestCase):
    def test_parts(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)


@pytest.mark.topology("2x1")
def test_one_host(subtests, strategy, cluster):
    with subtests.test("a"):
        assert cluster.host == 0
    with subtests.test("b"):
        pytest.skip("not today")
    with subtests.test("c"):
        pytest.xfail("known")
    assert cluster.gather(cluster.host) == [0, 1]


@pytest.mark.topology("1x2")
def test_all_pass(subtests, strategy):
    for i in range(2):
        with subtests.test(i=i):
            assert strategy.num_replicas_in_sync == 2
"""


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has subtests of its own since 9")
def test_a_failed_subtest_fails_its_test_and_names_its_hosts(run: Run) -> None:
    result = run(SUBTESTS)
    result.assert_outcomes(passed=1, failed=4)  # pytest tells of a skipped subtest with -v alone
    result.stdout.fnmatch_lines(
        [
            "*test_parts?2x1? on all 2 hosts (i=*",
            "*contains 1 failed subtest",
            "*test_one_host?2x1? on host 1 ?a?*",
            "*passed on host 0",
            "FAILED test_it.py::test_one_host?2x1? - contains 1 failed subtest",
        ]
    )
    result.stdout.no_fnmatch_line("*replaced, because*")


MIXED = """
import pytest

log = []
everywhere = pytest.mark.topology("1x2")
pytestmark = []


@pytest.fixture(scope="module")
def thing():
    log.append("up")
    yield
    log.append("down")
    raise RuntimeError("teardown of thing")


class TestA:
    def test_plain(self, thing): pass

    @everywhere
    def test_hosts(self, strategy): pass


class TestB:
    @everywhere
    def test_hosts(self, strategy): pass

    def test_plain(self): assert log == ["up"]
"""
OTHER = """
import pytest

pytestmark = both = pytest.mark.topology("1x2")


def test_hosts(strategy): pass


def test_next(strategy): pass
"""


def test_fixtures_beside_the_hosts_end_with_the_last_test_that_needs_them(run: Run) -> None:
    run(MIXED, "--collect-only", name="test_a.py")
    result = run(OTHER + "\n\ndef test_failing(strategy): assert 0\n", name="test_b.py")
    result.assert_outcomes(passed=6, failed=1, errors=1)
    result.stdout.fnmatch_lines(["E*RuntimeError: teardown of thing", "ERROR test_a.py::TestB::test_plain - *"])
    only = run("", "--setup-only", "test_b.py")
    only.assert_outcomes()
    only.stdout.fnmatch_lines(["*SETUP*F strategy*", "gpudist: 0 tests ran*"])


def test_a_mark_with_a_name_like_a_tests_is_refused(run: Run) -> None:
    result = run("import pytest\ntest_everywhere = pytest.mark.topology('1x2')\n", "-W", "ignore")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["A mark stands on a test. Received: test_it.py::test_everywhere, which is only the mark: *"])


HANGS = """
import pytest


@pytest.mark.topology("1x2", deadline=3)
def test_hangs(gpudist):
    verdict = gpudist.verify(lambda: __import__("time").sleep(600))
    assert verdict.runs[0].verdict == "hung"
"""


def test_the_deadline_of_a_mark_holds_for_the_programs_that_its_test_verifies(run: Run) -> None:
    run(HANGS, "-W", "ignore").assert_outcomes(passed=1)  # with the run's own 300 s pytester would end it
