"""What is not finite on one device either tells nothing: it is compared with nothing, and the verdict says so."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import LOCALS, ROWS, weights_after
from tests.emulate.verify.made_traces import Made


@pytest.mark.parametrize(
    ("lost", "verdict", "after", "missing"),
    [
        (None, "equivalent", None, []),
        (1, "equivalent", 1, []),
        (0, "unverified", 0, ["gradient", "weight"]),
    ],
)
def test_what_is_not_finite_on_one_device_either_is_not_called_compared(
    folder: Folder, lost: int | None, verdict: str, after: int | None, missing: list[str]
) -> None:
    def step(made: Made, k: int) -> None:
        replicas = int(made.topology.split("x")[1])
        nothing = np.float32(np.nan if lost is not None and k >= lost else 0)
        for r in range(replicas):
            each = 4 // replicas
            gradient = LOCALS[k, each * r : each * (r + 1)].sum(axis=0) + nothing
            rows = ROWS[8 * k + 2 * each * r : 8 * k + 2 * each * (r + 1)]
            loss = float(1 / replicas + nothing)
            made.step(k, {"w": gradient}, {"w": weights_after(k, LOCALS) + nothing}, replica=r, rows=rows, objective=loss)

    found = judge(case_of(loop(folder.made("1x1"), step), loop(folder.made("1x4"), step)))
    assert (found.verdict, found.non_finite_after) == (verdict, after)
    assert [text for text in found.not_compared if "finite" in text] == [f"{k}: not finite, on one device too" for k in missing]
    assert not any(note.startswith("No step changes any weight") for note in found.notes)


@pytest.mark.parametrize(
    ("lost_on", "said"), [(1, "becomes nan on one device in step 1; here it stays finite"), (4, "becomes nan in step 1;")]
)
@pytest.mark.parametrize("weights_alone", [False, True])
def test_what_is_not_finite_on_one_side_only_is_named_with_the_side(
    folder: Folder, lost_on: int, said: str, weights_alone: bool
) -> None:
    def step(made: Made, k: int) -> None:
        replicas = int(made.topology.split("x")[1])
        nothing = np.float32(np.nan if replicas == lost_on and k >= 1 else 0)
        of_gradient = np.float32(0) if weights_alone else nothing
        for r, local in enumerate(LOCALS[k].reshape(replicas, 4 // replicas, -1).sum(axis=1)):
            rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            weights = {"w": weights_after(k, LOCALS) + nothing}
            made.step(k, {"w": local + of_gradient}, weights, replica=r, rows=rows, objective=float(1 / replicas + of_gradient))

    found = judge(case_of(loop(folder.made("1x1"), step), loop(folder.made("1x4"), step)))
    assert (found.verdict, codes(found)) == ("divergent", ["nan"])
    assert said in found.causes[0].summary
