"""What the plugin is before any test runs: nothing heavy, options and marks that are checked, tests that are multiplied."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.plugin.conftest import Run

HEAVY = {"tensorflow", "keras", "numpy", "psutil", "cloudpickle", "rich", "typer"}


def test_the_entry_point_imports_nothing_heavy() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import emulate.pytest_plugin.entry\n"
        "new = {name for name in sys.modules if not name.startswith('emulate')} - before\n"
        f"print(sorted(new & {HEAVY!r}), sorted(new))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[] []\n"


def test_a_suite_without_topologies_loads_no_more_than_options_and_a_counter(run: Run) -> None:
    loaded = "sorted(name for name in sys.modules if name.startswith('emulate'))"
    Path("conftest.py").write_text(f"import sys\ndef pytest_unconfigure():\n    print('LOADED', {loaded})\n")
    result = run("def test_one(): pass\n")
    assert result.ret == 0
    loaded = next(line for line in result.outlines if line.startswith("LOADED"))
    for part in ("cluster", "pool", "verify", "controller", "host", "merge"):
        assert f"'emulate.{part}" not in loaded
        assert f"'emulate.pytest_plugin.{part}" not in loaded
    assert "gpudist" not in result.stdout.str().replace("plugins: ", "").replace(loaded, "").partition("collected")[2]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--gpudist-device=tpu", "--gpudist-device must be one of auto, cpu, gpu. Received: gpudist_device='tpu'."),
        ("--gpudist-deadline=-1", "--gpudist-deadline must be a positive number of seconds. Received: gpudist_deadline='-1'."),
        ("--gpudist-patience=0", "--gpudist-patience must be a positive number of seconds. Received: gpudist_patience='0'."),
        ("--gpudist-deadline=x", "--gpudist-deadline must be a positive number of seconds. Received: gpudist_deadline='x'."),
        ("--gpudist-pool-size=0", "--gpudist-pool-size must be a number of hosts, 1 or more. Received: gpudist_pool_size='0'."),
        ("--gpudist-seed=-1", "--gpudist-seed must be a whole number from 0 to 4294967295. Received: gpudist_seed='-1'."),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_by_its_name(suite: pytest.Pytester, argument: str, message: str) -> None:
    result = suite.runpytest_inprocess(argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str() + result.stdout.str()


@pytest.mark.parametrize(
    ("setting", "rule"),
    [("deadline=soon", "must be a positive number of seconds"), ("strict=maybe", "must be true or false")],
)
def test_an_ini_setting_that_cannot_be_meant_is_refused_by_its_name(suite: pytest.Pytester, setting: str, rule: str) -> None:
    result = suite.runpytest_inprocess("-o", f"gpudist_{setting}")
    name, _, value = setting.partition("=")
    message = f"The ini setting gpudist_{name} {rule}. Received: gpudist_{name}={value!r}."
    assert message in result.stderr.str() + result.stdout.str()


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('topology("2y2")', "A topology has the form HxD or HxD+Pps. Received: topology='2y2'."),
        ("topology()", "A mark names the topologies of its test. Received: @pytest.mark.topology()."),
        (
            'topology("1x2", stratgy="auto")',
            "A mark has topologies and the keywords strategy, deadline and fresh. Received: stratgy='auto'.",
        ),
        ('topology("1x2", strategy="tpu")', "A strategy is one of auto, one-device, mirrored"),
        ('topology("1x2", deadline=0)', "A deadline is a positive number of seconds. Received: deadline=0."),
    ],
)
def test_a_mark_that_cannot_be_meant_is_an_error_of_its_test(suite: pytest.Pytester, mark: str, message: str) -> None:
    suite.makepyfile(f"import pytest\n@pytest.mark.{mark}\ndef test_one(strategy): pass\n")
    result = suite.runpytest_inprocess("--collect-only")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert message in result.stdout.str()


def test_marks_of_one_test_must_agree(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest
        @pytest.mark.topology("1x2", deadline=1)
        @pytest.mark.topology("2x1", deadline=2)
        def test_one(strategy): pass
    """)
    result = suite.runpytest_inprocess("--collect-only")
    assert "The marks of one test must agree. Received: deadline=1 and deadline=2. Keep one of them." in result.stdout.str()


def test_a_mark_above_parameterized_expand_which_python_loses_is_an_error(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest, unittest
        from parameterized import parameterized
        class TestOne(unittest.TestCase):
            @pytest.mark.topology("1x2")
            @parameterized.expand([(1,), (2,)])
            def test_one(self, x): pass
    """)
    result = suite.runpytest_inprocess("--collect-only")
    assert (
        "Write @pytest.mark.topology(...) below @parameterized.expand(...), or name the mark otherwise." in result.stdout.str()
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED


EVERY_KIND = """
import pytest, unittest
from absl.testing import parameterized as absl_parameterized
from parameterized import parameterized

@pytest.mark.topology("1x4", "2x2")
@pytest.mark.parametrize("x", [1, 2])
def test_function(x): pass

@pytest.mark.topology("1x1")
class TestClass:
    def test_inherits(self): pass
    @pytest.mark.topology("2x1")
    @pytest.mark.topology("1x2")
    def test_own(self, strategy): pass

class TestUnittest(unittest.TestCase):
    @pytest.mark.topology("1x4", "2x2")
    def test_case(self): pass
    def test_plain(self): pass
    @parameterized.expand([("a",), ("b",)])
    @pytest.mark.topology("1x2")
    def test_expanded(self, x): pass

class TestAbsl(absl_parameterized.TestCase):
    @pytest.mark.topology("1x2")
    @absl_parameterized.parameters(1, 2)
    def test_above(self, x): pass
    @absl_parameterized.named_parameters(("_a", 1), ("_b", 2))
    @pytest.mark.topology("2x1")
    def test_below(self, x): pass
"""


def test_there_is_one_test_for_each_topology_of_every_kind_of_test(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_it=EVERY_KIND)
    listed = suite.runpytest_subprocess("--collect-only", "-q").outlines
    assert [line.removeprefix("test_it.py::") for line in listed if "::" in line] == [
        "test_function[1x4-1]",
        "test_function[1x4-2]",
        "test_function[2x2-1]",
        "test_function[2x2-2]",
        "TestClass::test_inherits[1x1]",
        "TestClass::test_own[2x1]",
        "TestClass::test_own[1x2]",
        "TestUnittest::test_case[1x4]",
        "TestUnittest::test_case[2x2]",
        "TestUnittest::test_expanded_0_a[1x2]",
        "TestUnittest::test_expanded_1_b[1x2]",
        "TestUnittest::test_plain",
        "TestAbsl::test_above0[1x2]",
        "TestAbsl::test_above1[1x2]",
        "TestAbsl::test_below_a[2x1]",
        "TestAbsl::test_below_b[2x1]",
    ]
    chosen = suite.runpytest_subprocess("--collect-only", "-q", "-k", "2x2", "test_it.py").outlines
    assert [line.partition("::")[2] for line in chosen if "::" in line] == [
        "test_function[2x2-1]",
        "test_function[2x2-2]",
        "TestUnittest::test_case[2x2]",
    ]
    named = suite.runpytest_subprocess("--collect-only", "-q", "test_it.py::TestUnittest::test_case[2x2]").outlines
    assert [line for line in named if "::" in line] == ["test_it.py::TestUnittest::test_case[2x2]"]
