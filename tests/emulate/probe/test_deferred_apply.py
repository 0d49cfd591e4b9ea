"""Gradients that are applied apart from the run that made them: the step has that run's rows, not what was handed over."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from emulate.trace import Facts
from tests.emulate.probe.loops import BATCH, arrays


def _two_phases(micro_batches: int) -> None:
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        update = keras.optimizers.SGD(0.01)
        update.build(model.trainable_variables)

    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / BATCH / micro_batches
        return tape.gradient(loss, model.trainable_variables)

    def apply(*gradients: Any) -> None:
        total = [tf.add_n(list(parts)) for parts in zip(*gradients, strict=True)]
        update.apply_gradients(zip(total, model.trainable_variables, strict=True))

    @tf.function
    def made(x: Any, y: Any) -> Any:
        return strategy.run(gradients, args=(x, y))

    waiting = []
    for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)):
        waiting.append(made(x, y))
        if len(waiting) == micro_batches:
            strategy.run(apply, args=tuple(waiting))
            waiting.clear()


def _rows(trace: Any, index: int) -> Counter[str]:
    return Counter(row for step in trace.steps("sgd")[index].values() for row in step.rows)


def test_a_step_has_the_rows_of_the_runs_that_made_its_gradients(recorded: Any) -> None:
    two, one = recorded(lambda: _two_phases(2), steps=9), recorded(lambda: _two_phases(2), "1x1", reference=True, steps=9)
    for index in range(2):
        assert _rows(two, index) == _rows(one, index)
        assert _rows(two, index).total() == 2 * BATCH
        assert all(not step.inputs and step.objective is not None for step in two.steps("sgd")[index].values())
        assert all(step.runs == 2 for step in two.steps("sgd")[index].values())


def test_gradients_handed_to_a_function_are_not_permuted_as_rows_are(recorded: Any) -> None:
    plain = recorded(lambda: _two_phases(1), "1x1", reference=True, steps=9)
    apply_only = Facts.of(plain).apply_only
    assert [name.rpartition(".")[2].partition(":")[0] for name in apply_only] == ["apply"]
    noise = recorded(lambda: _two_phases(1), "1x1", reference=True, steps=9, permute=True, apply_only=apply_only)
    for ours, theirs in zip(noise.steps("sgd"), plain.steps("sgd"), strict=True):
        for name, gradient in theirs[0].gradients.items():
            np.testing.assert_allclose(ours[0].gradients[name].read(), gradient.read(), atol=1e-6)
        assert Counter(ours[0].rows) == Counter(theirs[0].rows)


def _kept_until_the_last(micro_batches: int) -> None:
    """Gradients are kept in variables; the run with the last batch adds its own and updates."""
    import keras
    import tensorflow as tf

    strategy = (
        tf.distribute.MirroredStrategy() if len(tf.config.list_physical_devices("GPU")) > 1 else tf.distribute.get_strategy()
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        update = keras.optimizers.SGD(0.01)
        update.build(model.trainable_variables)
        own = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
        totals = [tf.Variable(tf.zeros(v.shape), trainable=False, **own) for v in model.trainable_variables]

    def run(x: Any, y: Any, is_last: bool) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / BATCH / micro_batches
        for total, gradient in zip(totals, tape.gradient(loss, model.trainable_variables), strict=True):
            total.assign_add(gradient)
        if is_last:
            update.apply_gradients(zip([total.read_value() for total in totals], model.trainable_variables, strict=True))
            for total in totals:
                total.assign(tf.zeros(total.shape))

    @tf.function
    def each(x: Any, y: Any, is_last: bool) -> None:
        strategy.run(run, args=(x, y, is_last))

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH))
    for number, (x, y) in enumerate(data):
        each(x, y, number % micro_batches == micro_batches - 1)


@pytest.mark.slow  # test_a_step_has_the_rows_of_the_runs_that_made_its_gradients is the fast one
def test_the_run_that_updates_with_the_last_batch_has_the_rows_of_those_before_it(recorded: Any) -> None:
    def program() -> None:
        _kept_until_the_last(2)

    two, one = recorded(program, steps=9), recorded(program, "1x1", reference=True, steps=9)
    for index in range(2):
        assert _rows(two, index) == _rows(one, index)
        assert _rows(two, index).total() == 2 * BATCH
        for trace in (two, one):
            assert all((step.runs, step.inputs) == (2, ()) for step in trace.steps("sgd")[index].values())
