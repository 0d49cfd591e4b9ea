"""Updates that are larger by one factor where the gradients agree: a learning rate that follows the size of the cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from emulate.trace import Trace
from emulate.verify.case import Case
from emulate.verify.judge import judge
from emulate.verify.run_spec import RATE
from tests.emulate.verify.cases import Folder, Rerun, case_of, codes
from tests.emulate.verify.simulation import Problem, Sgd

RIGHT = Problem(steps=4)


def with_rate(rate: float, **changed: Any) -> Problem:
    return replace(RIGHT, optimizer=lambda: Sgd(rate), **changed)


def known(rate: float) -> dict[str, Any]:
    """What a probe learns of an optimizer."""
    return {"optimizers": {"sgd": {"class": "SGD", "learning_rate": rate}}}


def case(folder: Folder, topology: Trace, *, rerun: dict[str, Problem], of_rate: float = 0.1) -> Case:
    """A reference whose learning rate is known; `rerun` says what one device does with so many times the rate."""

    def run_again(*asked: str) -> Rerun | None:
        problem = rerun.get(asked[-1].removeprefix(RATE))
        return problem and Rerun(folder.trained(problem), topology, folder.noise(problem))

    return case_of(folder.trained(RIGHT, facts=known(of_rate)), topology, folder.noise(RIGHT), rerun=run_again)


def test_weights_that_move_by_one_factor_where_gradients_agree_are_told_with_it(folder: Folder) -> None:
    found = judge(folder.case(RIGHT, with_rate(0.4)))
    assert codes(found) == ["update-scaling"]
    assert "the weights change 4x" in found.causes[0].summary
    assert "update of one device = 4.0000" in found.causes[0].evidence
    assert "from step 1 on: in step 0 the weights change 4x as much" in found.not_compared[0]


def test_learning_rates_whose_ratio_is_the_factor_are_told_and_what_follows_is_compared(folder: Folder) -> None:
    wrong = folder.trained(with_rate(0.4), 4, known(0.4))
    found = judge(case(folder, wrong, rerun={"4.0": with_rate(0.4)}))
    assert (found.verdict, codes(found), found.not_compared) == ("divergent", ["update-scaling"], ())
    assert "; the learning rate is 0.4, 0.1 on one device; " in found.causes[0].evidence
    assert found.causes[0].evidence.endswith("one device with 4x the learning rate agrees in all later steps")
    assert "BASE_RATE * number_of_workers" in found.causes[0].fix


def test_what_else_is_wrong_is_found_behind_a_learning_rate_that_is_allowed(folder: Folder) -> None:
    wrong = folder.trained(with_rate(0.4, reported=lambda losses, n: losses[0]), 4, known(0.4))
    found = judge(case(folder, wrong, rerun={"4.0": with_rate(0.4)}), allow=["update-scaling"])
    assert (found.verdict, codes(found)) == ("divergent", ["update-scaling", "loss-report"])
    right = folder.trained(with_rate(0.4), 4, known(0.4))
    assert judge(case(folder, right, rerun={"4.0": with_rate(0.4)}), allow=["update-scaling"]).verdict == "equivalent"


def test_where_one_device_with_that_rate_does_something_else_the_rest_is_not_compared(folder: Folder) -> None:
    wrong = folder.trained(with_rate(0.4), 4, known(0.4))
    found = judge(case(folder, wrong, rerun={"4.0": with_rate(0.7)}))
    assert codes(found) == ["update-scaling"]
    assert found.not_compared[0].startswith("gradients, weights and losses from step 1 on: in step 0 the weights change 4x")


@pytest.mark.parametrize("factor", [2, 0.5, 8, 1 / 3, 1.5, math.sqrt(2), math.sqrt(8)])
def test_a_factor_of_small_numbers_or_their_roots_is_taken_for_exactly_that(folder: Folder, factor: float) -> None:
    wrong = folder.trained(with_rate(0.1 * factor), 4, known(0.1 * factor))
    found = judge(case(folder, wrong, rerun={repr(float(factor)): with_rate(0.1 * factor)}))
    assert found.causes[0].evidence.endswith("agrees in all later steps")


@pytest.mark.parametrize(("rate", "codes_", "verdict"), [(0.4, [], "equivalent"), (0.9, ["update-scaling"], "divergent")])
def test_a_rate_that_grows_no_faster_than_the_batch_is_advice(
    folder: Folder, rate: float, codes_: list[str], verdict: str
) -> None:
    grown = folder.trained(with_rate(rate, batch=4 * RIGHT.batch, steps=2), 4, known(rate))
    plain = folder.trained(replace(RIGHT, steps=8), facts=known(0.1))
    on_its_rows = replace(RIGHT, batch=4 * RIGHT.batch, steps=2)

    def run_again(*asked: str) -> Rerun | None:
        same = with_rate(rate, batch=4 * RIGHT.batch, steps=2)
        return Rerun(folder.trained(same), grown, folder.noise(same)) if asked[-1].startswith(RATE) else None

    reference = folder.trained(on_its_rows, facts=known(0.1))
    found = judge(case_of(reference, grown, folder.noise(on_its_rows), plain=plain, rerun=run_again), grows=True)
    assert found.verdict == verdict
    assert [cause.code for cause in found.causes if not cause.advice] == codes_
    assert codes(found) == ["update-scaling"]
    if not codes_:
        assert found.causes[0].summary == "The batch is 4x that of one device, and the learning rate 4x."


@pytest.mark.parametrize(
    ("ours", "said", "advice"),
    [
        ({"learning_rate": 0.4}, "the learning rate is 0.4, 0.1 on one device", True),
        ({"learning_rate": 0.9}, "the learning rate is 0.9, 0.1 on one device", False),
        ({"learning_rate": 0.05}, "the learning rate is 0.05, 0.1 on one device", False),
        ({"learning_rate": 0.9, "scheduled": True}, "the learning rate of its second step is 0.9, 0.1 on one device", True),
        ({"learning_rate": 0.1, "settings": {"momentum": 0.9}}, "momentum is 0.9, 0.5 on one device", True),
        ({"learning_rate": 0.1}, None, None),
    ],
)
def test_how_an_optimizer_is_set_otherwise_in_a_batch_that_grows_is_told(
    folder: Folder, ours: dict[str, Any], said: str | None, advice: bool | None
) -> None:
    larger = replace(RIGHT, batch=4 * RIGHT.batch, steps=2)
    theirs = {"optimizers": {"sgd": {"learning_rate": 0.1, "settings": {"momentum": 0.5}}}}
    grown = folder.trained(larger, 4, {"optimizers": {"sgd": ours}})
    case_ = case_of(
        folder.trained(larger), grown, folder.noise(larger), plain=folder.trained(replace(RIGHT, steps=8), facts=theirs)
    )
    found = judge(case_, grows=True)
    assert found.verdict == ("divergent" if advice is False else "equivalent")
    assert [(cause.code, cause.advice) for cause in found.causes] == ([("update-scaling", advice)] if said else [])
    if said:
        assert found.causes[0].evidence == f"{said}; this depends on the number of replicas or workers"


@pytest.mark.parametrize(
    ("setting", "ours", "heading"),
    [
        ("momentum", 0.5, "If the learning rate grows and the batch does not"),
        ("built", 1.0, "If fit builds the optimizer on one device only"),
    ],
)
def test_a_setting_that_makes_no_factor_is_named_where_gradients_agree(
    folder: Folder, setting: str, ours: float, heading: str
) -> None:
    class Heavy(Sgd):
        """As with momentum: what was done before is done again in part."""

        before: dict[str, Any] | None = None

        def __call__(self, weights: Any, gradients: Any) -> Any:
            moved = {n: g + (0.5 * self.before[n] if self.before else 0) for n, g in gradients.items()}
            self.before = moved
            return super().__call__(weights, moved)

    wrong = folder.trained(replace(RIGHT, optimizer=Heavy), 4, {"optimizers": {"sgd": {"settings": {setting: ours}}}})
    plain = folder.trained(RIGHT, facts={"optimizers": {"sgd": {"settings": {setting: 0.0}}}})
    found = judge(case_of(plain, wrong, folder.noise(RIGHT)))
    assert codes(found) == ["update-scaling"]
    assert found.causes[0].summary.startswith("In step 1 the gradients agree, but the update differs")
    assert found.causes[0].evidence.startswith(f"{setting} is {ours:g}, 0 on one device; dense_")
    assert found.causes[0].fixes == (heading,)
