"""Asynchronously every batch is applied once; a partitioned variable is trained whole; what cannot be meant is said."""

from __future__ import annotations

from typing import Any

from tests.core.conftest import OnHosts
from tests.core.parameter_servers.programs import data, linear


def _counted(strategy: Any) -> dict[str, Any]:
    """A gradient that does not depend on the weights, so that none lost and none twice shows in them."""
    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    x = np.random.default_rng(0).integers(-8, 8, (300, 4)).astype("float32")
    rows = gd.Pipeline.from_arrays((x, np.zeros(300, "float32")), global_batch_size=4, shuffle=True, seed=1)
    with strategy.scope():
        model, optimizer = linear(), keras.optimizers.SGD(1.0)
    training = gd.CoordinatedTraining(model, optimizer, lambda y, y_pred: y_pred[:, 0])
    counts = [len(training.train(rows, 50)), len(training.train(rows)), len(training.train(rows, 100)), rows.epoch]
    seen = gd.Pipeline.from_arrays((x, np.zeros(300, "float32")), global_batch_size=4, shuffle=True, seed=1)
    here = seen.distribute(tf.distribute.OneDeviceStrategy("/job:chief/task:0/device:CPU:0"))
    # 50 and 25 of the first epoch, 75 of the second, 25 of the third.
    applied = [
        batch[0].numpy() for epoch, count in ((0, 75), (1, 75), (2, 25)) for batch in list(here.epoch_batches(epoch))[:count]
    ]
    expected = -sum(rows.sum(0) / 4 for rows in applied)
    missed = np.abs(model.get_weights()[0][:, 0] - expected).max()
    return {"counts": counts, "updates": [training.num_updates, int(optimizer.iterations)], "missed": float(missed)}


def _partitioned(strategy: Any) -> dict[str, Any]:
    """Plain variables in parts: by `partition`, and by the strategy's own partitioner for a Keras layer."""
    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core.parameter_servers import partition

    values = np.arange(14, dtype="float32").reshape(7, 2)

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = partition(values, strategy)

        def __call__(self, ids: Any) -> Any:
            return self.table.lookup(ids)

    with strategy.scope():
        model, optimizer = Model(), keras.optimizers.SGD(1.0)
    training = gd.CoordinatedTraining(
        model, optimizer, lambda y, rows: tf.reduce_sum(rows, -1), schedule="lock-step", strategy=strategy
    )
    training.train([(np.array([6, 0, 6, 3]), np.zeros(4))])
    expected = values.copy()
    expected[[0, 3]] -= 0.25
    expected[6] -= 0.5
    servers = [part.device for part in model.table.parts]
    return {"equal": bool((model.table.as_numpy() == expected).all()), "servers": len(set(servers)), "parts": len(servers)}


def _message(action: Any) -> str:
    import tensorflow as tf

    import gpudist_core as gd

    try:
        action()
    except (gd.UsageError, gd.Unavailable, tf.errors.InvalidArgumentError) as error:
        return str(error)
    return "nothing"


def _wrong(strategy: Any) -> dict[str, str]:
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    x, y = data(8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(3)]
        model, optimizer = keras.Sequential(layers), keras.optimizers.SGD()
    outside = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="outer")])
    lock_step = gd.CoordinatedTraining(model, optimizer, loss, schedule="lock-step")
    twice = gd.CoordinatedTraining(model, optimizer, loss, accumulate=2)
    return {
        "writes": _message(lambda: lock_step.train([(x, y)])),
        "outside": _message(lambda: gd.CoordinatedTraining(outside, optimizer, loss, strategy=strategy)),
        "batch": _message(lambda: lock_step.train([x])),
        "rows": _message(lambda: lock_step.train([(x, y[:7])])),
        "steps": _message(lambda: lock_step.train([], -1)),
        "part of a step": _message(lambda: lock_step.train([], 1.5)),
        "empty": _message(lambda: lock_step.train([(x[:0], y[:0])])),
        "timeout": _message(lambda: gd.CoordinatedTraining(model, optimizer, loss, timeout_seconds=-1)),
        "short": _message(lambda: lock_step.train([], 2)),
        "schedule": _message(lambda: gd.CoordinatedTraining(model, optimizer, loss, schedule="bulk")),
        "a sum": _message(lambda: gd.CoordinatedTraining(model, optimizer, keras.losses.MeanSquaredError("sum"))),
        "circle": _message(lambda: gd.CoordinatedTraining(model, optimizer, "circle", schedule="lock-step")),
        "accumulate": _message(lambda: gd.CoordinatedTraining(model, optimizer, loss, accumulate=0)),
        "accumulate twice": _message(
            lambda: gd.CoordinatedTraining(model, keras.optimizers.SGD(gradient_accumulation_steps=2), loss)
        ),
        "state": _message(lambda: lock_step.restore({"pending": 3, "sums": {}})),
        "state of a step": _message(lambda: twice.restore({"pending": 1, "accumulators": {}, "accumulate": 2})),
        "state of another": _message(lambda: twice.restore({"pending": 1, "sums": {}, "accumulate": 3})),
        "no state": _message(lambda: twice.restore({})),
        "id": _message(lambda: gd.partition(x, strategy).lookup([1, 8])),
        "ids in rows": _message(lambda: gd.partition(x, strategy).lookup(tf.ragged.constant([[1], [2, 3]]))),
        "a number": _message(lambda: gd.partition(3.0, strategy)),
        "parts": _message(lambda: gd.PartitionedEmbedding(3, 2, parts=4)),
    }


