"""Runs on one device are made where they can tell something, and no verdict hangs on those that are not made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emulate.recorder import Follow, ProbePlan
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.case import Case
from emulate.verify.compare import compare
from emulate.verify.judge import judge
from emulate.verify.lab import Price
from emulate.verify.recorded import NOISE_RUNS
from emulate.verify.run_spec import AS_IT_STANDS
from tests.emulate.verify.cases import Folder, case_of, codes
from tests.emulate.verify.fake_runner import FakeRunner, lab_of, noise_of
from tests.emulate.verify.simulation import Problem, Weights


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def noise(folder: Folder) -> list[Trace]:
    return folder.noise(Problem(steps=4))


@pytest.fixture
def reference(folder: Folder) -> Trace:
    return folder.trained(Problem(steps=4))


def test_the_first_noise_run_is_made_alone_and_the_others_when_they_are_asked_for(noise: list[Trace], reference: Trace) -> None:
    runner = FakeRunner(noise_of(noise, reference))
    lab = lab_of(runner)
    pair = lab.pair(AS_IT_STANDS, reference)
    assert pair is not None
    assert runner.made == ["reference", "noise 1"]
    assert lab.measure_noise(pair, 1) == noise[:1]
    assert runner.made == ["reference", "noise 1"]
    assert lab.measure_noise(pair) == noise
    assert runner.made == ["reference", "noise 1", "noise 2", "noise 3"]
    assert lab.price == Price(starts=1, evaluations=NOISE_RUNS)


def test_a_noise_run_that_failed_is_left_out(noise: list[Trace], reference: Trace) -> None:
    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace | str:
        return "ValueError: no" if label == "noise 1" else noise_of(noise, reference)(label, topology, plan)

    lab = lab_of(FakeRunner(answer))
    pair = lab.pair(AS_IT_STANDS, reference)
    assert pair is not None
    assert lab.measure_noise(pair, 1) == []
    assert lab.measure_noise(pair) == noise[1:]


def test_a_run_is_made_once_and_a_question_about_it_starts_nothing(noise: list[Trace], reference: Trace) -> None:
    runner = FakeRunner(noise_of(noise, reference))
    lab = lab_of(runner)
    assert lab.repeated() is None
    assert lab.same_seed() is None
    assert not lab.is_noise_started(AS_IT_STANDS)
    assert runner.made == []
    for _ in range(2):
        lab.pair(AS_IT_STANDS, reference)
        lab.run_topology(Topology.parse("1x4"))
        lab.repeat()
    assert runner.made == ["reference", "noise 1", "1x4", "reference again"]


def test_a_reference_that_cannot_be_evaluated_is_asked_for_again_where_the_program_may_run(
    noise: list[Trace], reference: Trace
) -> None:
    runner = FakeRunner(noise_of(noise, reference), evaluates=False)
    lab, followed = lab_of(runner), replace(AS_IT_STANDS, follow=Follow(reference.directory))
    assert not lab.evaluate(followed)
    assert runner.started == ["reference"]
    assert lab.pair(followed, reference) is not None
    of_run = f"gradients of {reference.directory.name}"
    assert runner.started == ["reference", f"reference {of_run}", f"noise 1 {of_run}"]


def test_what_was_derived_from_a_reference_that_is_taken_back_is_made_again(noise: list[Trace], reference: Trace) -> None:
    runner = FakeRunner(noise_of(noise, reference))
    lab = lab_of(runner)
    lab.run_reference()
    lab.start_otherwise("compiled")
    lab.pair(AS_IT_STANDS, reference)
    lab.take_back()
    lab.pair(AS_IT_STANDS, reference)
    assert runner.made == ["reference", "reference compiled", "noise 1", "noise 1"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("replicas", [1, 4])
def test_what_agrees_beside_one_noise_run_agrees_beside_all(folder: Folder, seed: int, replicas: int) -> None:
    problem = Problem(seed=seed, steps=8)
    reference, topology, noise = folder.trained(problem), folder.trained(problem, replicas), folder.noise(problem)
    runner = FakeRunner(noise_of(noise, reference))
    lab = lab_of(runner)
    pair = lab.pair(AS_IT_STANDS, topology)
    assert pair is not None
    assert lab.compare_enough(pair).is_equivalent
    assert runner.made == ["reference", "noise 1"]
    assert compare(reference, topology, noise).is_equivalent


def reversed_sum(locals_: list[Weights]) -> Weights:
    """Return the sum in an order that no cause explains."""
    return {name: np.flip(sum(one[name] for one in locals_)) for name in locals_[0]}


def case(folder: Folder, topology: Trace, noise: list[Trace], repeats: list[str], same_seed: Trace | None = None) -> Case:
    problem = Problem(steps=4)

    def repeat() -> Trace:
        repeats.append("made")
        return folder.trained(problem)

    return case_of(folder.trained(problem), topology, noise, repeat=repeat, same_seed=same_seed)


def test_a_program_that_seems_to_repeat_is_not_run_again(folder: Folder, noise: list[Trace]) -> None:
    repeats: list[str] = []
    found = judge(case(folder, folder.trained(Problem(steps=4), 4), noise, repeats))
    assert (found.verdict, repeats) == ("equivalent", [])


def test_a_program_whose_noise_run_starts_elsewhere_is_run_again(folder: Folder) -> None:
    repeats: list[str] = []
    elsewhere = folder.noise(Problem(seed=7, steps=4))
    judge(case(folder, folder.trained(Problem(steps=4), 4), elsewhere, repeats, same_seed=elsewhere[0]))
    assert repeats == ["made"]


def test_a_program_whose_topology_starts_elsewhere_is_run_again(folder: Folder, noise: list[Trace]) -> None:
    repeats: list[str] = []
    judge(case(folder, folder.trained(Problem(seed=7, steps=4), 4), noise, repeats))
    assert repeats == ["made"]


def test_a_program_with_an_unexplained_difference_is_run_again(folder: Folder, noise: list[Trace]) -> None:
    repeats: list[str] = []
    found = judge(case(folder, folder.trained(Problem(steps=4, combine=reversed_sum), 4), noise, repeats))
    assert (codes(found), repeats) == (["unexplained"], ["made"])


def test_a_program_that_starts_elsewhere_in_another_run_is_run_again(folder: Folder, noise: list[Trace]) -> None:
    repeats: list[str] = []
    judge(case(folder, folder.trained(Problem(steps=4), 4), noise, repeats, same_seed=folder.trained(Problem(seed=7, steps=4))))
    assert repeats == ["made"]
