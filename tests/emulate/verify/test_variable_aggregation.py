"""Variables that a step assigns itself: a difference of their own is named, one that follows from another is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.joins import Joins, Member
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.made_traces import Made

GRADIENTS = np.random.default_rng(3).normal(size=(3, 4, 16)).astype("f4")
"""Local gradients: step, replica, element."""
ROWS = [f"row-{k}" for k in range(64)]


def trained(
    folder: Folder, replicas: int, *, times: float = 1.0, scale: float = 1.0, counts: bool = False, bent: Any = 0.0
) -> Trace:
    """Steps whose average of the weights (or counter) changes `times` as much, with gradients `scale` times as large."""

    def step(made: Made, k: int) -> None:
        weights, average = np.ones(16, "f4"), np.ones(16, "f4")
        for one in GRADIENTS[: k + 1]:
            weights = weights - np.float32(0.1 * scale) * (
                one.sum(axis=0, dtype="f4") + np.float32(replicas) * np.float32(bent)
            )
            average = average + np.float32(0.05 * times) * (weights - average)
        state = {"count": np.array(int(times) * (k + 1), "i4")} if counts else {"average": average}
        for r in range(replicas):
            part = (GRADIENTS[k].reshape(replicas, -1, 16).sum(axis=1)[r] + np.float32(bent)) * np.float32(scale)
            rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            made.step(k, {"w": part}, {"w": weights}, replica=r, rows=rows, objective=scale / replicas)
            made.state(k, state, r)

    made = folder.made(f"1x{replicas}")
    for r in range(replicas):
        made.initial({"average": np.ones(16, "f4")}, r, frozen=["average"])
    return loop(made, step, weights=16)


def judged(folder: Folder, *, counts: bool = False, **there: Any) -> Judgement:
    return judge(case_of(trained(folder, 1, counts=counts), trained(folder, 4, counts=counts, **there)))


def test_variables_that_are_alike_are_equivalent(folder: Folder) -> None:
    assert judged(folder).verdict == "equivalent"


def test_a_mean_of_what_replicas_have_parts_of_is_advice_where_the_update_makes_up_for_it(folder: Folder) -> None:
    found = judged(folder, times=0.25)
    assert (found.verdict, codes(found)) == ("equivalent", ["variable-aggregation"])
    assert found.causes[0].advice
    assert "change / change on one device = 0.2500" in found.causes[0].evidence
    assert judged(folder, times=0.5).verdict == "divergent"


def test_an_average_that_takes_a_step_for_each_replica_is_named_with_their_number(folder: Folder) -> None:
    found = judged(folder, times=4.0)
    assert codes(found) == ["variable-aggregation"]
    assert "average is summed: a step changes it 4x" in found.causes[0].summary
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.step) == ("variable", 0)


def test_an_average_that_differs_by_no_such_number_is_named_without_one(folder: Folder) -> None:
    found = judged(folder, times=1.3)
    assert codes(found) == ["variable-aggregation"]
    assert "From step 0 on the replicas assign other values" in found.causes[0].summary


def test_an_average_of_weights_that_are_wrong_follows_from_them(folder: Folder) -> None:
    assert codes(judged(folder, scale=4.0)) == ["loss-scaling"]


def test_a_difference_that_nothing_explains_names_what_the_step_assigns_and_differs_too(folder: Folder) -> None:
    found = judged(folder, bent=0.1 * np.sin(np.arange(16.0)), times=1.3)
    assert codes(found) == ["unexplained"]
    assert "in the same step average, which the step assigns, differs too" in found.causes[0].evidence
    assert "Look first at the variables that the step assigns" in found.causes[0].fix


def test_gradients_that_depend_on_a_counter_follow_from_it(folder: Folder) -> None:
    found = judged(folder, times=4.0, scale=4.0, counts=True)
    assert codes(found) == ["variable-aggregation"]
    assert "count is 4, 1 on one device" in found.causes[0].evidence


def test_copies_that_differ_between_replicas_are_named_where_gradients_differ_later(folder: Folder) -> None:
    other = np.random.default_rng(4).normal(size=16).astype("f4")

    def made(replicas: int) -> Trace:
        def step(made: Made, k: int) -> None:
            for r in range(replicas):
                part = GRADIENTS[k].reshape(replicas, -1, 16).sum(axis=1)[r]
                part = part + other if r == 1 and k == 1 else part  # made of what it alone kept
                weights = np.ones(16, "f4") - np.float32(0.1) * GRADIENTS[: k + 1].sum(axis=(0, 1), dtype="f4")
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                made.step(k, {"w": part}, {"w": weights}, replica=r, rows=rows, objective=1 / replicas)
                made.state(k, {"average": np.full(16, 1 + (r == 1), "f4")}, r)

        return loop(folder.made(f"1x{replicas}"), step, weights=16)

    found = judge(case_of(made(1), made(4)))
    assert codes(found) == ["variable-aggregation"]
    assert found.causes[0].summary.startswith("Each replica has its own value of average, which the step assigns")
    assert found.causes[0].evidence.startswith("After step 0 the copies differ; gradients and weights agree until step 0")


def test_a_layers_own_variable_that_no_gradient_trains_is_named_too(folder: Folder) -> None:
    def made(replicas: int, times: float) -> Trace:
        def step(made: Made, k: int) -> None:
            weights = np.ones(16, "f4")
            for one in GRADIENTS[: k + 1]:
                weights = weights - np.float32(0.1) * one.sum(axis=0, dtype="f4")
            scale = np.full(4, 1 + times * (k + 1), "f4")
            for r in range(replicas):
                part = GRADIENTS[k].reshape(replicas, -1, 16).sum(axis=1)[r]
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                values = {"w": weights, "scale": scale}
                made.step(k, {"w": part}, values, replica=r, rows=rows, objective=1 / replicas, frozen=["scale"])

        trace = folder.made(f"1x{replicas}")
        for r in range(replicas):
            trace.initial({"w": np.ones(16, "f4"), "scale": np.ones(4, "f4")}, r, frozen=["scale"])
        return loop(trace, step, weights=16)

    found = judge(case_of(made(1, 1.0), made(4, 4.0)))
    assert codes(found) == ["variable-aggregation"]
    assert "scale is summed: a step changes it 4x" in found.causes[0].summary
    assert judge(case_of(made(1, 1.0), made(4, 1.0))).verdict == "equivalent"


def _keeping(folder: Folder, replicas: int, bank: Any, of_first: bool = False) -> Trace:
    """Steps that are right, and put rows into a bank."""

    def step(made: Made, k: int) -> None:
        weights = np.ones(16, "f4") - np.float32(0.1) * GRADIENTS[: k + 1].sum(axis=(0, 1), dtype="f4")
        for r in range(replicas):
            part = GRADIENTS[k].reshape(replicas, -1, 16).sum(axis=1)[r]
            rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            made.step(k, {"w": part}, {"w": weights}, replica=r, rows=rows, objective=1 / replicas)
            made.state(k, {"bank": bank}, r)

    made = folder.made(f"1x{replicas}")
    made.event({"event": "program", "of_first": ["bank"] if of_first else []})
    return loop(made, step, weights=16)


BANK = np.random.default_rng(5).normal(size=(12, 6)).astype("f4")


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        pytest.param(BANK[::-1], [], id="in another order"),
        pytest.param(np.concatenate([BANK[:6], BANK[:6]]), ["variable-aggregation"], id="of some replicas"),
    ],
)
def test_rows_that_a_variable_keeps_are_compared_in_whatever_order(folder: Folder, ours: Any, expected: list[str]) -> None:
    noise = [_keeping(folder, 1, np.random.default_rng(k).permutation(BANK)) for k in range(3)]
    found = judge(case_of(_keeping(folder, 1, BANK), _keeping(folder, 2, ours), noise))
    assert codes(found) == expected
    assert found.not_compared == ()


def test_a_number_of_the_first_replica_that_is_only_shown_is_nothing_to_speak_of(folder: Folder) -> None:
    noise = [_keeping(folder, 1, np.float32(k), of_first=True) for k in range(3)]
    found = judge(
        case_of(_keeping(folder, 1, np.float32(7), of_first=True), _keeping(folder, 2, np.float32(9), of_first=True), noise)
    )
    assert (found.verdict, codes(found), found.not_compared) == ("equivalent", [], ())


def test_a_variable_that_is_another_for_another_order_of_the_rows_is_said_not_to_be_compared(folder: Folder) -> None:
    noise = [_keeping(folder, 1, np.random.default_rng(k).normal(size=BANK.shape).astype("f4")) for k in range(3)]
    found = judge(case_of(_keeping(folder, 1, BANK), _keeping(folder, 2, 0.5 * BANK), noise))
    assert (found.verdict, codes(found)) == ("equivalent", [])
    assert found.not_compared == ("variable bank (it depends on the order of the examples in a batch)",)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        pytest.param(1.0, [], id="to be shown"),
        pytest.param(1.3, ["variable-aggregation"], id="a rate of it"),
        pytest.param(2.0, ["loss-scaling"], id="another cause"),
    ],
)
def test_a_number_of_the_first_replica_is_named_where_what_is_made_of_it_differs(
    folder: Folder, scale: float, expected: list[str]
) -> None:
    def made(replicas: int, later: float) -> Trace:
        def step(made: Made, k: int) -> None:
            factors = np.array([1.0, later, later], "f4")[: k + 1, None]
            weights = np.ones(16, "f4") - np.float32(0.1) * (factors * GRADIENTS[: k + 1].sum(axis=1)).sum(axis=0, dtype="f4")
            for r in range(replicas):
                part = np.float32(factors[k, 0]) * GRADIENTS[k].reshape(replicas, -1, 16).sum(axis=1)[r]
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                made.step(k, {"w": part}, {"w": weights}, replica=r, rows=rows, objective=1 / replicas)
                made.state(k, {"seen": np.array(8 // replicas * (k + 1), "i4")}, r)

        traced = folder.made(f"1x{replicas}")
        traced.event({"event": "program", "of_first": ["seen"]})
        return loop(traced, step, weights=16)

    found = judge(case_of(made(1, 1.0), made(2, scale)))
    assert codes(found) == expected
    assert any("the first replica assigns to seen" in note for note in found.notes) == ("variable-aggregation" not in expected)
    if expected == ["variable-aggregation"]:
        assert "seen is 4 after step 0, 8 on one device; gradients and weights agree until step 0" in found.causes[0].evidence


@pytest.mark.parametrize(("share", "expected"), [(1.0, []), (0.5, ["variable-aggregation"])])
def test_parts_that_replicas_keep_are_compared_by_what_they_make_together(
    folder: Folder, share: float, expected: list[str]
) -> None:
    def accumulating(replicas: int) -> Trace:
        def step(made: Made, k: int) -> None:
            parts = GRADIENTS[: k + 1].sum(axis=0).reshape(replicas, -1, 16).sum(axis=1)
            weights = np.ones(16, "f4") - np.float32(0.1) * GRADIENTS[: k + 1].sum(axis=(0, 1))
            for r in range(replicas):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                gradient = GRADIENTS[k].reshape(replicas, -1, 16).sum(axis=1)[r]
                values = {"w": weights, "sum": parts[r] * np.float32(1 if replicas == 1 else share)}
                made.step(k, {"w": gradient}, values, replica=r, rows=rows, objective=1 / replicas, frozen=["sum"])

        return loop(folder.made(f"1x{replicas}"), step, weights=16)

    assert codes(judge(case_of(accumulating(1), accumulating(4)))) == expected


def _with_a_report(folder: Folder, replicas: int, *, loss: float = 1.0, seen: int = 1, reads: bool = False) -> Trace:
    """Steps with a loss that is some times as large, and a counter that they change by `seen`."""

    def step(made: Made, k: int) -> None:
        weights = np.ones(16, "f4") - np.float32(0.1 * loss) * GRADIENTS[: k + 1].sum(axis=(0, 1), dtype="f4")
        for r in range(replicas):
            part = np.float32(loss) * GRADIENTS[k].reshape(replicas, -1, 16).sum(axis=1)[r]
            rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            made.step(k, {"w": part}, {"w": weights}, replica=r, rows=rows, objective=loss / replicas)
            made.state(k, {"steps_seen": np.array(seen * (k + 1), "i8")}, r)

    made = folder.made(f"1x{replicas}")
    made.event({"event": "program", "reads": {"steps_seen": reads}})
    return loop(made, step, weights=16)


def test_a_counter_that_no_step_reads_does_not_hide_why_gradients_differ(folder: Folder) -> None:
    def judged(**there: Any) -> Judgement:
        return judge(case_of(_with_a_report(folder, 1), _with_a_report(folder, 4, seen=4, **there)))

    found = judged(loss=4.0)
    assert (codes(found), found.not_compared) == (["loss-scaling", "variable-aggregation"], ())
    assert "steps_seen is summed: a step changes it 4x" in found.causes[1].summary
    assert codes(judged()) == ["variable-aggregation"]
    assert codes(judged(loss=4.0, reads=True)) == ["variable-aggregation"]


OTHER = np.random.default_rng(6).normal(size=(3, 4, 16)).astype("f4")
"""What replicas add to gradients where examples meet."""


def _warming_up(folder: Folder, replicas: int, kind: str, *, reads: bool) -> Trace:
    """Steps that are right until examples meet in the last one, and that keep a mean of their own examples."""

    def step(made: Made, k: int) -> None:
        of_all = (
            GRADIENTS + (OTHER if replicas > 1 else OTHER[:, ::-1] * np.float32(0.7)) * np.array([0, 0, 1], "f4")[:, None, None]
        )
        weights = np.ones(16, "f4") - np.float32(0.1) * of_all[: k + 1].sum(axis=(0, 1), dtype="f4")
        for r in range(replicas):
            part = of_all[k].reshape(replicas, -1, 16).sum(axis=1)[r]
            rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            loss = (1 + (0.3 + 0.1 * r if k == 2 else 0)) / replicas
            made.step(k, {"w": part}, {"w": weights}, replica=r, rows=rows, objective=loss)
            made.state(k, {"last": np.array(k + (r if kind == "copies" else 1 / replicas), "f4")}, r)

    made = folder.made(f"1x{replicas}")
    made.event({"event": "program", "reads": {"last": reads}, "of_first": ["last"] if kind == "of first" else []})
    return loop(made, step, weights=16)


@pytest.mark.parametrize("kind", ["of first", "copies"])
def test_a_number_that_no_step_reads_is_not_blamed_for_gradients(folder: Folder, kind: str) -> None:
    found = judge(case_of(_warming_up(folder, 1, kind, reads=False), _warming_up(folder, 4, kind, reads=False)))
    assert (codes(found), found.not_compared) == (["unexplained"], ())
    again = judge(case_of(_warming_up(folder, 1, kind, reads=True), _warming_up(folder, 4, kind, reads=True)))
    assert codes(again) == ["variable-aggregation"]


@pytest.mark.parametrize(
    ("kind", "besides"), [("of first", []), ("copies", []), ("of all", ["variable-aggregation"])], ids=lambda value: str(value)
)
def test_what_experiments_find_comes_before_a_number_that_may_be_read(folder: Folder, kind: str, besides: list[str]) -> None:
    case = case_of(_warming_up(folder, 1, kind, reads=True), _warming_up(folder, 4, kind, reads=True))
    member = Member("MatMul", "MatMul", "rows", value_alone=False, of_data=False, scales=False)
    case.lab.find_joins = lambda *_, **__: Joins("sgd", 2, (member,))  # type: ignore[method-assign]
    found = judge(case)
    assert codes(found) == [*besides, "in-batch-negatives"]
    assert not any("differs" in note for note in found.not_compared)
