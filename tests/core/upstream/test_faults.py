"""The faults of Keras that gpudist_core works round are still there; when a test fails, upstream has mended it: look again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.conftest import OnHosts
from tests.versions import since


def _faults() -> dict[str, Any]:
    import inspect

    import keras
    import numpy as np
    import tensorflow as tf
    from keras.src.backend.tensorflow import random
    from keras.src.losses import loss

    where = tf.distribute.MirroredStrategy()
    found: dict[str, Any] = {}

    def on_both(function: Any) -> Any:
        return [
            np.asarray(v) for v in where.experimental_local_results(tf.function(lambda: where.run(function), autograph=False)())
        ]

    with where.scope():
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        kernel = keras.Variable([0.0])
        optimizer.build([kernel])
        dropout = keras.layers.Dropout(0.5, seed=1)

    def clipped() -> Any:
        optimizer.apply([tf.constant([10.0])], [kernel])
        return tf.convert_to_tensor(kernel)

    found["each replica clips its own gradient"] = on_both(clipped)[0].tolist()
    masks = on_both(lambda: dropout(tf.ones([1, 64]), training=True))
    found["replicas draw the same mask"] = bool(np.array_equal(masks[0], masks[1]))

    def mean() -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        rows = 3 - 2 * replica
        values = tf.ones([rows, 1]) * (1.0 + tf.cast(replica, tf.float32))
        return keras.losses.MeanSquaredError()(values, tf.zeros([rows, 1]))

    found["the loss is a mean of means"] = float(sum(on_both(mean)))
    parameters = inspect.signature(loss.reduce_weighted_values).parameters
    found["names"] = [list(parameters), hasattr(random, "_cast_seed"), hasattr(loss, "unscale_loss_for_distribution")]
    names = ("_backend_apply_gradients", "_all_reduce_sum_gradients", "_apply_weight_decay", "_backend_update_step")
    found["optimizer"] = [hasattr(keras.optimizers.SGD, name) for name in names]
    found["loss scale"] = hasattr(keras.optimizers.LossScaleOptimizer, "_tf_apply")
    found["moments"] = list(inspect.signature(keras.layers.BatchNormalization._moments).parameters)
    return found


def test_what_is_worked_round_is_still_so(on_hosts: OnHosts) -> None:
    (found,) = on_hosts("1x2", _faults)
    assert found["each replica clips its own gradient"] == [-2.0], "Keras clips after the sum: upstream/optimizers.py"
    assert found["replicas draw the same mask"], "Keras draws other masks: upstream/randomness.py"
    assert found["the loss is a mean of means"] == (1.0 + 4.0) / 2, "Keras counts all rows: upstream/losses.py"

    assert found["names"] == [["values", "sample_weight", "mask", "reduction", "dtype"], True, True]
    assert all(found["optimizer"])
    assert found["loss scale"]
    assert found["moments"] == ["self", "inputs", "mask"]


def _faults_of_layers() -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    where = tf.distribute.MirroredStrategy()

    class Adding(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.sum(x))
            return x

    with where.scope():
        adding = Adding()
        plain, masked = (keras.layers.BatchNormalization(synchronized=True, momentum=0.0) for _ in range(2))
        plain.build((None, 1))
        masked.build((None, 2, 1))
        scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1.0)
        kernel = keras.Variable([0.0])
        scaling.build([kernel])

    def on_both(function: Any) -> list[float]:
        values = where.experimental_local_results(tf.function(lambda: where.run(function), autograph=False)())
        return [float(np.asarray(value).reshape(())) for value in values]

    def replica() -> Any:
        return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)

    def added() -> Any:
        adding(tf.fill([1], 1.0 + replica()))
        tf.distribute.get_replica_context().all_reduce("SUM", 1.0)
        return tf.add_n(adding.losses)

    def variance() -> Any:
        plain(tf.fill([2, 1], 4096.0 + replica() / 4), training=True)
        return tf.convert_to_tensor(plain.moving_variance)

    def masked_variance() -> Any:
        masked(tf.fill([1, 2, 1], replica()), mask=tf.constant([[True, False]]), training=True)
        return tf.convert_to_tensor(masked.moving_variance)

    def scaled() -> Any:
        scaling.apply([tf.where(replica() == 1, [float("nan")], [1.0])], [kernel])
        return tf.convert_to_tensor(kernel)

    return {function.__name__: on_both(function) for function in (added, variance, masked_variance, scaled)}


def test_what_is_worked_round_in_layers_and_loss_scales_is_still_so(on_hosts: OnHosts) -> None:
    (found,) = on_hosts("1x2", _faults_of_layers)
    assert found["added"] != [1.0, 2.0], "Each replica has its own losses of layers: upstream/layers.py"
    assert abs(found["variance"][0] - 1 / 64) > 0.01, "Keras's synchronized variance has its digits: upstream/layers.py"
    assert found["masked_variance"] != pytest.approx([0.25, 0.25]), "Keras synchronizes masked moments: upstream/layers.py"
    assert found["scaled"] != [0.0, 0.0], "All replicas skip what is not finite on one: upstream/optimizers.py"


def _faults_of_fit() -> dict[str, str]:
    import os

    import keras
    import numpy as np
    import tensorflow as tf

    hosts = "TF_CONFIG" in os.environ
    where = tf.distribute.MultiWorkerMirroredStrategy() if hosts else tf.distribute.MirroredStrategy()

    def fit(rows: int, **options: Any) -> str:
        with where.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, **options), "mse")
        try:
            model.fit(np.ones((rows, 2)), np.zeros((rows, 1)), batch_size=rows, verbose=0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    if hosts:
        return {"hosts": fit(4)}
    overwriting = {"use_ema": True, "ema_overwrite_frequency": 2}
    return {"first batch": fit(3), "accumulation": fit(4, gradient_accumulation_steps=2), "averages": fit(4, **overwriting)}


def test_what_is_worked_round_in_fit_is_still_so(on_hosts: OnHosts) -> None:
    (found,) = on_hosts("1x2", _faults_of_fit)
    assert "Inputs to operation AddN" in found["first batch"], "Keras builds from uneven batches: keras_model/model.py"
    assert "merge_call" in found["accumulation"], "Keras accumulates on replicas: keras_model/accumulation.py"
    assert "merge_call" in found["averages"], "Keras overwrites with averages on replicas: upstream/optimizers.py"
    for told in on_hosts("2x1", _faults_of_fit):
        assert "Attempt to convert a value (PerReplica:" in told["hosts"], "Keras's fit runs on hosts: keras_model/model.py"


def _counted() -> dict[str, float]:
    """A mean over two replicas and three steps: what Keras counts, and what is counted once its variables are local."""
    import keras
    import tensorflow as tf

    from gpudist_core.upstream import row_means

    where = tf.distribute.MirroredStrategy()

    def count(make_local: bool) -> float:
        with where.scope():
            metric = keras.metrics.Mean()
        if make_local:
            row_means.make_variables_local(where, [metric])
        step = tf.function(lambda: where.run(lambda: metric.update_state(tf.ones([])) and None), autograph=False)
        for _ in range(3):
            step()
        return float(tf.convert_to_tensor(metric.count.value))

    return {"keras": count(False), "local": count(True)}


def test_a_metric_counts_each_example_once_since_keras_3_10(on_hosts: OnHosts) -> None:
    (found,) = on_hosts("1x2", _counted)
    assert (found["keras"] == 6) is since("keras", "3.10"), found
    assert found["local"] == 6
