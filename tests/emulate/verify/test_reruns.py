"""Runs on the way to a cause that did not end well: which it was, and whose error, is told where nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

import emulate
from emulate.recorder import ProbePlan
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.lab import STARTS, Lab
from emulate.verify.recorded import RunPair
from emulate.verify.result import RunResult
from emulate.verify.run_spec import AS_IT_STANDS
from tests.emulate.verify.cases import Folder, loop
from tests.emulate.verify.fake_runner import FakeRunner, lab_of
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem

PROGRAMS = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 30, in <module>\nValueError: need an array'
OURS = (
    f'Traceback (most recent call last):\n  File "/home/me/train.py", line 9\n  File "{emulate.__file__}"\nTypeError: no rows'
)


def first_failure(folder: Folder, failure: str, switch: str) -> str | None:
    def step(made: Made, k: int) -> None:
        for r in range(4):
            made.step(k, {"w": [1.0]}, {"w": [1.0]}, replica=r)

    trace = loop(folder.made("1x4"), step)
    lab = lab_of(FakeRunner(lambda label, topology, plan: failure))
    pair = RunPair(trace, trace, run=RunResult("1x4", Topology.parse("1x4"), trace))
    assert lab.compare_switched(pair, [switch]) is None
    return lab.take_first_failure()


@pytest.mark.parametrize(
    ("switch", "failure", "told"),
    [
        (
            "replicas-summed",
            PROGRAMS,
            " told 4', on one device that gets 4 as the number of replicas, where the program itself raises an error: Val",
        ),
        ("replay", PROGRAMS, "', where the program itself raises an error: ValueError: need an array"),
        ("replay", OURS, "': TypeError: no rows"),
    ],
)
def test_whose_error_it_is_and_what_the_program_was_told_is_said(folder: Folder, switch: str, failure: str, told: str) -> None:
    said = first_failure(folder, failure, switch)
    assert said is not None
    assert told in said


@pytest.mark.parametrize(
    ("switch", "seed", "asked"),
    [
        ("batchnorm-synchronized", 0, [frozenset()]),  # it agrees with the reference as it is
        ("batchnorm-synchronized", 1, [frozenset(), frozenset({"batchnorm-synchronized"})]),
        ("no-clipping", 0, [frozenset({"no-clipping"})]),  # which may change what one device trains
    ],
)
def test_one_device_runs_again_only_where_a_switch_may_matter_there(
    folder: Folder, switch: str, seed: int, asked: list[frozenset[str]]
) -> None:
    problem = Problem(seed=seed, steps=3)
    runs: list[frozenset[str]] = []

    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace:
        if topology != REFERENCE:
            return folder.trained(problem, 4)
        of_device = problem if plan.switches else Problem(steps=3)
        if plan.perturb:
            return folder.noise(of_device)[plan.noise_seed - 1]
        runs.append(plan.switches)
        return folder.trained(of_device)

    trace = folder.trained(problem, 4)
    pair = RunPair(trace, trace, run=RunResult("1x4", Topology.parse("1x4"), trace))
    again = lab_of(FakeRunner(answer)).compare_switched(pair, [switch])
    assert again is not None
    assert runs == asked
    assert again.is_equivalent == (seed == 0 or len(asked) == 2)


def asking(folder: Folder, switches: list[str], **settings: Any) -> tuple[Lab, FakeRunner, int]:
    """Ask a lab that cannot evaluate steps for one switch after the other; return also how often it answers."""

    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace:
        return folder.trained(Problem(steps=3), topology.num_replicas)

    runner = FakeRunner(answer, evaluates=False, **settings)
    lab, trace = lab_of(runner), folder.trained(Problem(steps=3), 4)
    pair = RunPair(trace, trace, run=RunResult("1x4", Topology.parse("1x4"), trace))
    return lab, runner, sum(lab.compare_switched(pair, [switch]) is not None for switch in switches)


SWITCHES = ["no-clipping", "batchnorm-synchronized", "in-32-bits"]


def test_causes_get_no_further_run_after_six_starts(folder: Folder) -> None:
    lab, runner, answered = asking(folder, SWITCHES * 2)
    assert len(runner.started) <= STARTS
    assert lab.is_bounded
    assert answered == 2 * 2  # what is known already is answered in any case


def test_causes_get_some_starts_however_many_a_verdict_has_needed(folder: Folder) -> None:
    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace:
        return folder.trained(Problem(steps=3), topology.num_replicas)

    runner, trace = FakeRunner(answer, evaluates=False), folder.trained(Problem(steps=3), 4)
    lab, pair = lab_of(runner), RunPair(trace, trace, run=RunResult("1x4", Topology.parse("1x4"), trace))
    for number in range(2, 2 + STARTS):
        lab.run_topology(Topology(1, number))
    assert len(runner.started) == STARTS
    assert lab.compare_switched(pair, ["no-clipping"]) is not None


def test_a_thorough_search_has_no_bound(folder: Folder) -> None:
    lab, runner, answered = asking(folder, SWITCHES, thorough=True)
    assert len(runner.started) > STARTS
    assert (lab.is_bounded, answered) == (False, len(SWITCHES))


def test_a_bound_never_stops_what_every_verdict_needs(folder: Folder) -> None:
    lab, _, _ = asking(folder, SWITCHES)
    assert lab.run_topology(Topology.parse("2x2")).status == "ok"
    assert lab.repeat().status == "ok"


def test_rounding_is_not_measured_again_by_starts_of_the_program(folder: Folder) -> None:
    """What replays the replicas' rows has the noise of the same steps, where each noise run would be a start."""
    problem, wrong = Problem(steps=3), Problem(steps=3, seed=1)
    reference, topology, noise = folder.trained(problem), folder.trained(wrong, 4), folder.noise(problem)

    def answer(label: str, at: Topology, plan: ProbePlan) -> Trace:
        return noise[plan.noise_seed - 1] if plan.perturb else folder.trained(wrong if plan.replay else problem)

    runner = FakeRunner(answer, evaluates=False)
    lab = lab_of(runner)
    lab.pair(AS_IT_STANDS, topology)
    before = len(runner.started)
    again = lab.compare_switched(RunPair(reference, topology, run=RunResult("1x4", topology.topology, topology)), ["replay"])
    assert again is not None
    assert again.first_step("gradient") is None
    assert [label for label in runner.started[before:] if "noise" in label] in ([], ["noise 2", "noise 3"])
