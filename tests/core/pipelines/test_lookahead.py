"""What is made ahead comes in order, and leaves no thread behind."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gpudist_core.pipelines.lookahead import LookAhead


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpudist-lookahead")]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert threads() == []


def tasks(count: int, made: list[int] | None = None, closed: list[bool] | None = None) -> Iterator[Callable[[], int]]:
    def make(number: int) -> int:
        # Later ones are done sooner.
        time.sleep(0.002 * ((count - number) % 3))
        if made is not None:
            made.append(number)
        return number

    try:
        for number in range(count):
            yield partial(make, number)
    finally:
        if closed is not None:
            closed.append(True)


@pytest.mark.parametrize(("ahead", "workers"), [(0, 1), (1, 1), (2, 1), (4, 3)])
def test_results_come_in_order(ahead: int, workers: int) -> None:
    assert list(LookAhead(tasks(20), ahead, workers)) == list(range(20))


def test_no_more_than_asked_is_made_ahead() -> None:
    made: list[int] = []
    results = LookAhead(tasks(20, made), 3, 2)
    _until(lambda: len(made) == 3)
    time.sleep(0.02)
    assert sorted(made) == [0, 1, 2]
    assert next(results) == 0
    _until(lambda: len(made) == 4)
    results.close()


def test_threads_end_when_the_iterator_is_dropped() -> None:
    closed: list[bool] = []
    results = LookAhead(tasks(1000, closed=closed), 4, 3)
    next(results)
    assert len(threads()) == 3
    del results
    gc.collect()
    assert threads() == []
    assert closed == [True]


def test_an_error_comes_in_its_turn_with_its_own_traceback_and_ends_the_threads() -> None:
    def faulty() -> Iterator[Callable[[], int]]:
        yield lambda: 0
        yield lambda: 1
        yield divide_by_zero
        yield lambda: 3

    def divide_by_zero() -> int:
        return 1 // 0

    results = LookAhead(faulty(), 4, 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert "divide_by_zero" in "".join(traceback.format_exception(caught.value))
    assert threads() == []
    assert list(results) == []


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_generator_that_fails_is_an_error_not_an_end(ahead: int) -> None:
    def faulty() -> Iterator[Callable[[], int]]:
        yield lambda: 0
        raise OSError("the disk is gone")

    results = LookAhead(faulty(), ahead, 2)
    assert next(results) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_function_that_raises_stop_iteration_does_not_end_the_epoch(ahead: int) -> None:
    def stops() -> int:
        raise StopIteration

    with pytest.raises(RuntimeError, match="a function of the pipeline raised StopIteration, which would end the epoch early"):
        list(LookAhead(iter([stops]), ahead, 1))


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.001)
