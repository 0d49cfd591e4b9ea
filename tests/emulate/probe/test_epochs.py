"""The length of the first epoch is known before it ends, from what trains and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from emulate import upstream
from emulate.recorder.epochs import EpochsOfData, FirstEpoch
from tests.emulate.probe.conftest import Recorded
from tests.emulate.probe.loops import arrays


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda rows: rows.batch(10), 6),
        (lambda rows: rows.shuffle(96).map(lambda row: row).batch(10).map(lambda row: row).cache().prefetch(2), 6),
        (lambda rows: rows.batch(10, num_parallel_calls=2), 6),
        (lambda rows: rows.batch(12), None),
        (lambda rows: rows.batch(10, drop_remainder=True), None),
        (lambda rows: rows.batch(10).repeat(2), None),
        (lambda rows: rows.filter(lambda row: row > 3).batch(10), None),
        (lambda rows: tf.data.Dataset.zip(rows.batch(10), rows.batch(10)), None),
        (lambda rows: rows, None),
    ],
)
def test_a_last_batch_with_fewer_examples_is_known_from_the_dataset(make: Any, last: int | None) -> None:
    assert upstream.last_batch(make(tf.data.Dataset.range(96))) == last


def fit(kind: str) -> None:
    import keras
    import tensorflow as tf

    x, y = arrays()
    with tf.distribute.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.evaluate(x[:50], y[:50], batch_size=8, verbose=0)
    if kind == "arrays":
        model.fit(x, y, batch_size=20, validation_data=(x, y), verbose=0)
    else:
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat(), steps_per_epoch=11, epochs=2, verbose=0)


def loop(kind: str) -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    rows = tf.data.Dataset.from_tensor_slices(arrays()[0])
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6, 1]))
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weights])
    if kind == "pipeline":
        import gpudist_core as gd

        data = gd.Pipeline.from_arrays(arrays()[0], global_batch_size=20).distribute(strategy)
    elif kind == "function":
        data = strategy.distribute_datasets_from_function(lambda context: rows.batch(10))
    else:
        data = strategy.experimental_distribute_dataset(rows.batch(20))

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ weights - 1)
        optimizer.apply_gradients(zip(tape.gradient(loss, [weights]), [weights], strict=True))

    def epoch() -> None:
        for batch in data:
            strategy.run(step, args=(batch,))

    epoch = tf.function(epoch) if kind == "graph" else epoch
    iter(rows.batch(3))
    epoch()
    iter(rows.batch(3))


@pytest.mark.parametrize(
    ("program", "batches", "last"),
    [
        (lambda: fit("arrays"), 5, 16),
        pytest.param(lambda: loop("pipeline"), 5, None, marks=pytest.mark.slow),
        pytest.param(lambda: fit("endless"), 11, None, marks=pytest.mark.slow),
        (lambda: loop("dataset"), 5, 16),
        (lambda: loop("graph"), 5, 16),
        pytest.param(lambda: loop("function"), 5, None, marks=pytest.mark.slow),
    ],
    ids=["fit", "loop over a pipeline", "fit endless", "loop", "loop in a graph", "loop from a function"],
)
def test_an_epoch_is_that_of_the_data_that_trains(recorded: Recorded, program: Any, batches: int, last: int | None) -> None:
    events = [event for _, event in recorded(program, steps=2).of("epoch")]
    assert events == [{"event": "epoch", "batches": batches, "last": last}]


def test_a_dataset_is_kept_only_where_it_is_needed() -> None:
    for keeps_dataset in (False, True):
        epochs, dataset = EpochsOfData(lambda event: None, keeps_dataset=keeps_dataset), object()
        epochs.begins(dataset, FirstEpoch())
        epochs.step_made()
        epochs.begins(object(), FirstEpoch())
        assert epochs.dataset is (dataset if keeps_dataset else None)
