"""What `gpudist_core.check` adds to a step of 200 ms or more: in the certified steps, and after them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.figure import Figure

PAIRS = 24
WARM_UP = 3
BATCH = 128
REPLICAS = 2


def figures() -> Iterator[Figure]:
    """Both figures."""
    from emulate.cluster import Cluster

    with Cluster(f"1x{REPLICAS}", timeout=500) as cluster:
        (found,) = cluster.run(compare)
    for name, (ratio, ours, theirs) in found.items():
        yield Figure(name, ratio, 1.01, False, ours, theirs, "the same step unchecked, CNN, batch 128")


def compare() -> dict[str, tuple[float, float, float]]:
    """By figure the median ratio of pairs of steps in processor time, and both medians."""
    plain, found = _make_step(None), {}
    for name, steps in (("certified_step_1x2", 2 * (WARM_UP + PAIRS)), ("step_after_certificate_1x2", 1)):
        checked = _make_step(steps)
        pairs = []
        for number in range(WARM_UP + PAIRS):
            sides = (checked, plain) if number % 2 else (plain, checked)
            times = {side: _seconds(side) for side in sides}
            pairs.append((times[checked], times[plain]))
        kept = pairs[WARM_UP:]
        ours, theirs = (statistics.median(side) for side in zip(*kept, strict=True))
        found[name] = statistics.median(a / b for a, b in kept), ours, theirs
    return found


def _seconds(step: Callable[[], Any]) -> float:
    """The processor time of a step, as other processes on the machine take turns with it."""
    started = time.process_time()
    float(step())
    return time.process_time() - started


def _make_step(certified_steps: int | None) -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    dataset = tf.data.Dataset.from_tensors(_batch()).unbatch().batch(BATCH).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        convolutions = [keras.layers.Conv2D(n, 3, strides=2 if n > 128 else 1, activation="relu") for n in (64, 128, 256)]
        pooled = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((32, 32, 3)), *convolutions, *pooled])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    if certified_steps is not None:
        _checked(optimizer, model, certified_steps)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    return lambda: distributed(*next(batches))


def _checked(optimizer: Any, model: Any, steps: int) -> None:
    """Check against a certificate in which the batch alone is known: all is computed and compared, and nothing leaves it."""
    import numpy as np

    from gpudist_core.certificates import NUM, Certificate, Input, Tensor, examples_of
    from gpudist_core.certificates.checks import Check, Watch

    tensors = tuple(Tensor(v.path, tuple(v.shape), v.dtype) for v in model.trainable_variables)
    unknown = {name: np.full((steps, len(tensors)), np.nan) for name in ("norms", "noise")}
    certificate = Certificate(
        program="",
        topology="1x2",
        replicas=REPLICAS,
        seed=0,
        versions={},
        optimizer="adam",
        reduced=False,
        tensors=tensors,
        inputs=(Input(0, (32, 32, 3), "float32"), Input(1, (), "int64")),
        left_out=(),
        projections=np.full((steps, len(tensors), NUM), np.nan),
        start=np.full((len(tensors), NUM), np.nan),
        start_norms=np.full(len(tensors), np.nan),
        examples=np.tile(examples_of(_batch()), (steps, 1)),
        losses=np.full((steps, 2), np.nan),
        **unknown,
    )
    Check(Watch(certificate, None)).optimizer(optimizer)


def _batch() -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(1)
    return random.normal(size=(BATCH, 32, 32, 3)).astype("float32"), random.integers(0, 10, BATCH)
