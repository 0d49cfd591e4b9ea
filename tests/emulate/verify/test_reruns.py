"""Runs on the way to a cause that did not end well: which it was, and whose error, is told where nothing else is."""

from __future__ import annotations

import pytest

import emulate
from emulate.recorder import ProbePlan
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.recorded import RunPair
from emulate.verify.result import RunResult
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
