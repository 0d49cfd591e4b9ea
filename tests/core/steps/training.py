"""One training by TrainStep on real digits, told by a few settings; it runs on any topology."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[3] / "fixtures" / "data" / "digits.npz"


def strategy() -> Any:
    import tensorflow as tf

    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.OneDeviceStrategy("CPU:0")


def batches(strategy: Any, *arrays: Any, size: int = 48) -> Any:
    """Global batches in order, split into contiguous shares; the last one as it remains."""
    import tensorflow as tf

    from gpudist_core.replicas import per_replica, replicas_of

    replicas = replicas_of(strategy)
    for start in range(0, len(arrays[0]), size):
        number = min(size, len(arrays[0]) - start)
        ends = np.cumsum([number // replicas.total + (i < number % replicas.total) for i in range(replicas.total)])
        firsts = [start, *(start + ends[:-1])]
        parts = [tuple(tf.constant(a[firsts[i] : start + ends[i]]) for a in arrays) for i in replicas.local]
        yield per_replica(strategy, parts)


def digits(rows: int) -> tuple[Any, Any]:
    data = np.load(DATA)
    return data["images"][:rows].reshape(-1, 64).astype("float32") / 16, data["labels"][:rows].astype("int64")


def train(where: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Losses, weights and metrics of a training.

    Args:
        where: The strategy.
        settings: `rows`, `weights`, `layers` (a function of keras.layers), `optimizer` (name, arguments), `step` (arguments),
            `scales` (the loss), `policy`, `several` (batches a call).
    """
    import keras
    import tensorflow as tf

    from gpudist_core.steps import TrainStep

    keras.utils.set_random_seed(3)
    images, labels = digits(settings.get("rows", 193))
    arrays = [images, labels] + ([np.linspace(0.1, 2, len(labels)).astype("float32")] if settings.get("weights") else [])
    name, arguments = settings.get("optimizer", ("SGD", {"learning_rate": 0.1}))
    keras.config.set_dtype_policy(settings.get("policy", "float32"))
    with where.scope():
        hidden = settings.get("layers", lambda layers: [layers.Dense(16, activation="relu")])(keras.layers)
        model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10, dtype="float32")])
        optimizer = getattr(keras.optimizers, name)(**arguments)
        if settings.get("scales"):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0, dynamic_growth_steps=3)
        metrics = [keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()] if settings.get("metrics") else []
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = TrainStep(model, optimizer, loss, metrics=metrics[:1], **settings.get("step", {}))
    losses: list[float] = []
    group: list[Any] = []
    for batch in [b for _ in range(2) for b in batches(where, *arrays)]:
        group.append(batch)
        if len(group) == settings.get("several", 1):
            losses += step.several(group).numpy().tolist()
            group = []
    step.flush()
    local = [tf.nest.map_structure(lambda v: v.numpy(), where.experimental_local_results(v.value)) for v in model.variables]
    return {
        "losses": losses,
        "weights": [copies[0] for copies in local if copies[0].dtype.kind == "f"],
        "copies_agree": all(np.array_equal(copies[0], c) for copies in local for c in copies if copies[0].dtype.kind == "f"),
        "metric": [float(m.result()) for m in metrics[:1]],
        "iterations": int(step.optimizer.iterations.numpy()),
        "scale": float(step.optimizer.dynamic_scale.numpy()) if hasattr(step.optimizer, "dynamic_scale") else None,
    }
