"""A factor that was measured in one step is known again in a later one, where it cannot be measured any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emulate.verify import arithmetic
from emulate.verify.arithmetic import Fit, fit_step
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
