"""A run with what a checkpoint must keep: dropout, Adam with moving averages, BatchNorm, a shuffled pipeline, accumulation."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any


def strategy_here() -> Any:
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()


def values_of(strategy: Any, variables: Any) -> dict[str, Any]:
    return {v.path: strategy.experimental_local_results(v.value)[0].numpy() for v in variables}


def train(folder: str, kill_at: int = 0, steps: int = 17, told: tuple[int, ...] = (), at: int = 0) -> dict[str, Any]:
    """Train to a step; host 0 is killed after one, or some hosts are sent SIGTERM after another."""
    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core.replicas import replicas_of

    warnings.simplefilter("error")
    keras.utils.set_random_seed(5)
    strategy, rng = strategy_here(), np.random.default_rng(0)
    rows, labels = rng.normal(size=(80, 4)).astype("float32"), rng.integers(0, 3, 80)
    data = gd.Pipeline.from_arrays((rows, labels), global_batch_size=10, shuffle=True, seed=2)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.01, use_ema=True)
        seen = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, name="seen"
        )
        generator = tf.random.Generator.from_seed(3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = gd.TrainStep(model, optimizer, loss, accumulate=2, draws="row")
    extra = {"seen": seen, "noise": generator}
    host = replicas_of(strategy).host
    with gd.Checkpoints(folder, keep=2, every=5, step=step, pipeline=data, extra=extra) as checkpoints:
        restored = checkpoints.restore()
        number = started = 0 if restored is None else restored.step
        batches = data.distribute(strategy)
        drawn = 0.0
        while number < steps:
            for batch in batches:
                number += 1
                step(batch)
                strategy.run(lambda: seen.assign_add(1.0))
                drawn = float(strategy.experimental_local_results(strategy.run(lambda: generator.uniform([])))[0])
                if host in told and number == at:
                    os.kill(os.getpid(), signal.SIGTERM)
                try:
                    checkpoints.after_step(number)
                except gd.Preempted as error:
                    return {"step": error.step, "code": error.code, "text": str(error)}
                if number == kill_at and host == 0:
                    checkpoints.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == kill_at:
                    time.sleep(60)
                if number == steps:
                    break
    kept = values_of(strategy, [*model.variables, *step.optimizer.variables])
    names = sorted(os.listdir(folder)) if host == 0 else []
    return {
        "from": started,
        "values": kept,
        "seen": float(seen.numpy()),
        "drawn": drawn,
        "pending": step.pending,
        "names": names,
    }
