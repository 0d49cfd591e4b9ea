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


SET_UP = """
import logging
import os
import unittest

import keras
import pytest

pytestmark = pytest.mark.topology("1x2")


def setup_module():
    os.environ["OF_THE_MODULE"] = "1"
    keras.config.set_floatx("float64")


def teardown_module():
    del os.environ["OF_THE_MODULE"]
    keras.config.set_floatx("float32")


def module():
    return os.environ.get("OF_THE_MODULE"), keras.config.floatx()


def test_first(strategy): assert module() == ("1", "float64")
def test_second(strategy): assert module() == ("1", "float64")


class TestClass:
    @classmethod
    def setup_class(cls):
        cls.handler = logging.StreamHandler()
        logging.getLogger().addHandler(cls.handler)

    @classmethod
    def teardown_class(cls):
        logging.getLogger().removeHandler(cls.handler)

    def test_first(self, strategy): assert self.handler in logging.getLogger().handlers
    def test_second(self, strategy): assert self.handler in logging.getLogger().handlers and module() == ("1", "float64")


class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        keras.config.set_dtype_policy("mixed_bfloat16")

    @classmethod
    def tearDownClass(cls):
        keras.config.set_dtype_policy("float32")

    def test_first(self): self.assertEqual(keras.config.dtype_policy().name, "mixed_bfloat16")
    def test_second(self): self.assertEqual(keras.config.dtype_policy().name, "mixed_bfloat16")
"""

AFTER_SET_UP = """
import logging
import os

import keras
import pytest


@pytest.mark.topology("1x2")
def test_nothing_is_left(strategy):
    assert (os.environ.get("OF_THE_MODULE"), keras.config.floatx(), keras.config.dtype_policy().name) == (
        None, "float32", "float32"
    )
    assert not [one for one in logging.getLogger().handlers if type(one) is logging.StreamHandler]
"""


def test_what_a_module_or_class_sets_up_in_the_process_is_there_in_all_its_tests(run: Run, suite: pytest.Pytester) -> None:
    (Path(suite.path) / "test_later.py").write_text(AFTER_SET_UP)
    run(SET_UP).assert_outcomes(passed=7)


LEFT_BY_BODIES = """
import logging
import os
import threading
import warnings

import keras
import pytest


@pytest.fixture(scope="session")
def data():
    logging.getLogger("app").addHandler(logging.NullHandler())
    os.environ["OF_THE_SESSION"] = "1"
    return [1, 2]


@pytest.fixture(scope="class")
def table():
    os.environ["OF_THE_CLASS"] = "1"
    yield
    del os.environ["OF_THE_CLASS"]
    os.environ["AFTER_THE_CLASS"] = "1"


@pytest.fixture(autouse=True)
def own(monkeypatch):
    monkeypatch.setenv("OF_THE_TEST", "1")


def leave():
    keras.config.set_dtype_policy("mixed_bfloat16")
    os.environ["LEFT"] = "1"
    warnings.simplefilter("ignore")


def captured():
    return [type(one).__name__ for one in logging.getLogger().handlers].count("LogCaptureHandler")


def is_clean():
    policy, left = keras.config.dtype_policy().name, os.environ.get("LEFT")
    return (policy, left, os.environ["OF_THE_TEST"]) == ("float32", None, "1") and captured() == 2


class TestLeaves:
    @pytest.mark.topology("1x2", "2x1")
    def test_first(self, strategy, data, caplog):
        assert is_clean() and os.environ["OF_THE_SESSION"] == "1"
        logging.getLogger("app").warning("told")
        assert caplog.messages == ["told"]
        leave()

    @pytest.mark.topology("1x2", "2x1")
    def test_last_before_the_class_ends(self, strategy, data, table):
        assert is_clean() and (os.environ["OF_THE_SESSION"], os.environ["OF_THE_CLASS"]) == ("1", "1")
        assert len(logging.getLogger("app").handlers) == 1
        leave()


class TestFinds:
    @pytest.mark.topology("1x2", "2x1")
    def test_only_what_fixtures_left(self, strategy, data, caplog):
        assert is_clean() and os.environ["OF_THE_SESSION"] == os.environ["AFTER_THE_CLASS"] == "1"
        assert "OF_THE_CLASS" not in os.environ and "(call)" in os.environ["PYTEST_CURRENT_TEST"]
        with pytest.warns(UserWarning):
            warnings.warn("seen")
        logging.getLogger("app").warning("told")
        assert caplog.messages == ["told"]
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="captured"),
        pytest.param(["-s", "-o", "log_level=INFO"], id="shown", marks=pytest.mark.slow),
    ],
)
def test_what_a_body_leaves_goes_though_fixtures_of_wider_scope_begin_and_end_with_it(run: Run, options: list[str]) -> None:
    result = run(LEFT_BY_BODIES, "-v", *options)
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["gpudist: *, 0 replaced"])
