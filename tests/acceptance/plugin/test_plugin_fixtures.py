"""The user's fixtures, of every scope, work in bodies that run on hosts, and what hosts record arrives."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.acceptance.plugin.conftest import Run

CONFTEST = """
import os
import pytest


@pytest.fixture(scope="session")
def session_pid():
    os.environ["OF_THE_SESSION"] = "1"
    yield os.getpid()
    del os.environ["OF_THE_SESSION"]
    print("the session is over")


@pytest.fixture(autouse=True)
def note(request):
    request.node.noted = True


def pytest_runtest_setup(item):
    if "refused" in item.keywords:
        pytest.skip("refused by conftest")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.sections.append(("from conftest", f"noted {getattr(item, 'noted', None)} in {call.when}"))
    return report
"""

TESTS = """
import os
import sys
import warnings

import pytest

pids = []


@pytest.fixture(scope="module")
def module_list():
    made = []
    yield made
    assert made == [1, 2], made


@pytest.fixture(scope="class")
def class_list():
    return []


@pytest.fixture
def changed(monkeypatch, tmp_path):
    monkeypatch.setenv("CHANGED", "yes")
    monkeypatch.chdir(tmp_path)


@pytest.mark.topology("2x1")
@pytest.mark.parametrize("number", [1, 2])
def test_scopes(cluster, strategy, session_pid, module_list, changed, number, tmp_path, capsys, record_property):
    assert session_pid == os.getpid()
    assert os.environ["OF_THE_SESSION"] == "1"
    assert os.environ["CHANGED"] == "yes"
    assert os.getcwd() == str(tmp_path)
    module_list.append(number)
    pids.append(os.getpid())
    assert len(pids) == number  # the module lives as long as its host
    assert len(set(cluster.gather(str(tmp_path)))) == 2
    assert len(set(cluster.gather(os.getpid()))) == 2
    print("said")
    assert capsys.readouterr().out == "said\\n"
    record_property("number", number)
    record_property("host", cluster.host)


@pytest.mark.topology("2x1")
def test_nothing_is_left_of_functions(session_pid, request):
    assert "CHANGED" not in os.environ
    assert os.environ["OF_THE_SESSION"] == "1"
    assert os.getcwd() == str(request.config.invocation_params.dir)


@pytest.mark.topology("2x1")
def test_hosts_share_a_folder_and_meet(strategy, cluster, shared_path, tmp_path):
    (shared_path / f"{cluster.host}").write_text("here")
    cluster.barrier()
    assert sorted(os.listdir(shared_path)) == ["0", "1"]
    assert cluster.gather({"host": cluster.host}) == [{"host": 0}, {"host": 1}]
    assert (cluster.num_hosts, str(cluster.topology)) == (2, "2x1")
    with pytest.raises(ValueError, match="Its body runs on every host already"):
        cluster.run(print)


@pytest.mark.topology("1x2")
class TestClass:
    def test_one(self, class_list, devices):
        class_list.append(len(devices))

    def test_two(self, class_list, worker_id):
        assert class_list == [2]
        assert worker_id == "master-1x2-host0"


@pytest.mark.topology("1x2")
def test_a_fixture_of_the_users_own_is_not_replaced(strategy):
    assert strategy == "mine"


@pytest.fixture
def strategy(request):
    return "mine" if "own" in request.node.name else request.getfixturevalue("topology")


@pytest.mark.topology("2x1")
@pytest.mark.filterwarnings("default")
def test_warns():
    warnings.warn("told once", UserWarning)


@pytest.mark.refused
@pytest.mark.topology("2x1")
def test_hooks_of_conftest_are_asked_on_hosts(): pass


@pytest.mark.skip(reason="not now")
@pytest.mark.topology("2x1")
def test_skipped(): pass


@pytest.mark.topology("2x1")
def test_speaks(cluster, devices):
    print("on stdout of", cluster.host)
    os.write(2, b"on stderr of all\\n")
    assert False
"""


_UNKNOWN_MARK = ("-W", "ignore::pytest.PytestUnknownMarkWarning")


def test_fixtures_of_every_scope_work_on_hosts(run: Run, suite: pytest.Pytester) -> None:
    suite.makeconftest(CONFTEST)
    result = run(
        TESTS,
        "--junitxml=junit.xml",
        "--html=report.html",
        "--self-contained-html",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
    )
    result.assert_outcomes(passed=8, skipped=2, failed=1, warnings=1)
    text = result.stdout.str()
    for line in (
        "Captured stdout call on host 0",
        "on stdout of 1",
        "Captured stderr call on all 2 hosts",
        "noted True in call",
        "refused by conftest",
        "FAILED test_it.py::test_speaks[2x1] - all 2 hosts: assert False",
    ):
        assert line in text
    assert text.count("warnings.warn(") == 1
    cases = {case.get("name"): case for case in ET.parse(Path(suite.path) / "junit.xml").getroot().iter("testcase")}
    properties = {one.get("name"): one.get("value") for one in cases["test_scopes[2x1-2]"].iter("property")}
    assert properties == {
        "number": "2",
        "host (host 0)": "0",
        "host (host 1)": "1",
        "gpudist_topology": "2x1",
        "gpudist_device": "emulated",
        "gpudist_verdict": "passed",
    }
    assert "2x1, emulated, failed" in (Path(suite.path) / "report.html").read_text()
