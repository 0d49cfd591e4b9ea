"""Measure `gpudist verify --virtual` on 1x1024: an MLP (64-64-10), a global batch of 4,096 tiled digits, 5 steps."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

DIGITS = Path(__file__).parents[1] / "fixtures" / "data" / "digits.npz"
PROGRAM = f"""
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
BATCH = 4096
data = np.load({str(DIGITS)!r})
images = np.tile(data["images"].reshape(-1, 64).astype("float32") / 16, (12, 1))[: 5 * BATCH]
labels = np.tile(data["labels"].astype("int64"), 12)[: 5 * BATCH]
strategy = tf.distribute.MirroredStrategy()
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, drop_remainder=True)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.1)

def train_step(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.reduce_sum(losses) / BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

@tf.function
def distributed_step(x, y):
    return strategy.reduce("SUM", strategy.run(train_step, args=(x, y)), axis=None)

for x, y in strategy.experimental_distribute_dataset(dataset):
    print(float(distributed_step(x, y)), flush=True)
"""


def main(topology: str = "1x1024") -> None:
    """Verify the program, and print the verdict, the seconds and the largest memory of all processes together."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM)
        started, peak, over = time.monotonic(), Peak(), threading.Event()
        watch = threading.Thread(target=peak.watch, args=[over])
        watch.start()
        command = [sys.executable, "-m", "emulate", "verify", str(program), "--topology", topology, "--virtual", "--steps", "5"]
        code = psutil.Popen(command).wait()
        over.set()
        watch.join()
        print(f"{topology}: exit code {code}, {time.monotonic() - started:.0f} s, at most {peak.bytes / 2**30:.1f} GiB")


class Peak:
    """Measure the memory of this process's descendants: what each has to itself."""

    bytes = 0

    def watch(self, over: threading.Event) -> None:
        """Measure every half a second."""
        while not over.wait(0.5):
            self.bytes = max(self.bytes, sum(map(_own_bytes, psutil.Process().children(recursive=True))))


def _own_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
