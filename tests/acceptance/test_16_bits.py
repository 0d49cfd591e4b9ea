"""A program in 16 bits is judged as sharply as one in 32."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
keras.config.set_dtype_policy("mixed_bfloat16")
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(96, 20)).astype("float32")
with strategy.scope():
    hidden = keras.layers.Dense(32, "relu", kernel_regularizer=keras.regularizers.L2(0.01))
    model = keras.Sequential([keras.Input((20,)), hidden, keras.layers.Dense(3, dtype="float32")])
    optimizer = keras.optimizers.Adam(0.01)

def train(x, y):
    with tf.GradientTape() as tape:
        each = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        loss = tf.reduce_sum(each) / 24 + tf.add_n(model.losses){share}
    gradients = tape.gradient(loss, model.trainable_variables)
    {clip}
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

step = tf.function(lambda rows: strategy.reduce("SUM", strategy.run(train, rows), axis=None))
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(24)):
    print(float(step(batch)))
"""
OF_ALL = """context = tf.distribute.get_replica_context()
    gradients, _ = tf.clip_by_global_norm(context.all_reduce("SUM", gradients), 0.05)
    gradients = [g / strategy.num_replicas_in_sync for g in gradients]"""


def test_what_16_bits_would_hide_is_found_with_the_layers_in_32(tmp_path: Path, preload: Preload) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(share="", clip="pass"))
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    print(render(verdict))
    assert [cause.code for cause in verdict.runs[0].causes] == ["regularization-per-replica"]
    assert verdict.notes[0].startswith("The program computes in bfloat16. gpudist compares runs with its layers in 32 bits")


@pytest.mark.slow
def test_a_right_program_that_clips_what_was_rounded_to_16_bits_is_equivalent(tmp_path: Path, preload: Preload) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(share=" / strategy.num_replicas_in_sync", clip=OF_ALL))
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    print(render(verdict))
    assert verdict.runs[0].verdict == "equivalent"


DROPPING = """
import keras, numpy as np, tensorflow as tf
keras.mixed_precision.set_global_policy("mixed_float16")
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
x[21] = 2000.0  # with the scale the gradients of this row are infinite in float16
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3, dtype="float32")])
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)

def train(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        scaled = tf.reduce_sum(losses) / 16 * 4096.0
    gradients = [g / 4096.0 for g in tape.gradient(scaled, model.trainable_variables)]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
    {of_all}
    gradients = [tf.where(finite, g, tf.zeros_like(g)) for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return scaled / 4096.0

step = tf.function(lambda rows: strategy.reduce("SUM", strategy.run(train, rows), axis=None))
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(16)):
    print(float(step(batch)))
"""
ASKED = """number = tf.distribute.get_replica_context().all_reduce("SUM", tf.cast(finite, tf.float32))
    finite = number == strategy.num_replicas_in_sync"""


@pytest.mark.parametrize(
    ("of_all", "expected"),
    [
        pytest.param("pass", ["clip-before-reduce"], id="its own"),
        pytest.param(ASKED, [], id="all", marks=pytest.mark.slow),
    ],
)
def test_a_replica_that_drops_its_own_gradients_is_told_and_replicas_that_drop_them_together_are_not(
    tmp_path: Path, preload: Preload, of_all: str, expected: list[str]
) -> None:
    (tmp_path / "train.py").write_text(DROPPING.replace("{of_all}", of_all))
    (run,) = (verdict := emulate.verify(tmp_path / "train.py", "1x2", preload=preload)).runs
    print(render(verdict))
    assert ([cause.code for cause in run.causes], run.verdict) == (expected, "divergent" if expected else "equivalent")
    assert all("finite = tf.reduce_all" in place.text for cause in run.causes for place in cause.locations)
