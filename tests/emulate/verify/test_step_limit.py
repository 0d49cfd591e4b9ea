"""After how many steps the runs of a verification stop, where the user leaves it open: one answer for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulate.cluster import Preload
from emulate.program import Program
from emulate.progress import Silent
from emulate.recorder import ProbePlan
from emulate.topology import REFERENCE, Topology
from emulate.verify.runner import Runner
from emulate.verify.settings import AUTO, Ask, Settings, StepLimit


def decided(reference: Ask | None, topology: Ask | None, *, num_runs: int = 6) -> int | None:
    """Return the decision of the two first runs; None for one that ended before step 20."""
    limit = StepLimit(AUTO, voters=2, num_runs=num_runs)
    assert limit.join("1x4")
    assert limit.join("reference")
    for label, ask in (("1x4", topology), ("reference", reference)):
        assert limit.decided is None
        assert limit.steps == 20
        if ask is None:
            limit.leave(label)
        else:
            limit.ask(label, ask)
            limit.leave(label)
    assert not limit.join("noise 1")
    assert limit.steps == limit.decided
    return limit.decided


@pytest.mark.parametrize(
    ("reference", "topology", "steps"),
    [
        (Ask(29, 0.1), Ask(29, 0.1), 29),
        (Ask(50, 0.1), Ask(50, 0.1), 50),
        (Ask(51, 0.1), Ask(51, 0.1), 20),
        (Ask(12, 0.1), Ask(12, 0.1), 20),
        (Ask(None, 0.1), Ask(None, 0.1), 20),
        (Ask(None, 0.1), Ask(29, 0.1), 29),  # a plain loop on one device
        (Ask(29, 0.1), Ask(8, 0.1), 29),  # a batch that grows with the replicas
        (Ask(112, 0.1), Ask(37, 0.1), 37),
        (Ask(10, 0.1), Ask(40, 0.1), 40),
        (None, Ask(29, 0.1), 20),
        (Ask(29, 0.1), None, 20),
        (None, None, 20),
    ],
)
def test_the_end_of_the_first_epoch_is_run_where_it_has_at_most_50_batches(
    reference: Ask | None, topology: Ask | None, steps: int
) -> None:
    assert decided(reference, topology) == steps


@pytest.mark.parametrize(("seconds", "steps"), [(2.0, 30), (2.1, 20)])
def test_an_epoch_that_costs_more_than_about_a_minute_more_is_not_run_whole(seconds: float, steps: int) -> None:
    assert decided(Ask(30, 0.1), Ask(30, seconds)) == steps  # 10 steps more, 6 runs, two at a time
    assert decided(Ask(30, seconds), Ask(30, 0.1)) == steps


@pytest.mark.parametrize("steps", [7, 100, None])
def test_a_number_of_steps_that_the_user_names_is_kept(steps: int | None) -> None:
    limit = StepLimit(steps, voters=2)
    assert not limit.join("1x4")
    limit.leave("1x4")
    assert limit.steps == limit.looks_from == steps


def test_where_one_run_goes_on_at_a_time_the_first_one_decides() -> None:
    limit = StepLimit(AUTO, voters=1)
    assert limit.join("1x4")
    limit.ask("1x4", Ask(29, 0.1))
    assert limit.decided == 29
    assert not limit.join("reference")
    assert (limit.steps, limit.looks_from) == (29, 20)


def _epoch_of_24_batches() -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    with tf.distribute.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(np.ones((96, 3), "f4"), np.ones((96, 2), "f4"), batch_size=4, epochs=2, verbose=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_that_go_one_after_the_other_stop_at_the_same_step_as_runs_side_by_side(
    workers: int, preload: Preload, tmp_path: Path
) -> None:
    settings = Settings(program=Program.find(_epoch_of_24_batches), steps=AUTO, timeout=60)
    with Runner(settings, tmp_path, Silent(), preload=preload, workers=workers) as runner:
        plan = ProbePlan(trace=tmp_path)
        topologies = {"1x2": Topology(1, 2), "reference": REFERENCE}
        started = [runner.start(label, one, plan, reference=one == REFERENCE) for label, one in topologies.items()]
        assert [len(result.trace.steps(result.trace.optimizers[0])) for result in (run.result() for run in started)] == [24, 24]
