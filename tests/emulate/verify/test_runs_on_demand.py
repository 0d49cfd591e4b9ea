"""Runs on one device are made where they can tell something, and no verdict hangs on those that are not made."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from emulate.topology import REFERENCE
from emulate.trace import Trace
from emulate.verify.case import Case
from emulate.verify.compare import compare, compare_enough
from emulate.verify.judge import judge
from emulate.verify.result import RunResult
from emulate.verify.yardstick import NOISE_RUNS, NoiseRuns
from tests.emulate.verify.cases import Folder, codes
from tests.emulate.verify.simulation import Problem, Weights


class Started:
    """Noise runs that end at once; those with a number in `failing` fail."""

    def __init__(self, traces: list[Trace], failing: tuple[int, ...] = ()) -> None:
        self.numbers: list[int] = []
        self._traces, self._failing = traces, failing
        self.runs = NoiseRuns(self._start, len(traces))

    def _start(self, numbers: Sequence[int]) -> list[Future[RunResult]]:
        self.numbers += numbers
        return [self._result(number) for number in numbers]

    def _result(self, number: int) -> Future[RunResult]:
        result = RunResult(f"noise {number}", REFERENCE, self._traces[number - 1])
        result.status = "failed" if number in self._failing else "ok"
        run: Future[RunResult] = Future()
        run.set_result(result)
        return run


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def noise(folder: Folder) -> list[Trace]:
    return folder.noise(Problem(steps=4))


def test_the_first_noise_run_is_made_alone_and_the_others_when_they_are_asked_for(noise: list[Trace]) -> None:
    started = Started(noise)
    assert list(started.runs[:1]) == noise[:1]
    assert started.numbers == [1]
    assert list(started.runs) == noise
    assert started.numbers == [1, 2, 3] == list(range(1, NOISE_RUNS + 1))


def test_a_noise_run_that_failed_is_left_out(noise: list[Trace]) -> None:
    started = Started(noise, failing=(1,))
    assert list(started.runs[:1]) == []
    assert list(started.runs) == noise[1:]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("replicas", [1, 4])
def test_what_agrees_beside_one_noise_run_agrees_beside_all(folder: Folder, seed: int, replicas: int) -> None:
    problem = Problem(seed=seed, steps=8)
    reference, topology, started = folder.trained(problem), folder.trained(problem, replicas), Started(folder.noise(problem))
    assert compare_enough(reference, topology, started.runs).is_equivalent
    assert started.numbers == [1]
    assert compare(reference, topology, list(started.runs)).is_equivalent


def reversed_sum(locals_: list[Weights]) -> Weights:
    """Return the sum in an order that no cause explains."""
    return {name: np.flip(sum(one[name] for one in locals_)) for name in locals_[0]}


def case(folder: Folder, topology: Trace, noise: list[Trace], repeats: list[str], same_seed: Trace | None = None) -> Case:
    problem = Problem(steps=4)

    def repeat() -> Trace:
        repeats.append("made")
        return folder.trained(problem)

    return Case(folder.trained(problem), topology, noise, repeat=repeat, same_seed=same_seed)


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