def _refused(strategy: Any) -> list[Any]:
    """What is pending after a batch that is not finite, in training that goes on."""
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    with strategy.scope():
        model, optimizer = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), keras.optimizers.SGD()
    training = gd.CoordinatedTraining(model, optimizer, "mse", check_finite=True)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    training([x, y])
    with contextlib.suppress(tf.errors.InvalidArgumentError):
        training([x * np.nan, y])
    pending, updates = training.pending, int(optimizer.iterations.numpy())
    return [pending, bool(np.isfinite(training([x, y]))), training.num_updates, updates]


def _on_chief() -> dict[str, Any]:
    import gpudist_core as gd

    strategy = gd.make_strategy()
    found = {"counted": _counted(strategy), "partitioned": _partitioned(strategy), "wrong": _wrong(strategy)}
    return found | {"refused": _refused(strategy)}


def test_counts_parts_and_wrong_use(on_hosts: OnHosts) -> None:
    found = on_hosts("2x1+2ps", _on_chief)[0]
    assert found["counted"] == {"counts": [50, 25, 100, 2], "updates": [175, 175], "missed": 0.0}
    assert found["partitioned"] == {"equal": True, "servers": 2, "parts": 2}
    assert found["refused"] == [0, True, 2, 1]
    wrong = found["wrong"]
    assert wrong["writes"].startswith("A lock-step model must not change variables in its forward pass. Received: variables=[")
    assert "moving_mean" in wrong["writes"]
    assert wrong["writes"].endswith(
        '(BatchNormalization by LayerNormalization, for example), or use CoordinatedTraining(schedule="asynchronous").'
    )
    assert wrong["outside"].startswith("model must be made in the scope of the ParameterServerStrategy. Received: variable=")
    assert wrong["batch"] == (
        "A batch must be (x, y) or (x, y, weight). Received: batch='ndarray'. Put several inputs into one nested x."
    )
    assert wrong["rows"] == "All parts of a batch must have the same number of examples. Received: rows=[7, 8]. Fix the data."
    assert wrong["circle"].startswith(
        "An example's loss must not depend on the other examples of its replica. Received: loss='circle'."
    )
    assert wrong["steps"] == "steps must be an integer >= 0 or None. Received: steps=-1. None means the rest of the epoch."
    assert wrong["part of a step"].startswith("steps must be an integer >= 0 or None. Received: steps=1.5.")
    assert wrong["empty"] == "A batch must have at least one example. Received: rows=0. Leave empty batches out."
    assert wrong["timeout"].startswith("timeout_seconds must be a positive number or None. Received: timeout_seconds=-1.")
    assert wrong["short"].startswith("The data must last for all steps. Received: steps=2, batches=0.")
    assert wrong["schedule"] == "schedule must be 'asynchronous' or 'lock-step'. Received: schedule='bulk'."
    assert wrong["a sum"].startswith(
        "A loss must not use reduction='sum': a step computes the mean over the examples of all replicas."
    )
    assert wrong["accumulate"].startswith("accumulate must be a positive integer. Received: accumulate=0.")
    assert wrong["accumulate twice"].startswith(
        "An optimizer for a TrainStep must not have gradient_accumulation_steps. Received: gradient_accumulation_steps=2. Leave"
    )
    assert wrong["state"].startswith("The state must come from a CoordinatedTraining with the same accumulate. ")
    assert wrong["state of a step"] == (
        "Pending batches must be restored by what accumulated them: a CoordinatedTraining by a "
        "CoordinatedTraining. Received: pending=1, "
        "state=['accumulate', 'accumulators', 'pending']. Save after flush(), or restore it there."
    )
    assert "pending=1, accumulate=2, accumulated_by=3" in wrong["state of another"]
    assert wrong["no state"] == "state must be a result of CoordinatedTraining.state(). Received: state={}."
    assert "An id must be a row of the table: 0 <= id < 8." in wrong["id"]
    assert wrong["ids in rows"].startswith("Ids must be a dense tensor. Received: ids='RaggedTensor'.")
    assert (
        wrong["a number"]
        == "A table must have its rows along its first axis. Received: shape=(). Pass an array of shape (rows, ...)."
    )
    assert wrong["parts"].startswith("A table must have at least one row in each part. Received: rows=3, parts=4.")


def _without_servers() -> list[str]:
    import keras

    import gpudist_core as gd

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    return [
        _message(lambda: gd.CoordinatedTraining(model, keras.optimizers.SGD(), "mse")),
        _message(lambda: gd.PartitionedEmbedding(5, 2)),
    ]


def test_without_servers_it_says_what_else_there_is(on_hosts: OnHosts) -> None:
    training, table = on_hosts("1x1", _without_servers)[0]
    assert training.startswith(
        "CoordinatedTraining needs a model made in the scope of a ParameterServerStrategy. Received: strategy="
    )
    assert training.endswith("Use TrainStep with other strategies.")
    assert table.startswith("A table needs the servers of a ParameterServerStrategy. Received: strategy=")
