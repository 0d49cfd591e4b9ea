"""Metrics under CentralStorageStrategy count each row once; and Keras still makes this necessary."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.core.conftest import OnHosts


def _means() -> dict[str, float]:
    import keras
    import tensorflow as tf

    from gpudist_core import share as shares

    where = tf.distribute.experimental.CentralStorageStrategy()
    found: dict[str, float] = {}
    for name in ("plain", "adding"):
        with where.scope():
            mean = keras.metrics.Mean()
            area = keras.metrics.AUC(num_thresholds=3)

        def count(step: Any, mean: Any = mean, area: Any = area, name: str = name) -> None:
            in_step = shares.sharing(shares.Share(tf.constant(1))) if name == "adding" else contextlib.nullcontext()
            replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            with in_step:
                mean.update_state(step * (1.0 + replica))
                area.update_state([1.0, 0.0], [0.9, 0.6])

        train = tf.function(lambda step, count=count: where.run(count, args=(step,)), autograph=False)
        for step in (1.0, 2.0, 6.0):
            train(tf.constant(step))
        found |= {name: float(mean.result()), f"{name} count": float(mean.count.numpy())}
        found[f"{name} area"] = float(tf.reduce_sum(area.true_positives))
        mean.reset_state()
        found[f"{name} after a reset"] = float(mean.count.numpy())
    return found


def test_each_row_is_counted_once_and_keras_alone_counts_the_first_ones_again(on_hosts: OnHosts) -> None:
    (found,) = on_hosts("1x2", _means)
    assert found["plain count"] == 14, "Keras counts right under CentralStorageStrategy: upstream/strategies.py"
    assert (found["adding"], found["adding count"], found["adding after a reset"]) == (4.5, 6, 0)
    assert found["adding area"] == 2 * 6


def _trained(central: bool) -> list[Any]:
    """After own steps that accumulate and scale losses, with BatchNormalization and an optimizer that assigns by itself."""
    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    strategy = tf.distribute.experimental.CentralStorageStrategy() if central else gd.make_strategy()
    random = np.random.default_rng(1)
    x, y = random.random((26, 4), np.float32), random.random((26, 1), np.float32)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.Input((4,)),
            keras.layers.Dense(3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01), initial_scale=4, dynamic_growth_steps=2)
    step = gd.TrainStep(model, optimizer, "mean_squared_error", accumulate=2)
    for batch in gd.Pipeline.from_arrays((x, y), global_batch_size=5).distribute(strategy):
        step(batch)
    return [np.asarray(variable) for variable in [optimizer.dynamic_scale, optimizer.step_counter, *model.variables]]


def test_a_step_accumulates_normalizes_and_updates_as_on_one_device(on_hosts: OnHosts) -> None:
    ((central,), (alone,)) = on_hosts("1x2", _trained, True), on_hosts("1x1", _trained, False)
    assert (central[0], central[1]) == (alone[0], alone[1]) == (8, 1)
    for mine, wanted in zip(central, alone, strict=True):
        assert mine == pytest.approx(wanted, abs=2e-6)
