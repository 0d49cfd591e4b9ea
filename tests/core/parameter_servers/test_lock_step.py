"""In lock-step, with any number of workers and servers, training gives what one device gives."""

from __future__ import annotations

from typing import Any

from tests.core.conftest import OnHosts
from tests.core.parameter_servers.programs import data, furthest

ROUNDING = 1e-6


def _dense(parts: int | None) -> Any:
    """Regularised, with dropout and an uneven last batch."""
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh", kernel_regularizer="l2"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers]), keras.optimizers.Adam(0.01)


def _embedding(parts: int | None) -> Any:
    """A table in parts, looked up repeatedly, a loss of the activity, masks and sparse gradients."""
    import keras

    from gpudist_core.parameter_servers import PartitionedEmbedding

    keras.utils.set_random_seed(2)
    ids = keras.Input((6,), dtype="int32")
    rows = PartitionedEmbedding(7, 4, parts=parts)(ids)
    x = keras.layers.Flatten()(keras.layers.Activation("tanh", activity_regularizer="l2")(rows))
    return keras.Model(ids, keras.layers.Dense(3)(x)), keras.optimizers.AdamW(0.02, clipnorm=0.3)


def _half(parts: int | None) -> Any:
    """16-bit floats and their loss scale."""
    import keras

    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "tanh", dtype="mixed_float16"), keras.layers.Dense(3, dtype="float32")]
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    return keras.Sequential([keras.Input((6,)), *layers]), optimizer


def _batches(kind: str) -> Any:
    import numpy as np

    import gpudist_core as gd

    x, y = data()
    x = (np.abs(x) * 3).astype("int32") % 7 if kind == "_embedding" else x
    weights = [np.linspace(0, 2, len(y), dtype="float32")] if kind == "_embedding" else []
    return gd.Pipeline.from_arrays((x, y, *weights), global_batch_size=8, shuffle=True, seed=3)


def _compare(build: Any, **options: Any) -> dict[str, Any]:
    """Train in lock-step, and on one device of the same process."""
    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core.parameter_servers import CoordinatedTraining

    loss, kind = keras.losses.SparseCategoricalCrossentropy(from_logits=True), build.__name__
    strategy, servers = _strategy, 2 if kind == "_embedding" else None
    with strategy.scope():
        (model, optimizer), metric = build(None), keras.metrics.SparseCategoricalAccuracy()
        training = CoordinatedTraining(model, optimizer, loss, schedule="lock-step", draws="row", metrics=[metric], **options)
        batches = _batches(kind)
        ours = [training.train(batches, 3), training.train(batches, 5), training.train(batches)]
        training.flush()
    one = tf.distribute.OneDeviceStrategy("/job:chief/task:0/device:CPU:0")
    with one.scope():
        (alone, its_optimizer), its_metric = build(servers), keras.metrics.SparseCategoricalAccuracy()
    step = gd.TrainStep(alone, its_optimizer, loss, draws="row", metrics=[its_metric], **options)
    batches = _batches(kind).distribute(one)
    theirs = [float(step(batch)) for _ in range(2) for batch in batches]
    step.flush()
    return {
        "weights": furthest(model.get_weights(), alone.get_weights()),
        "losses": float(np.abs(np.concatenate(ours) - theirs).max()),
        "metric": float(metric.result() - its_metric.result()),
        "updates": (training.num_updates, int(training.optimizer.iterations), int(step.optimizer.iterations)),
        "servers": {v.value.device[-16:] for v in [*model.weights, *optimizer.variables]},
        "slots": [
            v.value.device == s.value.device for v, s in zip(model.trainable_weights, optimizer.variables[2::2], strict=False)
        ],
    }


def _on_chief(builds: list[Any]) -> dict[str, Any]:
    import gpudist_core as gd

    global _strategy
    _strategy = gd.make_strategy()
    options = {"_dense": {"clip_global_norm": 0.5}, "_embedding": {"accumulate": 3}, "_half": {"check_finite": False}}
    return {build.__name__: _compare(build, **options[build.__name__]) for build in builds}


def _check(found: dict[str, Any], updates: int) -> None:
    assert found["weights"] < ROUNDING, found
    assert found["losses"] < ROUNDING * 10, found
    assert found["metric"] == 0, found
    assert found["updates"] == (updates, updates, updates), found


def test_three_workers_and_two_servers(on_hosts: OnHosts) -> None:
    found = on_hosts("3x1+2ps", _on_chief, [_dense, _embedding])[0]
    _check(found["_dense"], 10)
    _check(found["_embedding"], 4)
    assert len(found["_dense"]["servers"]) == 2
    assert all(found["_dense"]["slots"])


def test_two_workers_and_one_server(on_hosts: OnHosts) -> None:
    found = on_hosts("2x1+1ps", _on_chief, [_half, _dense])[0]
    _check(found["_dense"], 10)
    assert found["_half"]["updates"] == (10, 10, 10), found["_half"]
    assert found["_half"]["weights"] < 2e-3, found["_half"]
