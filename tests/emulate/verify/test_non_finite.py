"""What is not finite on one device either tells nothing: it is compared with nothing, and the verdict says so."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.trace import Trace
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


@pytest.mark.parametrize(("overflows_on", "follows"), [(4, False), (1, False), (4, True)])
@pytest.mark.parametrize(
    ("scales", "skips", "wrong", "advised"),
    [
        pytest.param(True, True, False, True, id="skipped"),
        pytest.param(True, False, False, False, id="not skipped"),
        pytest.param(False, True, False, False, id="no scale"),
        pytest.param(True, True, True, True, id="skipped beside a wrong factor"),
    ],
)
def test_a_step_that_a_loss_scale_skips_is_advice_and_hides_nothing(
    folder: Folder, follows: bool, overflows_on: int, scales: bool, skips: bool, wrong: bool, advised: bool
) -> None:
    def trained(replicas: int) -> Trace:
        def step(made: Made, k: int) -> None:
            lost = replicas == overflows_on and k in (1, 2)
            skipped = [j for j in (1, 2) if (replicas == overflows_on or follows) and skips and j <= k]
            weights = 1 - 0.1 * np.sum([LOCALS[j].sum(axis=0) for j in range(k + 1) if j not in skipped], axis=0)
            for r, local in enumerate(LOCALS[k].reshape(replicas, 4 // replicas, -1).sum(axis=1)):
                own = local * np.float32(4 if wrong and replicas > 1 else 1)
                own[0] = np.inf if lost else own[0]
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                made.step(k, {"w": own}, {"w": weights.astype("f4")}, replica=r, rows=rows, objective=1 / replicas)

        made = folder.made(f"1x{replicas}")
        made.event({"event": "program", "optimizers": {"sgd": {"loss_scale": scales}}, "follows": follows and replicas == 1})
        return loop(made, step)

    found = judge(case_of(trained(1), trained(4)))
    nan = [cause for cause in found.causes if cause.code == "nan"]
    assert [cause.advice for cause in nan] == [advised]
    assert ("skips the step" in nan[0].summary) == advised
    assert found.verdict == ("divergent" if wrong or not advised else "equivalent")
    assert ("loss-scaling" in codes(found)) == wrong
    assert bool(found.skipped) == (advised and not wrong)
    assert any("one of the runs skips" in text for text in found.not_compared) == (advised and not follows)
    if found.skipped:
        both = judge(case_of(trained(4), trained(4))).in_16_bits(found)
        assert (both.verdict, codes(both)) == ("equivalent", ["nan"])
        assert any(text.startswith("in 16 bits, gradients, ") for text in both.not_compared) == (not follows)
