"""What gpudist_core keeps of an object lives beside it, and as long as it does."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from gpudist_core.state import Kept
from tests.core.conftest import OnHosts


class _Equal:
    """As a variable of TensorFlow: not hashable, and equal to others."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_objects_that_are_equal_and_not_hashable_have_a_state_each() -> None:
    kept: Kept[list[int]] = Kept(list)
    one, other = _Equal(), _Equal()
    kept.of(one).append(1)
    assert (kept.of(one), kept.of(other), vars(one)) == ([1], [], {})


def test_an_object_that_nobody_has_asked_about_has_no_state() -> None:
    kept: Kept[list[int]] = Kept(list)
    assert kept.known(_Equal()) is None


@pytest.mark.parametrize("times", [1, 100])
def test_a_state_ends_with_its_object_and_is_not_that_of_the_next_one_at_its_place(times: int) -> None:
    kept: Kept[list[int]] = Kept(list)
    for _ in range(times):
        owner = _Equal()
        assert kept.of(owner) == []
        kept.of(owner).append(1)
        del owner
    gc.collect()
    assert kept._states == {}


def _trained() -> tuple[list[str], bool]:
    """The attributes of ours on what a user has made, and whether it goes when the user lets go of it."""
    import warnings
    import weakref

    import keras
    import numpy as np

    import gpudist_core as gd
    from gpudist_core import state

    def train() -> tuple[list[str], Any]:
        strategy = gd.make_strategy()
        with strategy.scope():
            model = gd.distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
            optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
            model.compile(
                optimizer, "mse", metrics=["mae", keras.metrics.MeanMetricWrapper(lambda y, p: 0 * p[0, 0], name="one")]
            )
        x = np.ones((8, 4), "float32")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the metric's function, which is remembered
            model.fit(x, x[:, :1], batch_size=4, verbose=0, validation_data=(x, x[:, :1]))
        owners = [model, optimizer, strategy, *model.layers, *model.metrics, *model.variables, *optimizer.variables]
        return sorted({name for owner in owners for name in vars(owner) if "gpudist" in name}), weakref.ref(optimizer)

    names, optimizer = train()
    keras.backend.clear_session()
    gc.collect()
    return names, optimizer() is None and not state.of_model._states


def test_a_user_s_objects_have_no_attribute_of_ours_and_are_freed(on_hosts: OnHosts) -> None:
    assert on_hosts("1x2", _trained) == [([], True)]
