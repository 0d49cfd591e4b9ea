"""What is told of the lives of a program: which fault made which restart, and hosts that go on from different steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate.faults import Fault, FillDisk, Fired, Kill, Late, Link, Preempt, Slow
from emulate.recorder import ProbePlan
from emulate.report.runs import outcome
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.causes import find_causes
from emulate.verify.recovery import Lives, Recovery
from emulate.verify.result import RunResult
from emulate.verify.verdict import FaultReport
from tests.emulate.verify.cases import Folder, case_of
from tests.emulate.verify.made_traces import Made

FAULTS = tuple(Kill(host=1, step=step) for step in (2, 5, 9))


def life(folder: Folder, *events: tuple[int, dict[str, Any]]) -> Trace:
    made = folder.made("2x1")
    for host in range(2):
        made.event({"event": "end", "reason": "raised"}, host)
    for host, event in events:
        made.event(event, host)
    return made.trace()


def resumed(host: int, step: int) -> tuple[int, dict[str, Any]]:
    return host, {"event": "resumed", "optimizer": "sgd", "step": step}


def begun(step: int) -> tuple[int, dict[str, Any]]:
    return 0, {"event": "begun", "optimizer": "sgd", "step": step}


def recovery(lives: list[Trace], fired_by_life: list[int], faults: tuple[Fault, ...] = FAULTS) -> Recovery:
    """Of lives by whose ends so many faults had come to pass."""
    known = Lives(faults)
    for trace, count in zip(lives, fired_by_life, strict=True):
        fired = [Fired(number, fault, getattr(fault, "step", None)) for number, fault in enumerate(faults[:count])]
        known.add(RunResult("2x1", Topology(2, 1), None), ProbePlan(trace=trace.directory), fired)
    return Recovery(known, lives[0])


def test_a_restart_is_that_of_the_last_fault_before_it(folder: Folder) -> None:
    lives = [life(folder), *(life(folder, resumed(0, step), resumed(1, step)) for step in (1, 1, 4))]
    told = recovery(lives, [1, 1, 2, 2])
    assert [told.restarts_of(number) for number in range(3)] == [[0, 1], [2], []]
    assert told.went_on_from == [1, 1, 4]
    assert told.at_odds == {}


@pytest.mark.parametrize(
    "harmless", [Link(latency=0.02), FillDisk(host=0, step=1), Slow(host=0, seconds=1.0), Late(host=1, seconds=1.0)]
)
def test_a_restart_is_that_of_the_fault_that_ends_a_host_and_of_another_where_none_does(
    folder: Folder, harmless: Fault
) -> None:
    lives = [life(folder), life(folder, resumed(0, 1), resumed(1, 1))]
    told = recovery(lives, [2, 2], (harmless, Kill(host=1, step=2)))
    assert [told.restarts_of(number) for number in range(2)] == [[], [0]]
    alone = recovery(lives, [1, 1], (harmless,))
    assert alone.restarts_of(0) == [0]


def test_a_fault_after_the_step_at_which_runs_are_held_is_told_so(folder: Folder) -> None:
    told = recovery([life(folder)], [0], (Kill(host=1, step=21), Kill(host=1, step=20)))
    held, ended = told.missed
    assert held == (
        "A fault must happen. Received: fault='kill:host=1,step=21', which did not happen: gpudist stops every run after step "
        "20. Use --steps 21 or more, or --steps all."
    )
    assert "fault='kill:host=1,step=20', which did not happen: the program ended before" in ended


def test_a_program_that_leaves_with_exit_code_0_when_told_is_said_to_need_another(folder: Folder) -> None:
    told = recovery([steps(folder, range(5))], [1], (Preempt(host=0, step=5),))
    told = Recovery(told.lives, steps(folder, range(12)))
    assert outcome(told.reports()[0]) == (
        "in step 5 (counted from 1), received SIGTERM and ended with exit code 0, so gpudist did not restart it, "
        "a different number of steps"
    )
    (found,) = find_causes(case_of(told.without, told.without, recovery=told))
    assert found.code == "recovered-differently"
    assert "no restart; sgd made 5 steps in all, 12 without the fault" in found.evidence
    assert found.fix.startswith("Save, and end with another exit code than 0. `gpudist launch --restarts` restarts")


def test_an_update_that_differs_beside_an_equal_gradient_is_the_optimizers(folder: Folder) -> None:
    def trained(numbers: range, rate: float) -> Trace:
        made = folder.made("2x1")
        for replica in range(2):
            made.initial({"w": np.full(4, 1.0 - 0.1 * numbers[0], "f4")}, replica=replica, host=replica)
            for k in numbers:
                after = {"w": np.full(4, 1.0 - rate * (k + 1), "f4")}
                rows = [f"row-{2 * k + replica}"]
                made.step(k, {"w": np.ones(4, "f4")}, after, replica=replica, host=replica, rows=rows, objective=0.5)
        for host in range(2):
            made.event(resumed(host, numbers[0])[1], host)
        return made.trace()

    told = recovery([steps(folder, range(5)), trained(range(4, 12), 0.2)], [1, 1])
    told = Recovery(told.lives, steps(folder, range(12)))
    (found,) = find_causes(case_of(told.without, told.without, recovery=told))
    assert found.code == "recovered-differently"
    assert found.fix.startswith("The gradient of that step agrees")


def test_steps_are_told_as_the_optimizer_counts_them_also_where_it_began_with_some(folder: Folder) -> None:
    told = recovery([life(folder, begun(6)), life(folder, resumed(0, 3), resumed(1, 3))], [1, 1])
    assert told.lives.begun == {"sgd": 6}
    assert told.went_on_from == [9]


def test_hosts_that_go_on_from_different_steps_are_told_apart(folder: Folder) -> None:
    told = recovery([life(folder, begun(2)), life(folder, resumed(0, 3), resumed(1, 4))], [1, 1])
    assert told.at_odds == {0: 5, 1: 6}


def steps(folder: Folder, numbers: range, *events: tuple[int, dict[str, Any]]) -> Trace:
    made = folder.made("2x1")
    for host, event in events:
        made.event(event, host)
    _train(made, numbers)
    return made.trace()


def _train(made: Made, numbers: range) -> None:
    for replica in range(2):
        made.initial({"w": np.full(4, 1.0 - 0.1 * numbers[0], "f4")}, replica=replica, host=replica)
        for k in numbers:
            after = {"w": np.full(4, 1.0 - 0.1 * (k + 1), "f4")}
            rows = [f"row-{2 * k + replica}"]
            made.step(k, {"w": np.ones(4, "f4")}, after, replica=replica, host=replica, rows=rows, objective=0.5)


@pytest.mark.parametrize(
    ("last", "other", "result"),
    [
        (range(4, 12), None, "identical"),
        (range(4, 8), ("sgd", 8, 12), "different"),
        (range(4, 16), ("sgd", 16, 12), "different"),
    ],
)
def test_a_program_that_makes_fewer_or_more_steps_after_a_restart_ends_otherwise(
    folder: Folder, last: range, other: Any, result: str
) -> None:
    lives = [steps(folder, range(5)), steps(folder, last, resumed(0, 4), resumed(1, 4))]
    told = recovery(lives, [1, 1])
    told = Recovery(told.lives, steps(folder, range(12)))
    assert (told.other_steps, told.result) == (other, result)
    assert outcome(told.reports()[0]).endswith(
        "a different number of steps" if other else "resumed after 4 steps, the same result bit for bit"
    )


@pytest.mark.parametrize(("kept", "result"), [(0.25, "identical"), (0.5, "different")])
def test_what_a_program_puts_in_the_place_of_its_weights_after_a_restart_is_compared(
    folder: Folder, kept: float, result: str
) -> None:
    def ends_with(value: float, made: Made) -> Trace:
        made.left({"w": np.full(4, value, "f4")})
        return made.trace()

    def trained(numbers: range) -> Made:
        made = folder.made("2x1")
        _train(made, numbers)
        return made

    last = trained(range(4, 12))
    for host in range(2):
        last.event(resumed(host, 4)[1], host)
    told = recovery([steps(folder, range(5)), ends_with(kept, last)], [1, 1])
    told = Recovery(told.lives, ends_with(0.25, trained(range(12))))
    assert (told.other_steps, told.result) == (None, result)
    if result == "different":
        found = find_causes(case_of(told.without, told.without, recovery=told))
        assert [cause.code for cause in found] == ["recovered-differently"]
        assert "in w at the end, after all 12 steps" in found[0].evidence
        assert "EarlyStopping" in found[0].fix


@pytest.mark.parametrize(
    ("fault", "restarts", "said"),
    [
        (
            "preempt:host=1,step=5",
            0,
            "received SIGTERM, but ran to its end before SIGKILL, so its recovery was not tested, the",
        ),
        ("preempt:host=1,step=5", 1, "recovered after 1 restart, resumed after 3 steps, the same result bit for bit"),
        ("stop:host=1,step=5,seconds=2", 0, "recovered without a restart, the same result bit for bit"),
    ],
)
def test_a_host_that_was_told_to_leave_and_stayed_is_not_said_to_have_recovered(fault: str, restarts: int, said: str) -> None:
    went = (3,) * restarts
    report = FaultReport(fault, fired=True, step=5, recovered=True, restarts=restarts, went_on_from=went, result="identical")
    assert outcome(report).startswith(f"in step 5 (counted from 1), {said}")


def test_a_host_that_restored_nothing_went_on_from_the_beginning(folder: Folder) -> None:
    lives = [steps(folder, range(5)), steps(folder, range(1), resumed(0, 4))]
    assert recovery(lives, [1, 1]).at_odds == {0: 4, 1: 0}


def test_where_a_program_restores_weights_and_begins_its_rows_anew_it_went_on_from_those_weights(folder: Folder) -> None:
    def without(first_row: int, numbers: range, begin: int = 0) -> Trace:
        """Steps of an optimizer that restores no count: each numbers its own from 0."""
        made = folder.made("2x1")
        for replica in range(2):
            made.initial({"w": np.full(4, 1.0 - 0.1 * numbers[0], "f4")}, replica=replica, host=replica)
            for k in numbers:
                after = {"w": np.full(4, 1.0 - 0.1 * (k + 1), "f4")}
                rows = [f"row-{2 * (k - begin + first_row) + replica}"]
                made.step(k - begin, {"w": np.ones(4, "f4")}, after, replica=replica, host=replica, rows=rows, objective=0.5)
        return made.trace()

    told = recovery([without(0, range(6)), without(0, range(4, 12), begin=4)], [1, 1])
    told = Recovery(told.lives, without(0, range(12)))
    assert told.went_on_from == [4]
