"""Of what experiments have found the smallest set stays, and each member of it goes to the cause that it shows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from emulate.evaluate.joins import needed
from emulate.verify.joins import Joins

NAMES = [f"tensor {number}" for number in range(12)]


@given(st.lists(st.sampled_from(NAMES), unique=True), st.sets(st.sampled_from(NAMES)))
def test_exactly_what_is_needed_stays(candidates: list[str], wanted: set[str]) -> None:
    target = wanted & {*candidates}

    def is_enough(some: Collection[str]) -> bool:
        return target <= {*some}

    assert needed(candidates, is_enough) == [name for name in candidates if name in target]


@given(st.lists(st.sampled_from(NAMES), unique=True, min_size=1), st.data())
def test_of_two_that_do_the_same_the_later_candidate_stays(candidates: list[str], data: st.DataObject) -> None:
    pair = data.draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=2, unique=True))
    last = max(pair, key=candidates.index)
    assert needed(candidates, lambda some: bool({*pair} & {*some})) == [last]


def member(name: str, kind: str, **about: Any) -> dict[str, Any]:
    return {"name": name, "operation": "Sum", "kind": kind, "value_alone": True, "of_data": True, "scales": True} | about


def joins(*members: dict[str, Any]) -> Joins:
    found = Joins.read({"members": members, "terms": [], "scale": 1.0}, "sgd", 0)
    assert found is not None
    return found


def names(some: Any) -> list[str]:
    return [one.name for one in some]


def test_each_member_goes_to_the_cause_that_it_shows() -> None:
    found = joins(
        member("count", "count"),
        member("largest", "maximum"),
        member("rows", "rows", of_data=False, scales=False),
        member("statistic", "sum", scales=False),
        member("chosen by the model", "sum", of_data=False),
        member("of the model", "sum", of_data=False, value_alone=False),
        member("examples", "number"),
        member("replicas", "constant"),
    )
    assert names(found.normalizers) == ["count", "largest", "chosen by the model"]
    assert {*names(found.meetings)} == {"rows", "statistic", "of the model"}
    assert (names(found.numbers), names(found.constants)) == (["examples"], ["replicas"])


def test_a_sum_and_what_divides_it_are_one_mean() -> None:
    found = joins(member("mean", "other", of_data=False), member("mean", "number"), member("alone", "number"))
    assert [(one.name, one.kind, one.of_data) for one in found.members] == [("mean", "mean", False), ("alone", "number", True)]


def test_only_one_sum_of_the_model_makes_a_loss_a_function_of_it() -> None:
    of_model = member("loss", "sum", of_data=False)
    assert joins(of_model).is_of_one_sum
    assert joins(member("loss", "mean", of_data=False)).is_of_one_sum
    for others in ([member("count", "sum")], [of_model, member("count", "count")], [member("rows", "rows", of_data=False)]):
        assert not joins(*others).is_of_one_sum


def test_what_layers_mix_by_design_is_left_out() -> None:
    found = joins(member("model/norm_1/moments/mean", "sum"), member("norms/total", "sum"))
    assert names(found.without(["norm"]).members) == ["norms/total"]


def test_without_an_answer_nothing_is_said() -> None:
    assert Joins.read({"refused": "its function takes batches of one size alone"}, "sgd", 0) is None


def test_what_leaves_nothing_to_explain_tells_nothing() -> None:
    assert not joins(member("model/norm_1/moments/mean", "sum")).without(["norm"]).tells
    assert joins(member("count", "count")).tells
