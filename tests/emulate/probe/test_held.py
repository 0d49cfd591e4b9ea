"""What a host's step holds besides its rows and its variables."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from tests.emulate.probe.loops import BATCH, arrays


def _with_numbers_of_its_own() -> None:
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
    index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        update = keras.optimizers.SGD(0.01)
        update.build(model.trainable_variables)
    factor = 1.25 + index
    pool = tf.reshape(tf.range(240, dtype=tf.float32), (40, 6)) + float(index)  # too large to become a constant
    chosen = np.arange(30) + index

    @tf.function
    def inner(losses: Any) -> Any:
        return tf.reduce_sum(losses * factor) / BATCH

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = inner(losses) + 1e-3 * tf.reduce_sum(model(tf.gather(pool, tf.constant(chosen))) ** 2)
        update.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))

    @tf.function
    def run(x: Any, y: Any) -> None:
        strategy.run(step, args=(x, y))

    for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)):
        run(x, y)


def _held(trace: Any) -> dict[int, dict[str, list[str]]]:
    return {host: event["held"] for host, event in trace.of("program")}


def test_constants_of_the_step_and_what_it_closes_over_are_told_by_host(recorded: Any) -> None:
    held = _held(recorded(_with_numbers_of_its_own, "2x2", steps=2))
    assert set(held[0]) == set(held[1])
    apart = {place.partition("|")[2]: place for place in held[0] if held[0][place] != held[1][place]}
    assert set(apart) == {"float32|number", "float32|6", "int64|"}
    assert apart["float32|number"].startswith("test_held.py:")
    assert apart["float32|6"] == "|float32|6"
    assert [held[host][apart["float32|number"]][0] for host in (0, 1)] == ["1.25", "2.25"]
    assert held[1][apart["float32|6"]][0].startswith("1, 2, 3, ... (shape [40, 6], ")
    assert held[1][apart["int64|"]][0].startswith("1, 2, 3, ... (shape [30], ")


def test_one_host_alone_has_nothing_to_be_compared_with(recorded: Any) -> None:
    assert set(map(str, _held(recorded(_with_numbers_of_its_own, "1x2", steps=2)).values())) == {"{}"}
