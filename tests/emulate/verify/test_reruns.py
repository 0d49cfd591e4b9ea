"""Runs on the way to a cause that did not end well: which it was, and whose error, is told where nothing else is."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast

import pytest

import emulate
from emulate.program import Program
from emulate.topology import REFERENCE, Topology
from emulate.verify.reruns import Reruns
from emulate.verify.result import RunResult
from emulate.verify.yardstick import NoiseRuns, Variation, Yardstick, Yardsticks
from tests.emulate.verify.cases import Folder, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem

PROGRAMS = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 30, in <module>\nValueError: need an array'
OURS = (
    f'Traceback (most recent call last):\n  File "/home/me/train.py", line 9\n  File "{emulate.__file__}"\nTypeError: no rows'
)


class Failing:
    """Reference runs that all raise, instead of those of a verification."""

    def __init__(self, failure: str) -> None:
        self._failure = failure

    def reference(self, variation: Variation) -> Yardstick:
        run: Future[RunResult] = Future()
        result = RunResult(variation.label("reference"), REFERENCE, None)
        result.status, result.failure = "failed", self._failure
        run.set_result(result)
        return Yardstick(run)

    with_noise = reference


def first_failure(folder: Folder, failure: str, switch: str) -> str | None:
    def step(made: Made, k: int) -> None:
        for r in range(4):
            made.step(k, {"w": [1.0]}, {"w": [1.0]}, replica=r)

    trace = loop(folder.made("1x4"), step)
    reruns = Reruns(cast(Yardsticks, Failing(failure)), cast(Program, None))
    assert reruns.make([switch], RunResult("1x4", Topology.parse("1x4"), trace), trace, Variation()) is None
    return reruns.take_first_failure()


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


class Known:
    """Runs of simulated trainings: the reference as it is, and with a switch the one given for it."""

    def __init__(self, folder: Folder, topology: Problem, switched: Problem) -> None:
        self.asked: list[frozenset[str]] = []
        self._folder, self._topology, self._switched = folder, topology, switched

    def topology(self, topology: Topology, variation: Variation) -> Future[RunResult]:
        return ended(RunResult(str(topology), topology, self._folder.trained(self._topology, 4)))

    def with_noise(self, variation: Variation) -> Yardstick:
        self.asked.append(variation.switches)
        problem = self._switched if variation.switches else Problem(steps=3)
        yardstick = Yardstick(ended(RunResult("reference", REFERENCE, self._folder.trained(problem))))
        noise = self._folder.noise(problem)
        yardstick.noise = NoiseRuns(
            lambda numbers: [ended(RunResult("noise", REFERENCE, noise[number - 1])) for number in numbers]
        )
        return yardstick


def ended(result: RunResult) -> Future[RunResult]:
    run: Future[RunResult] = Future()
    run.set_result(result)
    return run


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
    topology = Problem(seed=seed, steps=3)
    known = Known(folder, topology, topology)
    run = RunResult("1x4", Topology.parse("1x4"), folder.trained(topology, 4))
    assert run.trace is not None
    again = Reruns(cast(Yardsticks, known), cast(Program, None)).make([switch], run, run.trace, Variation())
    assert again is not None
    assert known.asked == asked
    assert again.compare().is_equivalent == (seed == 0 or len(asked) == 2)
