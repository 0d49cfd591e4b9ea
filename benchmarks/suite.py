"""The pytest plugin: 100 small tests on five topologies, and what the plugin costs a suite that does not use it."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure, in_turn, seconds

TOPOLOGIES = ("1x2", "1x4", "2x1", "2x2", "4x1")
FUNCTIONS = 20
FILES = 10
TIMES = 15

_BODY = """

{mark}
def test_sum_{number}({arguments}):
    {strategy}
    with strategy.scope():
        weight = tf.Variable(float({number}))

    @tf.function
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            weight.assign_sub(0.5 * context.all_reduce("mean", weight * 1.0))
        strategy.run(replica)

    step()
    assert float(weight.numpy()) == {number} / 2
"""
_OWN_STRATEGY = "strategy = tf.distribute.OneDeviceStrategy('CPU:0')"


def figures() -> Iterator[Figure]:
    """All figures about the plugin."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = _suite(Path(folder, "ours"), on_topologies=True), _suite(Path(folder, "theirs"), on_topologies=False)
        taken = seconds(lambda: _pytest(ours))
        plain = seconds(lambda: _pytest(theirs))
        against = "100 such tests on one device in one process"
        yield Figure("suite_100", taken, 60.0, False, taken, plain, against, unit="s")
        files = _suite(Path(folder, "files"), on_topologies=True, files=FILES)
        taken = seconds(lambda: _pytest(files))
        yield Figure("suite_100_in_10_files", taken, 45.0, False, taken, plain, against, unit="s")
        unaware = _unaware_suite(Path(folder, "unaware"))
        used, spared = in_turn(lambda: _cpu(unaware), lambda: _cpu(unaware, "-p", "no:gpudist"), TIMES)
        yield Figure("plugin_unused", used / spared, 1.03, False, used, spared, "the same 500 tests without the plugin")


def _suite(folder: Path, *, on_topologies: bool, files: int = 1) -> Path:
    """A hundred small tests: each of the functions on each topology, or five times as many functions on one device."""
    folder.mkdir()
    number = FUNCTIONS if on_topologies else FUNCTIONS * len(TOPOLOGIES)
    mark = f"@pytest.mark.topology({', '.join(map(repr, TOPOLOGIES))})" if on_topologies else ""
    arguments, strategy = ("strategy", "") if on_topologies else ("", _OWN_STRATEGY)
    bodies = [_BODY.format(mark=mark, number=one, arguments=arguments, strategy=strategy) for one in range(number)]
    for file in range(files):
        (folder / f"test_suite_{file}.py").write_text("import pytest\nimport tensorflow as tf\n" + "".join(bodies[file::files]))
    return folder


def _unaware_suite(folder: Path) -> Path:
    folder.mkdir()
    (folder / "test_suite.py").write_text("".join(f"def test_{number}(): assert {number} >= 0\n" for number in range(500)))
    return folder


def _pytest(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The suite must pass. Received: {done.returncode}.\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


def _cpu(folder: Path, *arguments: str) -> float:
    """Processor time: other programs on the machine change it least."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _pytest(folder, *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
