"""What is not finite on one device either tells nothing: it is compared with nothing, and the verdict says so."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of, loop
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
