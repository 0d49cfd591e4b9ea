"""Factors of gradients: each optimizer has its own, and a sum that the program makes itself is told from equal gradients."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import ROWS
from tests.emulate.verify.made_traces import Made

DRAWN = np.random.default_rng(5).normal(size=(2, 5, 4, 128)).astype("f4")


def _of_two_optimizers(folder: Folder, replicas: int, factors: tuple[float, float]) -> Trace:
    made = folder.made(f"1x{replicas}")
    made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": replicas, "local": replicas})
    for r in range(replicas):
        made.initial({"generator/w": np.ones(128, "f4"), "critic/w": np.ones(128, "f4")}, replica=r)
    for k in range(3):
        for place, (name, factor) in enumerate(zip(("generator/w", "critic/w"), factors, strict=True)):
            parts = np.float32(factor) * DRAWN[place]
            weights = {name: np.ones(128, "f4") - np.float32(0.1) * parts[: k + 1].sum(axis=(0, 1), dtype="f4")}
            for r, local in enumerate(parts[k].reshape(replicas, 4 // replicas, -1).sum(axis=1)):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                objective = factor / replicas
                made.step(k, {name: local}, weights, replica=r, rows=rows, objective=objective, optimizer=f"adam_{place}")
    return made.trace()


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((4, 1), "Every gradient of adam_0 is 4x too large: the number of replicas is 4."),
        ((4, 4), "Every gradient is 4x too large: the number of replicas is 4."),
        ((4, 0.25), "4x too large: the number of replicas is 4 (adam_0); 4x too small: the number of replicas is 4 (adam_1)."),
    ],
)
def test_each_optimizer_has_a_factor_of_its_own(folder: Folder, factors: tuple[float, float], said: str) -> None:
    found = judge(case_of(_of_two_optimizers(folder, 1, (1, 1)), _of_two_optimizers(folder, 4, factors)))
    assert codes(found) == ["loss-scaling"]
    assert found.causes[0].summary.endswith(said)


@pytest.mark.parametrize("kind", ["equal rows on all replicas", "no gradient in the first step"])
@pytest.mark.parametrize(("factor", "causes"), [(1, []), (4, ["loss-scaling"])])
def test_an_update_by_hand_from_equal_gradients_is_a_sum_where_its_rows_are_equal_or_they_are_zero(
    folder: Folder, kind: str, factor: float, causes: list[str]
) -> None:
    parts = DRAWN[0].copy()
    are_equal = kind.startswith("equal")
    if are_equal:
        parts[:] = parts[:, :1]
    else:
        parts[0] = 0

    def step(made: Made, k: int) -> None:
        replicas = int(made.topology.split("x")[1])
        own = np.float32(factor if replicas > 1 else 1) * parts
        weights = {"w": np.ones(128, "f4") - np.float32(0.1) * own[: k + 1].sum(axis=(0, 1), dtype="f4")}
        for r, local in enumerate(own[k].reshape(replicas, 4 // replicas, -1).sum(axis=1)):
            rows = (
                ("00", "01") * (4 // replicas)
                if are_equal
                else ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            )
            made.step(k, {"w": local}, weights, replica=r, rows=rows, objective=1 / replicas, optimizer="tape", tape=True)

    found = judge(case_of(loop(folder.made("1x1"), step, 4), loop(folder.made("1x4"), step, 4)))
    assert (found.verdict, codes(found)) == ("divergent" if causes else "equivalent", causes)


@pytest.mark.parametrize(("is_behind", "stage", "line"), [(True, "given", 9), (False, "loss", 5)])
def test_a_factor_of_gradients_whose_losses_agree_is_blamed_on_what_is_made_of_them(
    folder: Folder, is_behind: bool, stage: str, line: int
) -> None:
    def entry(number: int, role: str) -> dict[str, object]:
        return {"file": "train.py", "line": number, "text": "", "operations": {"Mul": 1}, "roles": {role: 0}, "near": 0}

    def trained(replicas: int) -> Trace:
        def step(made: Made, k: int) -> None:
            for r, local in enumerate(DRAWN[0, k].reshape(replicas, 4 // replicas, -1).sum(axis=1)):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                wrong, weights = local / np.float32(replicas), {"w": np.full(128, k, "f4")}
                loss = 1 / replicas if is_behind else 1 / replicas**2
                made.step(k, {"w": wrong}, weights, replica=r, rows=rows, objective=loss)

        made = folder.made(f"1x{replicas}")
        stages = {"gradient": [], "loss": [entry(5, "scale")], "given": [entry(9, "scale")]}
        made.event({"event": "lines", "function": "step", "stages": stages})
        return loop(made, step)

    (cause,) = judge(case_of(trained(1), trained(4))).causes
    assert (cause.code, cause.stage, [location.line for location in cause.locations]) == ("loss-scaling", stage, [line])


@pytest.mark.parametrize("is_scaled", [True, False], ids=["term divided", "term not divided"])
@pytest.mark.parametrize("has_term", [True, False], ids=["a term of the weights", "examples alone"])
def test_a_term_of_the_weights_that_is_scaled_as_its_loss_is_has_a_cause_too(
    folder: Folder, has_term: bool, is_scaled: bool
) -> None:
    def entry(number: int, role: str) -> dict[str, object]:
        return {"file": "train.py", "line": number, "text": "", "operations": {"Add": 1}, "roles": {role: 0}, "near": 0}

    start = np.linspace(-1, 1, 128, dtype="f4")

    def trained(replicas: int) -> Trace:
        def step(made: Made, k: int) -> None:
            of_term = np.float32(0.5) * start / np.float32(replicas if is_scaled else 1) * np.float32(has_term)
            for r, local in enumerate(DRAWN[0, k].reshape(replicas, 4 // replicas, -1).sum(axis=1)):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                made.step(
                    k, {"w": local * np.float32(replicas) + of_term}, {"w": start}, replica=r, rows=rows, objective=1.0 + r
                )

        made = folder.made(f"1x{replicas}")
        stages = {"gradient": [], "loss": [entry(5, "mean"), *[entry(6, "penalty")] * has_term]}
        made.event({"event": "lines", "function": "step", "stages": stages})
        for r in range(replicas):
            made.initial({"w": start}, replica=r)
        return loop(made, step)

    found = judge(case_of(trained(1), trained(4)))
    both = ["loss-scaling", "regularization-per-replica"]
    assert codes(found) == (both if has_term and not is_scaled else both[:1])
    assert [location.line for cause in found.causes[1:] for location in cause.locations] == [6] * (len(found.causes) - 1)


def test_a_count_of_each_replica_and_a_term_of_the_weights_that_one_fit_explains_are_two_causes(folder: Folder) -> None:
    start = np.linspace(-1, 1, 128, dtype="f4")
    counts = np.array([4, 2, 5, 1], "f4")

    def trained(replicas: int) -> Trace:
        def step(made: Made, k: int) -> None:
            shares = np.float32(4) * counts / counts.sum() if replicas == 1 else np.ones(4, "f4")
            locals_ = (shares[:, None] * DRAWN[0, k]).reshape(replicas, 4 // replicas, -1).sum(axis=1)
            for r, local in enumerate(locals_):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                made.step(k, {"w": local + np.float32(0.02) * start}, {"w": start}, replica=r, rows=rows, objective=1.0 + r)

        made = folder.made(f"1x{replicas}")
        for r in range(replicas):
            made.initial({"w": start}, replica=r)
        return loop(made, step)

    found = judge(case_of(trained(1), trained(4)))
    assert codes(found) == ["regularization-per-replica", "local-normalization"]
