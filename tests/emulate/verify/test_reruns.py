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
from emulate.verify.yardstick import Variation, Yardstick, Yardsticks
from tests.emulate.verify.cases import Folder, loop
from tests.emulate.verify.made_traces import Made

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
