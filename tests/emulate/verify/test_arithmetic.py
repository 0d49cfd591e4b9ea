"""A factor that was measured in one step is known again in a later one, where it cannot be measured any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emulate.verify import arithmetic
from emulate.verify.arithmetic import Fit, fit_step, one_factor
from emulate.verify.gradients import GradientView

LOUD = GradientView("bias", {0: np.array([30.0, 0.1]), 1: np.array([30.0, 0.1])}, np.array([30.0, 0.2]), None, 1.0)
"""Twice the reference in an element that is clear; too few elements to measure a factor."""


def _comparison(view: GradientView) -> Any:
    return SimpleNamespace(
        views=lambda optimizer, step: [view], taped_views=lambda optimizer, step: [], runs=SimpleNamespace(topology=None)
    )


def _fit(monkeypatch: pytest.MonkeyPatch, view: GradientView, earlier: Fit | None) -> Fit | None:
    rows = {replica: SimpleNamespace(rows=(str(replica),)) for replica in view.locals}
    monkeypatch.setattr(arithmetic, "complete", lambda trace, optimizer: [rows] * 6)
    return fit_step(_comparison(view), "adam", 5, earlier)


def test_the_factor_of_an_earlier_step_explains_a_later_one_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fit(monkeypatch, LOUD, None) is None
    found = _fit(monkeypatch, LOUD, Fit("adam", 0, scale=2.0))
    assert found is not None
    assert (found.step, found.scale) == (5, 2.0)


def test_the_factor_of_an_earlier_step_is_not_taken_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fit(monkeypatch, LOUD, Fit("adam", 0, scale=4.0)) is None


def _with_decay(shares: dict[int, float], coefficient: float) -> GradientView:
    """Return a view whose replicas' gradients need these weights, and have a multiple of the weights too much then."""
    generator = np.random.default_rng(0)
    weight, *locals_ = generator.normal(size=(1 + len(shares), 40))
    reference = sum(share * one for share, one in zip(shares.values(), locals_, strict=True)) - coefficient * weight
    return GradientView("kernel", dict(zip(shares, locals_, strict=True)), reference, weight, 1e-6)


@pytest.mark.parametrize("shares", [{0: 1.5, 1: 0.5}, {0: 0.9, 1: 1.2, 2: 0.9}])
def test_weights_of_replicas_and_a_term_without_examples_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, shares: dict[int, float]
) -> None:
    found = _fit(monkeypatch, _with_decay(shares, 0.25), None)
    assert found is not None
    assert found.shares == pytest.approx(shares, rel=1e-5)
    assert found.decay["kernel"][0] == pytest.approx(0.25, rel=1e-5)
    assert not found.uneven


@pytest.mark.filterwarnings("error")
def test_changes_that_are_not_finite_have_no_factor_and_no_warning() -> None:
    assert one_factor([(np.array([np.inf, 1.0]), np.array([1.0, 1.0]))]) is None
    assert one_factor([(np.array([2.0, 4.0]), np.array([1.0, 2.0]))]) == 2.0
