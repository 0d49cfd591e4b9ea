"""A loss that is added up before its gradient is taken is told from one divided too little; so is training of nothing."""

from __future__ import annotations

import pytest

from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, codes
from tests.emulate.verify.hand_made import LOCALS, ROWS, hand_made, weights_after
from tests.emulate.verify.made_traces import Made

UNCHANGED = "No step changes any weight"


@pytest.mark.parametrize(("losses", "is_sum"), [((1.0, 1.0, 1.0, 1.0), True), ((0.7, 1.1, 1.0, 1.2), False)])
def test_a_loss_that_replicas_add_up_before_its_gradient_is_taken_has_a_cure_of_its_own(
    folder: Folder, losses: tuple[float, ...], is_sum: bool
) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(
                k, {"w": 4 * LOCALS[k, r]}, {"w": weights_after(k, 4 * LOCALS)}, replica=r, rows=rows, objective=losses[r]
            )

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["loss-scaling"]
    assert ("The program sums the loss over the replicas before it takes the gradient" in found.causes[0].fix) == is_sum
    assert ("the same number, the loss of one device" in found.causes[0].evidence) == is_sum


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_training_that_changes_no_weight_is_told(folder: Folder, rate: float) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k, 10 * rate * LOCALS)}, replica=r, rows=rows, objective=0.25)

    found = judge(hand_made(folder, topology))
    assert any(note.startswith(UNCHANGED) for note in found.notes) == (rate == 0)
