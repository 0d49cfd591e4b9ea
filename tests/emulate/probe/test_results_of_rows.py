"""What a step returns for each row comes back in the program's own order, also where its rows were put in another one."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emulate.cluster import Cluster, Preload
from tests.emulate.probe.loops import arrays

UNEVEN = 20
"""The last batch of 96 rows has 16."""


def _own_labels(*, eager: bool = False) -> None:
    """Predictions are kept, and are the labels of the rows that they were made of."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        update = keras.optimizers.SGD(0.1)
        update.build(model.trainable_variables)

    def predict(x: Any) -> Any:
        return model(x, training=False)[:, 0]

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True)[:, 0] - y) ** 2) / UNEVEN
        update.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))

    def run(function: Any) -> Any:
        called = lambda *rows: strategy.run(function, args=rows)  # noqa: E731
        return called if eager else tf.function(called)

    def batches(*rows: Any) -> Any:
        return strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(UNEVEN))

    x, predicted, train = arrays()[0], run(predict), run(step)
    labels = np.concatenate([strategy.gather(predicted(rows), axis=0).numpy() for rows in batches(x)])
    for rows in batches(x, np.sin(9 * labels)):
        train(*rows)


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_predictions_that_become_labels_are_those_of_their_rows_in_a_permuted_run(recorded: Any, eager: bool) -> None:
    def program() -> None:
        _own_labels(eager=eager)

    plain, permuted = (recorded(program, "1x1", reference=True, steps=9, **more) for more in ({}, {"permute": True}))
    assert len(plain.steps("sgd")) == len(permuted.steps("sgd")) == 5
    for ours, theirs in zip(permuted.steps("sgd"), plain.steps("sgd"), strict=True):
        assert ours[0].rows != theirs[0].rows
        for name, gradient in theirs[0].gradients.items():
            np.testing.assert_allclose(ours[0].gradients[name].read(), gradient.read(), atol=1e-6)
    assert Counter(permuted.steps("sgd")[0][0].rows) == Counter(plain.steps("sgd")[0][0].rows)


def test_rows_of_any_kind_come_back_and_weights_numbers_and_others_stay(preload: Preload) -> None:
    def returned() -> list[bool]:
        import tensorflow as tf

        from emulate.interventions.rows import in_another_order, put_back

        def step(x: Any, words: Any, parts: Any) -> Any:
            few = tf.reduce_sum(x, 0)[:5]
            return {"x": 2 * x, "words": words, "parts": parts, "few": few, "one": tf.reduce_sum(x), "text": "as it is"}

        x = tf.random.stateless_normal([6, 7], [1, 2])
        words = tf.ragged.constant([["a"], [], ["b", "c"], ["d"], [], ["e"]])
        parts = tf.sparse.from_dense(tf.eye(6))
        weight = tf.Variable(tf.zeros([6, 3]))
        body: Any = SimpleNamespace(tape=[([None], [weight])], models={})

        def made(x: Any, words: Any, parts: Any) -> Any:
            args, _, order = in_another_order(3, (x, words, parts), {})
            of_weight = tf.ensure_shape(tf.gather(tf.reshape(tf.range(18.0), [6, 3]), order), [6, 3])
            return put_back(body, order, (step(*args), of_weight)), of_weight, args[0]

        found = []
        unknown = (tf.TensorSpec([None, 7]), tf.RaggedTensorSpec([None, None], tf.string), tf.SparseTensorSpec([None, 6]))
        for call in (made, tf.function(made), tf.function(made, input_signature=unknown)):
            (result, kept), of_weight, permuted = call(x, words, parts)
            found += [
                bool(tf.reduce_any(permuted != x)),
                bool(tf.reduce_all(result["x"] == 2 * x)),
                result["words"].to_list() == words.to_list(),
                bool(tf.reduce_all(tf.sparse.to_dense(result["parts"]) == tf.eye(6))),
                bool(tf.reduce_all(kept == of_weight)),
                result["few"].shape == [5] and result["one"].shape == [],
            ]
        return found

    with Cluster("1x1", preload=preload) as cluster:
        assert cluster.run(returned) == [[True] * 18]


def test_a_step_gets_the_rows_of_each_share_in_another_order(preload: Preload) -> None:
    def ordered() -> list[list[int]]:
        import tensorflow as tf

        from emulate.interventions.rows import in_another_order

        def rows(number: int) -> list[int]:
            (args, _, order) = in_another_order(3, (tf.range(number)[:, None],), {}, [[8, 8, 4], [5, 5, 3]])
            assert bool(tf.reduce_all(args[0][:, 0] == order))
            return [int(row) for row in order]

        return [rows(20), rows(11), rows(13)]

    with Cluster("1x1", preload=preload) as cluster:
        ((full, fewer, other),) = cluster.run(ordered)
    for order in (full, fewer):
        assert order != sorted(order)
        assert all(sorted(order[first : first + 8]) == list(range(first, min(first + 8, len(order)))) for first in (0, 8, 16))
    assert [sorted(other[first : first + 5]) for first in (0, 5, 10)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]
