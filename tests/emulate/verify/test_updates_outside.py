"""Loops that make their updates outside of `Strategy.run`: what a step leads to is what the next one finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from emulate.verify.case import Case
from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import LOCALS, ROWS, weights_after
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Array


def _outside(made: Made) -> Made:
    """A trace whose steps find `w` as it is before the update."""
    write = made.event

    def event(event: Mapping[str, Any], host: int = 0) -> None:
        write({**event, "outside": ["w"], "tape": True} if event["event"] == "step" else event, host)

    made.event = event  # type: ignore[method-assign]
    return made


def _case(folder: Folder, wrong: Mapping[int, Array], *, ends: bool = True, size: int = 128) -> Case:
    """Right gradients; in some steps the update is made of others than their sum."""
    updates = [wrong.get(k, LOCALS[k].sum(axis=0))[:size] for k in range(3)]

    def run(made: Made, applied: list[Array], replicas: int) -> Any:
        def weights(k: int) -> Array:
            return np.float32(1) - np.float32(0.1) * np.sum(applied[:k], axis=0, dtype="f4")

        def step(made: Made, k: int) -> None:
            for r in range(replicas):
                gradient = LOCALS[k, r, :size] if replicas > 1 else LOCALS[k, :, :size].sum(axis=0)
                rows = np.split(np.array(ROWS[8 * k : 8 * k + 8]), replicas)[r].tolist()
                found = np.ones(size, "f4") if k == 0 else weights(k).astype("f4")
                made.step(k, {"w": gradient}, {"w": found}, replica=r, rows=rows, objective=1 / replicas, optimizer="tape")
                if ends and k == 2:
                    after = {"w": weights(3).astype("f4")}
                    made.event({"event": "after", "replica": r, "variables": made.variables(0, after)})

        return loop(_outside(made), step, weights=size)

    right = [LOCALS[k, :, :size].sum(axis=0) for k in range(3)]
    return case_of(run(folder.made(), right, 1), run(folder.made("1x4"), updates, 4))


def test_weights_are_those_that_the_next_step_finds_and_after_the_last_those_that_the_end_does(folder: Folder) -> None:
    steps = _case(folder, {}).topology.steps("tape")
    for k in range(3):
        array = steps[k][3].weights["w"].array
        assert array is not None
        np.testing.assert_allclose(array.read(), weights_after(k), atol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("size", [128, 3])
def test_an_update_of_one_replicas_gradient_misses_the_all_reduce_in_its_own_step(folder: Folder, k: int, size: int) -> None:
    found = judge(_case(folder, {k: LOCALS[k, 2]}, size=size))
    assert codes(found) == ["missing-all-reduce"]
    assert "all replicas apply the gradient of replica 2" in found.causes[0].summary
    assert "strategy.reduce(" in found.causes[0].fix
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.step) == ("weight", k)


def test_another_wrong_update_is_seen_in_its_own_step_and_is_not_called_one_replicas(folder: Folder) -> None:
    found = judge(_case(folder, {1: LOCALS[1].sum(axis=0) + np.float32(0.2)}))
    assert "missing-all-reduce" not in codes(found)
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.step) == ("weight", 1)


def test_right_updates_are_equivalent_and_one_that_nobody_saw_is_said_not_to_be_compared(folder: Folder) -> None:
    assert judge(_case(folder, {})).not_compared == ()
    found = judge(_case(folder, {2: LOCALS[2, 2]}, ends=False))
    assert found.verdict == "equivalent"
    assert [text for text in found.not_compared if text.startswith("what the program makes of w after the last step")]


def test_what_a_step_assigns_itself_is_no_value_that_the_step_before_led_to(folder: Folder) -> None:
    made = folder.made()
    write = made.event
    outside = [["w"], [], ["w"]]

    def event(event: Mapping[str, Any], host: int = 0) -> None:
        write({**event, "outside": outside[event["step"]]} if event["event"] == "step" else event, host)

    made.event = event  # type: ignore[method-assign]
    for k in range(3):
        made.step(k, {"w": np.ones(4, "f4")}, {"w": np.full(4, k, "f4")}, optimizer="tape")
    first, second, third = (step[0].weights for step in made.trace().steps("tape"))
    assert not first
    assert not third
    array = second["w"].array
    assert array is not None
    assert array.read()[0] == 1


def test_variables_that_alone_follow_one_replica_are_named(folder: Folder) -> None:
    bias = LOCALS[:, :, :5]

    def run(made: Made, replicas: int) -> Any:
        def step(made: Made, k: int) -> None:
            applied = bias[: k + 1, 2] if replicas > 1 else bias[: k + 1].sum(axis=1)
            after = np.float32(1) - np.float32(0.1) * applied.sum(axis=0)
            for r in range(replicas):
                local = [LOCALS[k, r], bias[k, r]] if replicas > 1 else [LOCALS[k].sum(axis=0), bias[k].sum(axis=0)]
                rows = np.split(np.array(ROWS[8 * k : 8 * k + 8]), replicas)[r].tolist()
                about: dict[str, Any] = {"rows": rows, "objective": 1 / replicas, "optimizer": "tape"}
                made.step(k, dict(zip("wb", local, strict=True)), {"w": weights_after(k), "b": after}, replica=r, **about)

        for r in range(replicas):
            made.initial({"b": np.ones(5, "f4")}, replica=r)
        return loop(made, step)

    found = judge(case_of(run(folder.made(), 1), run(folder.made("1x4"), 4)))
    assert codes(found) == ["missing-all-reduce"]
    assert (
        found.causes[0].summary
        == "Gradients of b are not summed over the replicas: all replicas apply the gradient of replica 2."
    )
