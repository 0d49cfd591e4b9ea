"""Both sides of each figure about training, as they run in one host of a cluster; seconds of ours, seconds of theirs."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.digits_cnn import BATCH, cnn, digits


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], times: int, warm_up: int) -> tuple[float, float]:
    """Medians of two actions taken in turn, so that a machine that slows down slows down both."""
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(warm_up + times)][warm_up:]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _strategy() -> Any:
    import gpudist_core as gd

    return gd.make_strategy()


def own_step() -> tuple[float, float]:
    """Seconds of a step of a digits CNN at batch 256: `TrainStep`, and a loop by hand, on the same batch."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    strategy = _strategy()
    images, labels = digits((8, 8, 1))
    data = gd.Pipeline.from_arrays((images[:BATCH], labels[:BATCH]), global_batch_size=BATCH)
    batch = next(iter(data.distribute(strategy)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    with strategy.scope():
        models = [cnn(), cnn()]
        optimizers = [keras.optimizers.Adam(), keras.optimizers.Adam()]
        optimizers[1].build(models[1].trainable_variables)

    def by_hand(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            mean = tf.reduce_sum(loss(y, models[1](x, training=True))) / BATCH
        variables = models[1].trainable_variables
        optimizers[1].apply_gradients(zip(tape.gradient(mean, variables), variables, strict=True))
        return mean

    @tf.function
    def train(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(by_hand, args=(x, y)), axis=None)

    step = gd.TrainStep(models[0], optimizers[0], loss)
    return in_turn(lambda: float(step(batch)), lambda: float(train(*batch)), times=150, warm_up=20)


def fit() -> tuple[float, float]:
    """Seconds of a step of `fit`, an MLP of 64-128-10 at batch 64: with gpudist_core, and plain."""
    import keras

    import gpudist_core as gd

    strategy = _strategy()
    images, labels = digits((64,))
    rows = len(labels) // 64 * 64  # the plain one is wrong on the rest
    images, labels = images[:rows], labels[:rows]

    def model() -> Any:
        hidden = keras.layers.Dense(128, activation="relu")
        return keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, activation="softmax")])

    with strategy.scope():
        plain, ours = model(), gd.distributed(model())
        for one in (plain, ours):
            one.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    data = gd.Pipeline.from_arrays((images, labels), global_batch_size=64, shuffle=True, seed=1)
    epochs = 3
    steps = epochs * rows // 64
    mine, theirs = in_turn(
        lambda: ours.fit(data, epochs=epochs, verbose=0),
        lambda: plain.fit(images, labels, batch_size=64, epochs=epochs, verbose=0),
        times=5,
        warm_up=1,
    )
    return mine / steps, theirs / steps


def replicated() -> tuple[float, float]:
    """Seconds of a step that reads a table of 64 MB: `replicate`, and a mirrored variable."""
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    strategy = _strategy()
    rows = np.zeros((1 << 18, 64), "float32")
    table = gd.replicate(rows, strategy)
    with strategy.scope():
        mirrored = tf.Variable(rows, trainable=False)
    ids = tf.constant([5, 7])
    ours = tf.function(lambda: strategy.run(lambda: tf.reduce_sum(tf.gather(table.value, ids))), autograph=False)
    theirs = tf.function(lambda: strategy.run(lambda: tf.reduce_sum(tf.gather(mirrored, ids))), autograph=False)
    return in_turn(ours, theirs, times=1000, warm_up=100)


def pipeline() -> tuple[float, float]:
    """Seconds of a row, epochs of 20,000 rows with a shuffle, a map and batches of 256, start of the epoch included."""
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    strategy = _strategy()
    number = 20_000
    x, y = np.random.default_rng(1).random((number, 64), "float32"), np.arange(number)

    def augment(x: Any, y: Any) -> Any:
        return (x - 0.5) * 2.0, y

    ours = gd.Pipeline.from_arrays((x, y), global_batch_size=BATCH, shuffle=True, seed=1).map(augment).distribute(strategy)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(number, seed=1)
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    theirs = strategy.experimental_distribute_dataset(dataset)

    def epoch(data: Any) -> None:
        for _ in data:
            pass

    mine, by_hand = in_turn(lambda: epoch(ours), lambda: epoch(theirs), times=5, warm_up=1)
    return mine / number, by_hand / number


def sharded() -> tuple[float, float, float, float]:
    """Peak bytes of this process with a table of 1 GB in slices, after lookups and updates; before; its own; of the table.

    Its own are those that no other process shares and the system cannot drop: all but the pages of libraries and files.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    own = _OwnMemory()
    strategy = _strategy()
    before = _peak()
    rows, dim = 3_906_250, 64  # 1.0 GB of float32
    with strategy.scope():
        layers = [keras.Input((4,), dtype="int64"), gd.ShardedEmbedding(rows, dim, strategy), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
    step = gd.TrainStep(model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.random.default_rng(1).integers(0, rows, (512, 4))
    data = gd.Pipeline.from_arrays((ids, np.arange(512) % 2), global_batch_size=64)
    for batch in data.distribute(strategy):
        tf.debugging.assert_all_finite(step(batch), "loss")
    return _peak(), before, own.peak(), float(rows * dim * 4)


def resident_array() -> float:
    """Peak bytes of this process with an array of NumPy of 1 GB beside TensorFlow, Keras and a strategy that hold nothing."""
    import keras
    import numpy as np

    strategy = _strategy()
    with strategy.scope():
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    rows = np.ones((3_906_250, 64), "float32")
    assert rows.nbytes == 1_000_000_000
    return _peak()


class _OwnMemory(threading.Thread):
    """Looks at the process's anonymous memory every millisecond: the system keeps a peak of the whole alone."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._highest = 0.0
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(1e-3):
            self._highest = max(self._highest, self._now())

    def peak(self) -> float:
        """Bytes at most, until now."""
        self._ended.set()
        self.join()
        return max(self._highest, self._now())

    @staticmethod
    def _now() -> float:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        (kibibytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
        return float(kibibytes) * 1024


def _peak() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
