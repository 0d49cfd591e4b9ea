"""Gradients rounded otherwise: by units in the last place, of what was added up where that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.interventions.gradients import RoundedGradients
from emulate.recorder import ProbePlan
from emulate.upstream import Names
from tests.emulate.probe.loops import custom_loop
from tests.emulate.verify.made_traces import Made

UNIT = 2.0**-23
LOCALS = np.array([[0.25, -2.0, 0.0, 1.0], [-0.25, 2.0, 0.0, 3.0]], "f4")
"""What two replicas have: two elements cancel, one is nothing anywhere."""


@pytest.fixture
def summands(tmp_path: Path) -> Path:
    made = Made(tmp_path / "two", "1x2")
    for replica, local in enumerate(LOCALS):
        made.step(0, {"w": local}, {"w": np.zeros(4, "f4")}, replica=replica)
    made.trace()
    return tmp_path / "two"


def changed(plan: ProbePlan, gradients: list[Any], tensor: str = "w") -> list[Any]:
    import tensorflow as tf

    rounding, variable = RoundedGradients(plan, Names()), tf.Variable(np.zeros(4, "f4"), name=tensor)
    return [rounding.changed("sgd", [(tf.constant(one), variable)])[0][0].numpy() for one in gradients]


def test_without_a_wish_gradients_stay_as_they_are(tmp_path: Path) -> None:
    (same,) = changed(ProbePlan(tmp_path), [LOCALS[0]])
    assert np.array_equal(same, LOCALS[0])


def test_each_element_moves_by_units_of_its_own_and_nothing_stays_nothing(tmp_path: Path) -> None:
    one, other = (changed(ProbePlan(tmp_path, perturb=4.0, noise_seed=k), [LOCALS[0]])[0] for k in (1, 2))
    assert not np.array_equal(one, other)
    assert np.all(np.abs(one - LOCALS[0]) <= 4 * UNIT * np.abs(LOCALS[0]))
    assert one[2] == 0.0


def _of_summands(folder: Path, summands: Path, units: float) -> ProbePlan:
    return ProbePlan(folder, perturb=4.0, perturb_summands=units, noise_seed=1, summands=summands)


def test_what_cancels_moves_by_units_of_what_was_added_up(tmp_path: Path, summands: Path) -> None:
    whole = LOCALS.sum(axis=0)
    first, second = changed(_of_summands(tmp_path, summands, 4.0), [whole, whole])
    assert np.all(first[:2] != 0.0)
    assert np.all(np.abs(first - whole) <= 4 * UNIT * (np.abs(whole) + np.abs(LOCALS).max(axis=0)))
    assert first[2] == 0.0
    assert np.all(second[:3] == 0.0)  # the other run has one step
    (far,) = changed(_of_summands(tmp_path, summands, 4096.0), [whole])
    assert np.any(np.abs(far[:2]) > 16 * UNIT)  # they may be rounded by more than the sum
    assert np.all(np.abs(far - whole) <= 4 * UNIT * np.abs(whole) + 4096 * UNIT * np.abs(LOCALS).max(axis=0))


def test_a_tensor_that_the_other_run_does_not_have_whole_moves_by_its_own_units_alone(tmp_path: Path, summands: Path) -> None:
    (one,) = changed(_of_summands(tmp_path, summands, 4.0), [np.zeros(4, "f4")], "another")
    assert np.all(one == 0.0)


def test_a_program_trains_the_same_but_for_these_units(recorded: Any) -> None:
    two, one = recorded(custom_loop), recorded(custom_loop, "1x1", reference=True)
    moved = recorded(
        custom_loop, "1x1", reference=True, perturb=16.0, perturb_summands=16.0, noise_seed=1, summands=two.directory
    )
    for ours, theirs in zip(moved.steps("sgd"), one.steps("sgd"), strict=True):
        for name, weight in theirs[0].weights.items():
            np.testing.assert_allclose(ours[0].weights[name].array.read(), weight.array.read(), atol=1e-5)
    assert moved.steps("sgd")[-1][0].weights["sequential/dense/kernel"].digest != (
        one.steps("sgd")[-1][0].weights["sequential/dense/kernel"].digest
    )
