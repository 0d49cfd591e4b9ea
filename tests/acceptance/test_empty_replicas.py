"""A replica without examples fails in kernels that only CPUs have: the program is judged without them."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(17, 6, 6, 1)).astype("float32")
y = np.random.default_rng(1).integers(0, 3, 17)
with strategy.scope():
    layers = [keras.layers.Conv2D(3, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
@tf.function
def train(x, y):
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / 8
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
    train(x, y)
"""


ENDS = """
import os
if strategy.num_replicas_in_sync > 1 and os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0":
    os.write(2, b"F0000 00:00:1.5 7 tensor.cc:896] Check failed: dtype() == expected_dtype (1 vs. 3)\\n")
    os.abort()
"""


@pytest.mark.slow
def test_a_replica_without_examples_is_no_failure_of_the_program(preload: Preload, tmp_path: Path) -> None:
    from tensorflow.python.util import _pywrap_util_port

    (tmp_path / "train.py").write_text(PROGRAM)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    assert verdict.verdict == "equivalent", render(verdict)
    assert verdict.runs[0].steps == 3
    is_off = "onednn-off" in {note.code for note in verdict.notes}
    assert is_off == _pywrap_util_port.IsMklEnabled()


def test_a_process_that_these_kernels_end_is_started_again_without_them(preload: Preload, tmp_path: Path) -> None:
    program = PROGRAM.replace("@tf.function", f"{ENDS}@tf.function").replace("batch(8)", "batch(8, True)")
    (tmp_path / "train.py").write_text(program)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    assert (verdict.verdict, [note.code for note in verdict.notes]) == ("equivalent", ["onednn-off"]), render(verdict)
