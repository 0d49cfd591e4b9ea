"""`gpudist verify --against`: two arms of a program, on the same topology and at the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload

FIT = """
import os, sys
import keras, numpy as np
draw = np.random.default_rng(0)
rows, labels = draw.normal(size=(48, 6)).astype("f4"), draw.integers(0, 3, 48)
keras.utils.set_random_seed(1)
layers = [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
model = keras.Sequential([*layers, keras.layers.Dense(3)])
rate = float(os.environ.get("RATE", "0.01"))
model.compile(
    keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile="--xla" in sys.argv
)
model.fit(rows, labels, batch_size=8, epochs=1, verbose=0)
"""

LOOP = """
import sys
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
draw = np.random.default_rng(0)
rows, wanted = draw.integers(0, 9, (48, 3)).astype("int32"), draw.normal(size=(48, 1)).astype("f4")

@tf.function(jit_compile="--xla" in sys.argv)
def gradients_of(x, y, factor):
    with tf.GradientTape() as tape:
        loss = factor * tf.reduce_sum((model(x) - y) ** 2) / 8
    return loss, tape.gradient(loss, model.trainable_variables)

@tf.function
def train(x, y):
    def step(x, y):
        late = tf.cast(optimizer.iterations >= 3, tf.float32)
        loss, gradients = gradients_of(x, y, 1 + 0.01 * late if "--late" in sys.argv else 1.0)
        optimizer.apply(gradients, model.trainable_variables)
        return loss
    return strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None)

for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((rows, wanted)).batch(8)):
    train(*batch)
"""


WHOLE = """
import sys
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
draw = np.random.default_rng(0)

@tf.function(jit_compile="--xla" in sys.argv)
def train(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss

for _ in range(30):
    loss = train(draw.normal(size=(8, 6)).astype("f4"), draw.normal(size=(8, 1)).astype("f4"))
    print(float(loss))
"""


def verdict_of(
    folder: Path, preload: Preload, text: str, against: str, topology: str = "1x1", args: tuple[str, ...] = ()
) -> emulate.Verdict:
    (folder / "train.py").write_text(text)
    return emulate.verify(folder / "train.py", topology, against=against, args=args, preload=preload)


@pytest.mark.parametrize(("args", "against"), [((), "--xla"), (("--xla",), "RATE=0.01 --plain")])
def test_fit_under_xla_computes_what_fit_does_without_it(
    tmp_path: Path, preload: Preload, args: tuple[str, ...], against: str
) -> None:
    verdict = verdict_of(tmp_path, preload, FIT, against, args=args)
    (run,) = verdict.runs
    assert (run.verdict, run.steps, run.causes, run.not_compared) == ("equivalent", 6, (), ())
    assert "compared-under-xla" in run.note_codes
    assert {point.kind for point in run.course} >= {"gradient", "weight", "loss"}
    assert (verdict.reference.status, verdict.reference.against, verdict.program_starts) == ("ok", against, 3)


def test_a_loop_whose_whole_step_runs_under_xla_stops_after_its_steps(tmp_path: Path, preload: Preload) -> None:
    (run,) = verdict_of(tmp_path, preload, WHOLE, "--xla").runs
    assert (run.steps, run.steps_run.stopped, run.causes) == (20, True, ())
    assert {point.kind for point in run.course} >= {"gradient", "weight"}


def test_another_learning_rate_from_the_environment_is_a_difference_of_the_first_update(
    tmp_path: Path, preload: Preload
) -> None:
    (run,) = verdict_of(tmp_path, preload, FIT, "RATE=0.0101").runs
    assert run.verdict == "divergent"
    assert run.first_divergence is not None
    assert (run.first_divergence.kind, run.first_divergence.step) == ("weight", 0)


def test_replicas_whose_gradients_xla_computes_agree_with_those_without_it(tmp_path: Path, preload: Preload) -> None:
    (run,) = verdict_of(tmp_path, preload, LOOP, "--xla", "1x2").runs
    assert (run.verdict, run.replicas, run.steps, run.samples.seen) == ("equivalent", 2, 6, 48)


def test_gradients_that_differ_in_late_steps_alone_differ_from_there_on(tmp_path: Path, preload: Preload) -> None:
    (run,) = verdict_of(tmp_path, preload, LOOP, "--late", "1x2", ("--xla",)).runs
    assert run.verdict == "divergent"
    assert run.first_divergence is not None
    assert (run.first_divergence.kind, run.first_divergence.step) == ("gradient", 3)
    assert run.first_divergence.value is not None
    assert run.first_divergence.reference_value == pytest.approx(1.01 * run.first_divergence.value, rel=1e-4)


def test_a_step_that_xla_cannot_compile_for_several_devices_fails_as_the_second_arm(tmp_path: Path, preload: Preload) -> None:
    text = FIT.replace(
        "model = keras",
        "import tensorflow as tf\nscope = tf.distribute.MirroredStrategy().scope()\nscope.__enter__()\nmodel = keras",
    )
    verdict = verdict_of(tmp_path, preload, text, "--xla", "1x2")
    (run,) = verdict.runs
    assert (run.verdict, run.reason, verdict.reference.status) == ("failed", "reference", "failed")
