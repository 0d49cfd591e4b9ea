"""The tests of one file share hosts. A test of another file or with `fresh` gets new ones, as does the next after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.plugin.conftest import Run

CHANGES = """
import os
import random
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.topology("1x2", "2x1")


def draws():
    return random.random(), float(np.random.rand()), float(tf.random.normal([])), float(keras.random.normal([]))


def found():
    files = os.listdir(tempfile.gettempdir())
    names = keras.layers.Dense(1).name, keras.config.dtype_policy().name
    return os.getcwd(), os.environ.get("LEFT"), files, names, draws()


seen = []


@pytest.fixture(scope="module")
def drawn():
    return draws()


def test_changes_much(strategy, drawn):
    seen.append(found())
    os.environ["LEFT"] = "1"
    os.chdir("/")
    os.close(tempfile.mkstemp()[0])
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_epsilon(1e-3)
    keras.Model.fit = None


def test_finds_what_is_not_reset(strategy):
    assert seen == [found()]
    assert keras.config.epsilon() == 1e-3 and keras.Model.fit is None


@pytest.mark.topology("1x2", fresh=True)
def test_has_hosts_of_its_own():
    assert seen == [] and keras.config.epsilon() == 1e-7
    tf.config.threading.set_intra_op_parallelism_threads(1)


def test_shares_hosts_with_the_first(strategy):
    assert len(seen) == 1
    if strategy.num_replicas_in_sync == 2 and "TF_CONFIG" not in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(1)
"""
FINDS_NOTHING = """
import keras
import pytest


@pytest.mark.topology("1x2", "2x1")
def test_finds_nothing_of_other_files(strategy):
    assert keras.config.epsilon() == 1e-7 and keras.Model.fit is not None
"""


def test_between_tests_state_is_reset_as_documented_and_other_files_get_other_hosts(run: Run, suite: pytest.Pytester) -> None:
    for name in ("test_earlier.py", "test_later.py"):
        (Path(suite.path) / name).write_text(FINDS_NOTHING)
    result = run(CHANGES, "-v", "test_earlier.py", "test_it.py", "test_later.py")
    result.assert_outcomes(passed=10, failed=1)
    text = result.stdout.str()
    assert "Intra op parallelism cannot be modified after initialization." in text
    assert 'Give the test hosts of its own: @pytest.mark.topology("1x2", fresh=True).' in text
    result.stdout.fnmatch_lines(["gpudist: *, 0 replaced", "FAILED test_it.py::test_shares_hosts_with_the_first?1x2? - *"])


FAILS = """
import os

import pytest
import tensorflow as tf

pids = []


@pytest.fixture(scope="module")
def of_module():
    pids.append(os.getpid())
    yield
    print("torn down")


def total(strategy, shape):
    def replica():
        return tf.distribute.get_replica_context().all_reduce("sum", tf.ones(shape))
    return strategy.run(tf.function(replica)).numpy().tolist()


@pytest.mark.topology("2x1")
def test_fails_in_a_collective(strategy, cluster):
    total(strategy, [1 + cluster.host])


@pytest.mark.topology("2x1")
def test_next_is_healthy(strategy):
    assert total(strategy, [1]) == [2.0]


@pytest.mark.topology("1x1")
@pytest.mark.xfail(raises=tf.errors.InvalidArgumentError, reason="not equal")
def test_fails_as_expected(strategy, of_module):
    tf.debugging.assert_equal(tf.constant(1), 2)


@pytest.mark.topology("1x1")
def test_next_has_another_host(strategy, of_module):
    assert pids == [os.getpid()]
"""


def test_after_an_error_of_tensorflow_the_next_test_has_new_hosts(run: Run) -> None:
    result = run(FAILS, "-s")
    result.assert_outcomes(passed=2, failed=1, xfailed=1)
    assert result.stdout.str().count("[host 0] torn down") == 2  # on the host that was replaced, and at the end


OF_A_SESSION = """
import os

import pytest

pytestmark = pytest.mark.topology("1x2")


def test_one(strategy, of_session): assert of_session == os.getpid()
def test_two(strategy, of_session): assert of_session == os.getpid()
"""


@pytest.mark.parametrize("options", [[], pytest.param(["-n", "1"], marks=pytest.mark.slow)])
def test_a_session_fixture_is_torn_down_when_its_hosts_get_no_more_tests(
    run: Run, suite: pytest.Pytester, options: list[str]
) -> None:
    log = Path(suite.path) / "log"
    suite.makeconftest(
        f"import os, pytest\n\n\n@pytest.fixture(scope='session')\ndef of_session():\n    log = open({str(log)!r}, 'a')\n"
        "    log.write('up ')\n    yield os.getpid()\n    log.write('down ')\n    log.close()\n"
    )
    (Path(suite.path) / "test_later.py").write_text(OF_A_SESSION)
    run(OF_A_SESSION, *options).assert_outcomes(passed=4)
    assert log.read_text() == "up down up down "
