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

    from gpudist_core.pipelines.cross_host_check import of_first_host

    strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
    index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    of_first_host(strategy, 70_000 + index)  # what gpudist_core draws for itself is not the program's
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
    assert apart["float32|number"].startswith("test_captured_constants.py:")
    assert apart["float32|6"] == "|float32|6"
    assert [held[host][apart["float32|number"]][0] for host in (0, 1)] == ["1.25", "2.25"]
    assert held[1][apart["float32|6"]][0].startswith("1, 2, 3, ... (shape [40, 6], ")
    assert held[1][apart["int64|"]][0].startswith("1, 2, 3, ... (shape [30], ")


def test_one_host_alone_has_nothing_to_be_compared_with(recorded: Any) -> None:
    assert set(map(str, _held(recorded(_with_numbers_of_its_own, "1x2", steps=2)).values())) == {"{}"}


def _with_a_vocabulary_of_its_own() -> None:
    import tensorflow as tf

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    words = tf.keras.layers.StringLookup(vocabulary=["b", "a"] if index else ["a", "b"])
    mean = np.float32(index + 0.5)
    variable = tf.Variable(tf.ones(8) * index)

    def prepare(word: Any) -> Any:
        return words(word), mean + tf.reduce_sum(variable)

    texts = tf.data.Dataset.from_tensor_slices(["a", "b"])
    data = texts.map(prepare)
    texts.map(words)  # an object has no line
    with strategy.scope():
        weight = tf.Variable(1.0)
        update = tf.keras.optimizers.SGD(0.01)
        update.build([weight])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = weight * tf.cast(words(tf.constant(["a"]))[0], tf.float32)
        update.apply_gradients([(tape.gradient(loss, weight), weight)])

    for _ in data:
        tf.function(lambda: strategy.run(step))()


def test_tables_and_numbers_that_rows_are_made_with_are_told_by_host(recorded: Any) -> None:
    trace = recorded(_with_a_vocabulary_of_its_own, "2x1", steps=2)
    mapped = {host: event["mapped"] for host, event in trace.of("program")}
    (table,) = (
        place for place in mapped[0] if place.startswith("test_captured_constants.py:") and "|table|string to int64" in place
    )
    line = table.partition("|")[0]
    assert [mapped[host][f"{line}|float32|number"] for host in (0, 1)] == [["0.5"], ["1.5"]]
    assert [mapped[host][table][0].partition(" (")[0] for host in (0, 1)] == ["a for 1, b for 2", "b for 1, a for 2"]
    assert set(mapped[1]) == {table, f"{line}|float32|number", "|table|string to int64"}
    assert _held(trace)[1]["|table|string to int64"] == mapped[1][table]
