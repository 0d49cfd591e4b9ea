"""A run as a whole: pytest's own options, pytest-xdist, the strict run, and ends of every kind that leave nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.acceptance.plugin.conftest import Run
from tests.versions import since

SMALL = """
import os
import pytest

pytestmark = pytest.mark.topology("1x2", "2x1")


@pytest.fixture(scope="module")
def of_module():
    yield os.getpid()


def test_one(cluster, devices): assert cluster.num_hosts == cluster.topology.num_hosts
def test_two(cluster, devices, of_module): assert cluster.gather(of_module)[cluster.host] == os.getpid()
def test_three(devices, worker_id): assert "-host" in worker_id
"""
DISTRIBUTIONS = [
    "load",
    pytest.param("loadscope", marks=pytest.mark.slow),
    pytest.param("loadfile", marks=pytest.mark.slow),
    pytest.param("worksteal", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_of_xdist_gives_the_same_results(run: Run, suite: pytest.Pytester, distribution: str) -> None:
    suite.makepyfile(test_other=SMALL)
    result = run(SMALL, "-n", "2", "--dist", distribution, "--junitxml=junit.xml")
    result.assert_outcomes(passed=12)
    result.stdout.fnmatch_lines(["gpudist: 12 tests ran on emulated devices (1x2: 6, 2x1: 6), 0 on real devices"])
    assert (Path(suite.path) / "junit.xml").read_text().count('<property name="gpudist_verdict" value="passed" />') == 12


OPTIONS = """
import pytest

@pytest.fixture(scope="module")
def breaks_late():
    yield
    raise RuntimeError("late")

@pytest.mark.topology("1x2", "1x1")
def test_one(devices, topology): assert topology.num_devices == 1

@pytest.mark.topology("1x2", "1x1")
def test_two(devices, breaks_late): print("spoken")
"""


def test_options_of_pytest_mean_what_they_mean(run: Run) -> None:
    result = run(OPTIONS, "-x")  # the first test fails, and nothing was set up by then
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    result = run("", "--lf", "--durations=3", "-vv")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["test_it.py::test_one?1x2? FAILED*", "*slowest 3 durations*"])
    result = run("", "-k", "1x1", "-s", "--setup-show")
    result.assert_outcomes(passed=2, errors=1)
    text = result.stdout.str()
    assert "[host 0] spoken" in text
    assert "SETUP    M breaks_late" in text
    assert "ERROR at teardown of test_two[1x1]" in text


SKIPS = """
import pytest

@pytest.mark.topology("1x1")
def test_emulated(devices): pass

@pytest.mark.topology("1x2")
def test_skipped(devices): pytest.skip("no reason")
"""


def test_a_strict_run_fails_when_something_was_skipped_or_emulated(run: Run) -> None:
    result = run(SKIPS, "--gpudist-strict")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    why = (
        "gpudist: --gpudist-strict: the run fails, because skipped: test_it.py::test_skipped[1x2]; "
        "ran on emulated devices: test_it.py::test_emulated[1x1]."
    )
    assert why in result.outlines


def test_a_test_that_skips_itself_did_not_run(run: Run) -> None:
    marked = '\n@pytest.mark.skip(reason="never")\n@pytest.mark.topology("2x1")\ndef test_marked(devices): pass\n'
    result = run(SKIPS + marked)
    result.stdout.fnmatch_lines(
        ["gpudist: 1 test ran on emulated devices (1x1: 1), 0 on real devices, 2 skipped by themselves (1x2: 1, 2x1: 1)"]
    )


LACKING = """
import pytest

@pytest.mark.topology("64x256")
def test_on_hosts(devices): pass

@pytest.mark.topology("64x256")
def test_beside(cluster): pass
"""


def test_a_test_that_lacks_devices_is_skipped_and_counted_with_the_reason(run: Run) -> None:
    result = run(LACKING, "--gpudist-device", "gpu", "--gpudist-strict")
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    line = next(line for line in result.outlines if line.startswith("gpudist: 0 tests ran on emulated devices"))
    assert line.startswith(
        "gpudist: 0 tests ran on emulated devices, 0 on real devices, 2 skipped for lack of devices (64x256: 2): 2 x "
    )
    assert "Received: " in line


HANGS = """
import os, pathlib, time
import pytest

@pytest.mark.topology("2x1")
def test_hangs(cluster, devices):
    pathlib.Path(f"here-{cluster.host}").write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "options"),
    [
        pytest.param(signal.SIGINT, [], id="SIGINT"),
        pytest.param(signal.SIGKILL, [], id="SIGKILL"),
        pytest.param(signal.SIGKILL, ["-n", "2"], id="SIGKILL, workers of pytest-xdist", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_pytest_leaves_nothing(
    suite: pytest.Pytester, number: signal.Signals, options: list[str], tmp_path: Path
) -> None:
    suite.makepyfile(test_it=HANGS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={tmp_path / 'base'}", *options]
    with subprocess.Popen(
        command,
        cwd=suite.path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A job in the background is born with SIGINT ignored, and so would be its children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        hosts = _await_hosts(Path(suite.path))
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
    if number == signal.SIGINT:
        assert len(re.findall(r"^host [01] of test_it\.py::test_hangs\[2x1\] was in$", said, re.MULTILINE)) == 2
        assert len(re.findall(r'test_it\.py", line 7, in test_hangs$', said, re.MULTILINE)) == 2
    assert process.returncode == (pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else -signal.SIGKILL)
    assert {one.pid for one in below} >= hosts
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []
    _await_empty(temporary)


def _await_hosts(folder: Path) -> set[int]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        paths = [folder / f"here-{host}" for host in (0, 1)]
        with contextlib.suppress(OSError, ValueError):
            return {int(path.read_text()) for path in paths}
        time.sleep(0.05)
    raise AssertionError("the hosts did not start")


def _await_empty(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while list(folder.glob("gpudist-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(folder.glob("gpudist-*")) == []


PROGRAM = """
import pytest

CORRECT = {correct!r}


@pytest.mark.topology("1x2")
def test_program(gpudist):
    gpudist.assert_equivalent(CORRECT, steps=2)


@pytest.mark.topology("1x2")
def test_wrong_program(gpudist):
    gpudist.assert_equivalent({wrong!r}, steps=2)


@pytest.mark.topology("1x2")
def test_dropout(gpudist):
    with pytest.warns(UserWarning, match="only by design of TensorFlow and Keras: identical-dropout on 1x2"):
        gpudist.assert_equivalent({dropout!r}, steps=2)
"""


@pytest.mark.skipif(not since("keras", "3.0"), reason="Keras 2's Dropout draws other numbers on each replica")
def test_programs_are_verified_with_the_settings_of_the_run(run: Run, suite: pytest.Pytester) -> None:
    fixtures = Path(__file__).parents[3] / "fixtures"
    paths = ("programs/custom_loop_cnn.py", "bugs/loss_scaling.py", "bugs/identical_dropout.py")
    correct, wrong, dropout = (str(fixtures / path) for path in paths)
    result = run(PROGRAM.format(correct=correct, wrong=wrong, dropout=dropout), "--junitxml=junit.xml")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*loss-scaling*", "gpudist: 3 tests ran on emulated devices (1x2: 3), 0 on real devices"])
    assert "emulate/pytest_plugin/" not in result.stdout.str()
    assert '<property name="gpudist_verdict" value="by-design" />' in (Path(suite.path) / "junit.xml").read_text()
