"""Whether the order of the rows matters is seen in runs whose rows were permuted, and rounding is not taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.ledger import Ledger
from emulate.verify.ledgers import is_in_order, is_wide, order_widens
from tests.emulate.verify.cases import Folder

GRADIENTS = np.random.default_rng(1).normal(size=(12, 2, 32)).astype("f4")
"""By step and tensor."""


def trained(folder: Folder, *, seed: int = 0, off: float = 0.0, at: int = 0, loss: float | None = None) -> Trace:
    """Steps whose gradients are `off` from step `at` on, the loss by as much unless said, the weights from then on."""
    made = folder.made()
    made.initial({"a": np.ones(32, "f4"), "b": np.ones(32, "f4")})
    change = np.random.default_rng(seed).uniform(0.5, 1.0, GRADIENTS.shape).astype("f4") * np.float32(off)
    weights = np.ones((2, 32), "f4")
    for k, gradients in enumerate(GRADIENTS):
        now = gradients * (1 + (change[k] if k >= at else 0))
        weights = weights - np.float32(0.1) * now
        objective = 1.0 + ((off if loss is None else loss) if k >= at else 0.0)
        made.step(k, dict(zip("ab", now, strict=True)), dict(zip("ab", weights, strict=True)), objective=objective)
    return made.trace()


@pytest.mark.parametrize("at", [0, 3, 10])
@pytest.mark.parametrize("loss", [None, 1e-6], ids=["with the loss", "beside the same loss, as of fresh embeddings"])
def test_gradients_that_coarse_rounding_does_not_make_depend_on_the_order(folder: Folder, at: int, loss: float | None) -> None:
    plain, rounded = trained(folder), [trained(folder, seed=k, off=1e-5) for k in (4, 5)]
    permuted = [trained(folder, seed=k, off=0.1, at=at, loss=loss) for k in (1, 2, 3)]
    assert is_wide(plain, permuted)
    assert order_widens(plain, permuted, rounded)


def test_rounding_is_no_order(folder: Folder) -> None:
    assert not is_wide(trained(folder), [trained(folder, seed=k, off=1e-6) for k in (1, 2, 3)])
    wide = [trained(folder, seed=k, off=0.1) for k in (1, 2, 3)]  # as 16 bits round, or a chaotic network
    assert not order_widens(trained(folder), wide, [trained(folder, seed=4, off=0.1)])


def test_a_unit_on_the_other_side_of_its_kink_is_no_order(folder: Folder) -> None:
    assert not is_wide(trained(folder), [trained(folder, off=0.1, at=2), trained(folder, off=1e-6), trained(folder, off=1e-6)])


def test_a_wide_noise_that_rounding_makes_too_or_one_run_has_not_is_no_order(folder: Folder) -> None:
    plain, late = trained(folder), [trained(folder, seed=k, off=0.1, at=10) for k in (1, 2, 3)]
    assert not order_widens(plain, late, [trained(folder, off=1e-5), trained(folder, off=0.01, at=9)])
    assert not order_widens(plain, [*late[:2], trained(folder, off=1e-6)], [trained(folder, off=1e-5)])
    assert not order_widens(plain, late, [])
    assert not is_wide(plain, [*late[:2], trained(folder, off=1e-6)])
    assert not is_wide(plain, [])


def test_runs_in_order_show_a_step_later_what_rounding_makes_of_a_forward_pass(folder: Folder) -> None:
    plain, permuted = trained(folder), [trained(folder, seed=k, off=0.1, at=0, loss=1e-6) for k in (1, 2, 3)]
    assert not order_widens(plain, permuted, [trained(folder, off=0.05, at=1)])
    assert order_widens(plain, permuted, [trained(folder, off=0.05, at=2)])


def test_rows_are_in_order_when_the_replicas_have_them_one_after_the_other() -> None:
    def dealt(*replicas: str) -> Ledger:
        return Ledger("sgd", (tuple("abcd"),), (dict(enumerate(map(tuple, replicas))),), {0: 0, 1: 0})

    assert is_in_order(dealt("ab", "cd"))
    assert not is_in_order(dealt("ac", "bd"))
