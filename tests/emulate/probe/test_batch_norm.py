"""BatchNormalization on one device with the statistics of each replica's share: what replicas compute without synchronizing."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.interventions import by_share, permutation, splits_of
from emulate.recorder import SYNCHRONIZED
from emulate.trace import Trace
from tests.emulate.probe.loops import BATCH, arrays

UNEVEN = 4 * BATCH - 7
"""Examples of an epoch whose last batch leaves replicas with fewer rows than others."""


def fit(*, legacy: bool = False, synchronized: bool = False) -> None:
    """Train a model with two normalizations in Keras's `fit`."""
    import tensorflow as tf

    if legacy:
        import tf_keras as keras
    else:
        import keras  # type: ignore[no-redef]

    x, y = arrays()
    more = {"synchronized": True} if synchronized else {}
    with tf.distribute.MirroredStrategy().scope():
        normalized = [keras.layers.BatchNormalization(**more) for _ in range(2)]
        layers = [keras.layers.Dense(8), normalized[0], keras.layers.ReLU(), keras.layers.Dense(3), normalized[1]]
        model = keras.Sequential([keras.layers.InputLayer((6,)), *layers])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x[:UNEVEN], y[:UNEVEN], batch_size=BATCH, shuffle=False, verbose=0)


def tensors(trace: Trace, step: int) -> dict[str, Any]:
    """Return the summed gradients of a step, and what the first replica's variables hold after it."""
    (optimizer,) = trace.optimizers
    replicas = trace.steps(optimizer)[step]
    gradients = {
        name: np.sum([one.gradients[name].read() for one in replicas.values()], axis=0) for name in replicas[0].gradients
    }
    return gradients | {f"{name} after": one.array.read() for name, one in replicas[0].weights.items() if one.array is not None}


def apart(one: Trace, other: Trace, step: int) -> list[str]:
    pairs = tensors(one, step), tensors(other, step)
    return [name for name in pairs[0] if not np.allclose(pairs[0][name], pairs[1][name], rtol=1e-4, atol=1e-5)]


@pytest.mark.parametrize("legacy", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["keras", "tf_keras"])
def test_one_device_that_normalizes_by_share_trains_as_replicas_do_up_to_an_uneven_last_batch(
    recorded: Any, legacy: bool
) -> None:
    three = recorded(partial(fit, legacy=legacy), "1x3")
    plain, alike = (
        recorded(partial(fit, legacy=legacy), "1x1", reference=True, switches=frozenset(switches))
        for switches in ((), (by_share([BATCH // 3] * 3),))
    )
    assert apart(three, plain, 0)
    assert [apart(three, alike, step) for step in range(3)] == [[]] * 3
    assert alike.num_steps == three.num_steps == 4


def test_layers_that_synchronize_have_the_statistics_of_the_whole_batch(recorded: Any) -> None:
    program = partial(fit, synchronized=True)
    plain, alike = (
        recorded(program, "1x1", reference=True, switches=frozenset(switches)) for switches in ((), (by_share([8] * 3),))
    )
    assert [apart(plain, alike, step) for step in range(4)] == [[]] * 4


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=64))
def test_the_switch_tells_each_replicas_rows(rows: list[int]) -> None:
    assert splits_of([SYNCHRONIZED, by_share(rows, [10, 9])]) == [rows, [10, 9]]
    assert splits_of([SYNCHRONIZED]) == []


def test_the_switch_stays_short_enough_for_a_files_name() -> None:
    assert len(by_share([32] * 1024)) < 40


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(0, 99))
def test_rows_in_another_order_stay_in_their_share(shares: list[int], rows: int) -> None:
    order = permutation(np.random.default_rng(0), rows, [shares] if shares else [])
    share_of = np.repeat(np.arange(len(shares)), shares)[:rows]
    share_of = np.concatenate([share_of, np.full(rows - len(share_of), max(len(shares) - 1, 0))])
    assert sorted(order) == list(range(rows))
    assert list(share_of[order]) == list(share_of)
