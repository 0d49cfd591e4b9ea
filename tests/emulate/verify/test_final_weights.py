"""What a program makes of its weights after the last step: compared with one device, and between hosts."""

from __future__ import annotations

from typing import Any

import pytest

from emulate.report import page
from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import LOCALS, ROWS, hand_made, right_reference, right_topology, weights_after
from tests.emulate.verify.made_traces import Made


def test_weights_that_are_changed_after_the_last_step_are_said_not_to_be_compared(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        right_topology(made, k)
        if k == 2:
            made.left({"w": 2 * weights_after(k)})

    found = judge(hand_made(folder, topology))
    assert found.verdict == "equivalent"
    assert found.not_compared == (
        "what the program makes of w after the last step: weights were compared as the steps left them",
    )


def _leaves(times: float | None, of: Any) -> Any:
    """Steps that are right, then w times a number in the place of w, on the first replica; None for a run that leaves w."""

    def step(made: Made, k: int) -> None:
        of(made, k)
        if k == 2:
            made.left({} if times is None else {"w": times * weights_after(k)})

    return step


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (0.5, 0.5, None),
        (0.5, 1.0, "After the last step the program replaces w by other values than on one device: it is 2x that."),
        (None, 2.0, "After the last step the program replaces w here, but not on one device."),
        (2.0, None, "After the last step the program replaces w on one device, but not here."),
        (0.5, 0.0, "After the last step the program replaces w by other values than on one device: it is 0x that."),
        (None, None, None),
    ],
)
def test_what_a_program_makes_of_its_weights_in_the_end_is_compared(
    folder: Folder, theirs: float | None, ours: float | None, said: str | None
) -> None:
    reference = loop(folder.made(), _leaves(theirs, right_reference))
    found = judge(case_of(reference, loop(folder.made("1x4"), _leaves(ours, right_topology))))
    assert found.not_compared == ()
    assert [(cause.code, cause.summary) for cause in found.causes] == ([("final-weights", said)] if said else [])
    if said is not None:
        assert found.verdict == "divergent"
        assert found.first_divergence is not None
        assert page.where(found.first_divergence) == "after all 3 steps"


def test_what_one_device_made_in_the_end_is_told_of_the_run_that_went_to_its_end(folder: Folder) -> None:
    """A reference that is led step by step ends with its last step."""
    own = loop(folder.made(), _leaves(0.5, right_reference))
    led = folder.made()
    led.event({"event": "program", "follows": True})
    found = judge(
        case_of(loop(led, right_reference), loop(folder.made("1x4"), _leaves(1.0, right_topology)), plain=own, source=own)
    )
    said = "After the last step the program replaces w by other values than on one device: it is 2x that."
    assert [(cause.code, cause.summary) for cause in found.causes] == [("final-weights", said)]
    assert found.not_compared == ()


def test_weights_that_are_wrong_in_the_steps_explain_those_in_the_end(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": 4 * LOCALS[k, r]}, {"w": 1 + 4 * (weights_after(k) - 1)}, replica=r, rows=rows, objective=1.0)
        if k == 2:
            made.left({"w": 0.5 * (1 + 4 * (weights_after(k) - 1))})

    reference = loop(folder.made(), _leaves(0.5, right_reference))
    found = judge(case_of(reference, loop(folder.made("1x4"), topology)))
    assert codes(found) == ["loss-scaling"]


@pytest.mark.parametrize(
    ("ends", "expected", "said"),
    [
        pytest.param([0.5, 0.5], [], (), id="alike"),
        pytest.param([0.5, 0.25], ["final-weights"], (), id="apart"),
        pytest.param(
            [0.5, None],
            [],
            ("the final weights of other hosts than the first: only host 0 replaced w",),
            id="the first alone",
        ),
        pytest.param(
            [None, 0.5],
            ["final-weights"],
            ("the final weights of other hosts than the first: only host 1 replaced w",),
            id="the last alone",
        ),
    ],
)
def test_what_hosts_put_in_the_place_of_their_weights_is_compared_with_each_other(
    folder: Folder, ends: list[float | None], expected: list[str], said: tuple[str, ...]
) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, host=r // 2, rows=rows, objective=0.25)
        for r in range(4) if k == 2 else ():
            end = ends[r // 2]
            made.left({} if end is None else {"w": end * weights_after(k)}, replica=r, host=r // 2)

    reference = loop(folder.made(), _leaves(0.5, right_reference))
    found = judge(case_of(reference, loop(folder.made("2x2"), topology, replicas=4)))
    assert codes(found) == expected
    assert found.not_compared == said
