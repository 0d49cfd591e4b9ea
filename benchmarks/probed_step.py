"""One host with two copies of a digits CNN's training step on four devices: one probed, one not, stepped in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.digits_cnn import BATCH, cnn, digits

STEPS = 150
WARM_UP = 30


def compare() -> tuple[float, float]:
    """Median seconds of a probed and of a plain step."""
    from emulate import probe
    from emulate.recorder import ProbePlan, Recorder

    plain = _make_step()
    plain()  # traced before the probe is there
    with tempfile.TemporaryDirectory(prefix="gpudist-bench-") as folder:
        recorder = Recorder(ProbePlan(trace=Path(folder), steps=None), host=0, send=lambda event: None)
        probe.install(recorder)
        probed = _make_step()
        times = [(_seconds(probed), _seconds(plain)) for _ in range(WARM_UP + STEPS)][WARM_UP:]
        recorder.finish("returned")
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times)


def _seconds(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    float(step())
    return time.perf_counter() - started


def _make_step() -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    images, labels = digits((8, 8, 1))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(1797, seed=1).repeat().batch(BATCH)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        model = cnn()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    return lambda: train(*next(batches))
