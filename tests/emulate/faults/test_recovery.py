"""A program that saves checkpoints ends with the same weights whatever befalls it, in every phase of a step."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate import Cluster
from emulate.errors import Hung, ProgramFailed, UsageError
from emulate.faults import PHASES
from tests.emulate.faults.needs import needs_links

PROGRAM = str(Path(__file__).parents[3] / "fixtures" / "recoveries" / "checkpoints.py")
Make = Callable[..., Cluster]


def train() -> tuple[list[Any], int]:
    """The weights, and the step that the last start went on from."""
    os.chdir(os.environ["WHERE"])
    ran = runpy.run_path(PROGRAM)
    return [v.numpy() for v in ran["model"].trainable_variables], ran["restored"].step if ran["restored"] else 0


@pytest.fixture(scope="module")
def undisturbed(preload: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    where = str(tmp_path_factory.mktemp("undisturbed"))
    with Cluster("2x1", environment={"WHERE": where}, preload=preload) as cluster:
        weights, _ = cluster.run(train)[0]
    return list(weights)


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


SLOW_PHASES = ("input", "before-all-reduce", "after-all-reduce")


@pytest.mark.parametrize("phase", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW_PHASES else one for one in PHASES])
def test_killed_in_any_phase_it_ends_with_the_same_weights(cluster: Make, undisturbed: list[Any], phase: str) -> None:
    run = cluster("2x1")
    results = run.run(train, faults=f"kill:host=1,step=8,phase={phase}", restarts=1)
    assert run.restarts == 1
    assert [(str(one.fault), one.step) for one in run.fired] == [
        (f"kill:host=1,step=8,phase={phase}".replace(",phase=input", ""), 9 if phase == "checkpoint" else 8)
    ]
    for weights, restored in results:
        assert restored in (3, 6)
        assert same(weights, undisturbed)


@pytest.mark.parametrize(
    ("fault", "restarts"),
    [
        ("preempt:host=1,step=4", 1),
        ("stop:host=1,step=4,seconds=0.5", 0),
        pytest.param("slow:host=0,step=3,seconds=0.05", 0, marks=pytest.mark.slow),
        pytest.param("late:host=1,seconds=1", 0, marks=pytest.mark.slow),
        pytest.param("link:latency=2ms,loss=1%", 0, marks=[pytest.mark.slow, needs_links]),
        pytest.param("disconnect:host=1,step=4,seconds=0.5", 0, marks=[pytest.mark.slow, needs_links]),
        ("fill-disk:host=0,step=2", 1),
    ],
)
def test_whatever_else_befalls_it_it_ends_with_the_same_weights(
    cluster: Make, undisturbed: list[Any], fault: str, restarts: int
) -> None:
    run = cluster("2x1")
    assert same(run.run(train, faults=fault, restarts=2)[0][0], undisturbed)
    assert run.restarts == restarts
    assert len(run.fired) == 1


@pytest.mark.slow
def test_two_faults_come_to_pass_in_two_lives(cluster: Make, undisturbed: list[Any]) -> None:
    run = cluster("2x1")
    results = run.run(train, faults=["kill:host=1,step=5,phase=after-all-reduce", "kill:host=0,step=11"], restarts=3)
    assert same(results[0][0], undisturbed)
    assert (run.restarts, [one.step for one in run.fired]) == (2, [5, 11])


def test_a_host_that_never_starts_is_given_up_and_is_there_after_a_restart(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emulate.cluster.restarts.STANDSTILL", 5.0)
    run = cluster("2x1")

    def meet() -> int:
        import tensorflow as tf

        return int(tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync)

    assert run.run(meet, faults="missing:host=1", restarts=1) == [2, 2]
    assert run.restarts == 1


def test_without_a_restart_the_error_names_the_fault(cluster: Make) -> None:
    with pytest.raises(ProgramFailed) as caught:
        cluster("2x1").run(train, faults="kill:host=1,step=2")
    assert caught.value.host == 1
    assert re.search(r"Received: host 1 ended with signal 9( after step 1)?\. A fault was injected", str(caught.value))
    assert "A fault was injected: host 1 was killed in its step 2 (counted from 1), input (--fault kill:host=1,step=2)." in str(
        caught.value
    )


def test_a_stopped_host_is_no_hang_of_the_program(cluster: Make) -> None:
    def wait() -> None:
        import time

        import keras
        import tensorflow as tf

        variable = tf.Variable(1.0)
        keras.optimizers.SGD().apply([tf.constant(1.0)], [variable])
        time.sleep(1000)

    with pytest.raises(Hung) as caught:
        cluster("1x1", timeout=3).run(wait, faults="stop:host=0")
    assert caught.value.reason == "timeout"
    assert "It was to be expected: host 0 was stopped in its step 1 (counted from 1), input (--fault stop:host=0)." in str(
        caught.value
    )
    assert "host 0 is stopped by a fault" in str(caught.value)


def test_a_fault_that_does_not_come_to_pass_is_an_error(cluster: Make) -> None:
    with pytest.raises(UsageError, match=r"A fault must happen\. Received: fault='kill:host=0,step=5'"):
        cluster("1x1").run(abs, -1, faults="kill:host=0,step=5")
    with pytest.raises(UsageError, match=r"A number of restarts must not be negative\. Received: restarts=-1\."):
        cluster("1x1").run(abs, -1, restarts=-1)
