"""A deep network that amplifies rounding: the reference follows the run, and each step is judged by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload

PROGRAM = """
import keras, numpy as np, tensorflow as tf
BATCH = 24
keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(0)
x = rng.normal(size=({rows}, 10)).astype("f4")
y = np.sin(3 * x[:, :1] * x[:, 1:2]).astype("f4")
with strategy.scope():
    init = [keras.initializers.HeNormal(seed=k) for k in range(12)]
    layers = [keras.layers.Dense(64, "relu", kernel_initializer=one) for one in init]
    model = keras.Sequential([keras.Input((10,)), *layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)

@tf.function
def train(x, y):
    def step(x, y):
        is_late = optimizer.iterations >= 8
        with tf.GradientTape() as tape:
            errors = (model(x) - y) ** 2
            loss = {loss}
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss
    return strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None)

data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
for k, batch in enumerate(strategy.experimental_distribute_dataset(data)):
    if k == {rate_from}:
        optimizer.learning_rate.assign(0.05 * strategy.num_replicas_in_sync)
    train(*batch)
"""
SUM = "tf.reduce_sum(errors) / BATCH"


def verdict_of(folder: Path, preload: Preload, *, rows: int = 240, loss: str = SUM, rate_from: int = -1) -> emulate.Run:
    (folder / "train.py").write_text(PROGRAM.format(rows=rows, loss=loss, rate_from=rate_from))
    (run,) = emulate.verify(folder / "train.py", "1x2", preload=preload).runs
    return run


@pytest.mark.slow
def test_a_correct_program_whose_optimizer_makes_steps_of_rounding_is_equivalent(tmp_path: Path, preload: Preload) -> None:
    run = verdict_of(tmp_path, preload)
    assert (run.verdict, [cause.code for cause in run.causes]) == ("equivalent", [])
    assert not any("gpudist cannot see differences" in note for note in run.notes)


@pytest.mark.slow
def test_a_last_batch_that_weighs_too_much_is_named_in_its_step(tmp_path: Path, preload: Preload) -> None:
    run = verdict_of(tmp_path, preload, rows=247, loss="tf.reduce_mean(errors) / strategy.num_replicas_in_sync")
    assert [cause.code for cause in run.causes] == ["uneven-batch"]
    assert run.first_divergence is not None
    assert run.first_divergence.step == 10


@pytest.mark.slow
def test_a_loss_that_is_wrong_in_late_steps_alone_is_named(tmp_path: Path, preload: Preload) -> None:
    run = verdict_of(tmp_path, preload, loss=f"{SUM} / tf.where(is_late, 1.0 * strategy.num_replicas_in_sync, 1.0)")
    assert [cause.code for cause in run.causes] == ["loss-scaling"]
    assert run.first_divergence is not None
    assert run.first_divergence.step == 8


@pytest.mark.slow
def test_a_learning_rate_that_grows_with_the_replicas_late_is_not_taken_for_rounding(tmp_path: Path, preload: Preload) -> None:
    run = verdict_of(tmp_path, preload, rate_from=7)
    assert run.verdict == "divergent"
    assert [cause.code for cause in run.causes] == ["depends-on-replicas"]
    assert run.first_divergence is not None
    assert (run.first_divergence.kind, run.first_divergence.step) == ("weight", 7)
