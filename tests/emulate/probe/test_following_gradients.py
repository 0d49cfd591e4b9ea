"""A run whose optimizers apply another run's gradients: its weights are that run's, and what is recorded are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.interventions import Interventions
from emulate.interventions import gradients as gradient_changes
from emulate.recorder import Follow, ProbePlan
from emulate.upstream import Names
from tests.emulate.probe.loops import custom_loop
from tests.emulate.verify.made_traces import Made

LOCALS = np.array([[[1.0, 2.0], [0.0, 0.0], [5.0, 6.0]], [[10.0, 20.0], [0.0, 0.0], [0.5, 0.5]]], "f4")
"""What two replicas have."""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    made = Made(tmp_path / "two", "1x2")
    for replica, local in enumerate(LOCALS):
        made.step(0, {"w": local}, {"w": np.zeros((3, 2), "f4")}, replica=replica)
    made.trace()
    return tmp_path / "two"


def applied(follow: Follow | None, gradient: Any, times: int = 1) -> list[Any]:
    """What is applied in so many steps in the place of a gradient that is recorded with 1 more."""
    import tensorflow as tf

    variable = tf.Variable(np.zeros((3, 2), "f4"), name="w")
    follower = gradient_changes.Following(ProbePlan(Path(), follow=follow), Names())
    return [follower.applied("sgd", [(gradient, variable)], [(gradient + 1.0, variable)])[0][0] for _ in range(times)]


def test_without_another_run_what_is_recorded_is_applied() -> None:
    (one,) = applied(None, np.ones((3, 2), "f4"))
    assert np.all(one == 2.0)


def test_the_sum_of_the_other_runs_gradients_is_applied_and_its_own_after_the_last_of_them(other: Path) -> None:
    import tensorflow as tf

    first, second = applied(Follow(other), tf.ones((3, 2)), times=2)
    assert np.array_equal(first.numpy(), LOCALS.sum(axis=0))
    assert np.all(second.numpy() == 1.0)


def test_the_mean_is_applied_where_the_optimizer_applies_means(other: Path) -> None:
    import tensorflow as tf

    (one,) = applied(Follow(other, averaged=("sgd",)), tf.ones((3, 2)))
    assert np.array_equal(one.numpy(), LOCALS.mean(axis=0))


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_of_a_run_with_the_same_replicas_gets_its_own_and_nothing_after_the_last(other: Path, replica: int) -> None:
    import tensorflow as tf

    variable = tf.Variable(np.zeros((3, 2), "f4"), name="w")
    follower = gradient_changes.Following(ProbePlan(Path(), follow=Follow(other, each=True)), Names())
    pairs = [(tf.ones((3, 2)), variable)]
    first, second = (follower.applied("sgd", pairs, pairs, replica)[0][0] for _ in range(2))
    assert np.array_equal(first.numpy(), LOCALS[replica])
    assert not np.any(second.numpy())


def test_a_sparse_gradient_of_the_same_replica_has_its_total_in_its_own_rows(other: Path) -> None:
    import tensorflow as tf

    variable = tf.Variable(np.zeros((3, 2), "f4"), name="w")
    follower = gradient_changes.Following(ProbePlan(Path(), follow=Follow(other, each=True)), Names())
    own = tf.IndexedSlices(tf.ones((3, 2)), tf.constant([2, 0, 2]), tf.constant([3, 2]))
    ((given, _),) = follower.applied("sgd", [(own, variable)], [(own, variable)], 1)
    assert given.indices.numpy().tolist() == [2, 0, 2]
    np.testing.assert_allclose(tf.convert_to_tensor(given).numpy(), LOCALS[1], rtol=1e-6)


@pytest.mark.parametrize("each", [False, True])
def test_first_values_are_off_by_a_unit_where_a_noise_run_has_the_replicas_of_the_run_that_it_follows(each: bool) -> None:
    plan = ProbePlan(Path(), follow=Follow(Path(), each=each), perturb=1.0, noise_seed=1)
    value = np.full(100, 3.0, "f4")
    off = np.abs(Interventions(plan, Names()).first_value(value) - value)
    assert off.max() <= 2.0**-21
    assert bool(off.any()) is each


@pytest.mark.parametrize("large", [False, True])
def test_a_sparse_gradient_stays_sparse_and_that_of_a_large_table_is_its_own(
    other: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    import tensorflow as tf

    if large:
        monkeypatch.setattr(gradient_changes, "_LARGE", 1)

    class Slices(tf.IndexedSlices):
        def __add__(self, _: float) -> Slices:
            return self

    own = Slices(tf.ones((3, 2)), tf.constant([2, 0, 2]), tf.constant([3, 2]))
    (one,) = applied(Follow(other), own)
    expected = np.array([[2.0, 2.0], [1.0, 1.0]], "f4") if large else LOCALS.sum(axis=0)[[2, 0]]
    assert isinstance(one, tf.IndexedSlices)
    rows = tf.math.unsorted_segment_sum(one.values, tf.unique(one.indices)[1], 2)
    assert np.array_equal(rows.numpy(), expected)


def test_each_entry_of_a_sparse_gradient_is_multiplied_by_the_factor_of_the_whole(other: Path) -> None:
    """An optimizer that squares the entries of a row, one after the other, makes the same update then."""
    import tensorflow as tf

    class Slices(tf.IndexedSlices):
        def __add__(self, _: float) -> Slices:
            return self

    whole, part = LOCALS.sum(axis=0) / 4, np.array([[1.0, -2.0]], "f4")
    own = Slices(
        tf.constant(np.concatenate([whole[[2]] - part, whole[[0]], part])), tf.constant([2, 0, 2]), tf.constant([3, 2])
    )
    (one,) = applied(Follow(other), own)
    np.testing.assert_allclose(one.values.numpy(), 4 * own.values.numpy(), rtol=1e-6)


def adam_loop() -> None:
    custom_loop(optimizer="adam")


@pytest.mark.parametrize(("loop", "optimizer"), [(custom_loop, "sgd"), pytest.param(adam_loop, "adam", marks=pytest.mark.slow)])
def test_weights_are_those_of_the_run_that_is_followed_step_by_step(recorded: Any, loop: Any, optimizer: str) -> None:
    two, alone = recorded(loop), recorded(loop, "1x1", reference=True)
    follows = recorded(loop, "1x1", reference=True, follow=Follow(two.directory))
    assert (follows.follows, alone.follows) == (True, False)
    for ours, theirs, own in zip(follows.steps(optimizer), two.steps(optimizer), alone.steps(optimizer), strict=True):
        for name, weight in theirs[0].weights.items():
            assert ours[0].weights[name].digest == weight.digest
        for name, gradient in ours[0].gradients.items():
            assert len(ours) == 1
            np.testing.assert_allclose(gradient.read(), own[0].gradients[name].read(), atol=1e-5)
