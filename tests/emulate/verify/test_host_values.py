"""Numbers in the step that each host has made for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, codes
from tests.emulate.verify.simulation import Problem, train

RIGHT = Problem(steps=3, l2=1e-3)
WRONG = replace(RIGHT, reg_times=lambda n: 1.0)
"""Another gradient, which nothing explains where no variable is known to have a regularizer."""
LINE = "train.py:7|float32|number"

Held = Mapping[str, Sequence[str]]


def judged(folder: Folder, *held: Held, wrong: Problem = WRONG) -> Judgement:
    """Two hosts, of which a probe has told what their steps hold."""
    made = folder.made("1x4")
    for host, values in enumerate(held):
        facts: dict[str, Any] = {"optimizers": {}, "regularized": ["embedding"], "held": values}
        made.event({"event": "program", **facts}, host)
    return judge(case_of(folder.trained(RIGHT), train(wrong, made, 4).trace(), folder.noise(RIGHT)))


def test_numbers_that_are_others_on_each_host_are_told_with_their_line_and_both_values(folder: Folder) -> None:
    found = judged(folder, {LINE: ["0.5", "2.0"]}, {LINE: ["0.5", "3.0"]})
    assert (found.verdict, codes(found)) == ("divergent", ["host-values"])
    assert found.causes[0].summary == "Each host's step computes with its own numbers (train.py:7)."
    assert (
        "The step uses at train.py:7: 2.0 on host 0, 3.0 on host 1; from step 0 on the gradient of " in found.causes[0].evidence
    )
    assert found.not_compared == ("gradients, weights and losses from step 0 on: each host computes with its own numbers",)


def test_a_tensor_made_outside_of_the_step_has_no_line_and_comes_after_those_that_have_one(folder: Folder) -> None:
    outside = "|float32|8"
    one, other = {outside: ["1, 2, ... (shape [20, 8], ab)"]}, {outside: ["3, 4, ... (shape [20, 8], cd)"]}
    found = judged(folder, one, other)
    assert found.causes[0].summary == "Each host's step computes with its own numbers."
    assert "in a tensor created outside of it: 1, 2, ... (shape [20, 8], ab) on host 0, 3, 4, " in found.causes[0].evidence
    both = judged(folder, {**one, LINE: ["1.0"]}, {**other, LINE: ["2.0"]})
    assert "The step uses at train.py:7: 1.0 on host 0, 2.0 on host 1; " in both.causes[0].evidence


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({LINE: ["2.0"]}, {LINE: ["2.0"]}),
        ({LINE: ["2.0", "3.0"]}, {LINE: ["3.0", "2.0"]}),
        ({LINE: ["2.0"]}, {"train.py:8|float32|number": ["3.0"]}),
    ],
    ids=["the same", "in another order", "in another place"],
)
def test_what_hosts_hold_in_common_explains_nothing(folder: Folder, one: Held, other: Held) -> None:
    assert codes(judged(folder, one, other)) == ["unexplained"]


def test_numbers_of_each_host_alone_are_no_difference(folder: Folder) -> None:
    assert codes(judged(folder, {LINE: ["2.0"]}, {LINE: ["3.0"]}, wrong=RIGHT)) == []


def test_what_explains_the_difference_is_told_and_not_what_hosts_hold(folder: Folder) -> None:
    wrong = replace(RIGHT, scale=lambda rows, batch, n: 1 / rows, reg_times=lambda n: 1.0)
    assert codes(judged(folder, {LINE: ["2.0"]}, {LINE: ["3.0"]}, wrong=wrong)) == ["loss-scaling"]
