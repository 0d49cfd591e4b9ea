"""The faults of Keras that gpudist_core works round are still there; when a test fails, upstream has mended it: look again."""

from __future__ import annotations

from typing import Any

from tests.core.conftest import OnHosts


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
