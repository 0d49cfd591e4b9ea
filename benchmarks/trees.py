"""Compare the speed of gpudist_core in two trees: `python -m benchmarks.trees BEFORE [AFTER]`, with AFTER this tree by default.

Each tree has a process of its own. They measure in turn, so that a machine that slows down slows down both. A ratio above 1
means that AFTER is slower. It counts as slower if the ratio is above 1.03 and above 1 plus twice the spread.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 16
_SERVE = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name='serve')"


def main(before: str, after: str = str(Path(__file__).resolve().parents[1])) -> int:
    """Print the ratio of each measure. Exit code 1 if AFTER is slower."""
    sides = [_Side(before), _Side(after)]
    rounds: list[list[dict[str, float]]] = []
    for number in range(ROUNDS):
        order = sides if number % 2 else sides[::-1]
        measured = {id(side): side.measure() for side in order}
        rounds.append([measured[id(side)] for side in sides])
    slower = False
    for name in rounds[0][0]:
        ratios = [new[name] / old[name] for old, new in rounds[1:]]  # the first one warms up
        ratio, (low, _, high) = statistics.median(ratios), statistics.quantiles(ratios, n=4)
        spread = (high - low) / 2
        is_slower = ratio > max(1.03, 1 + 2 * spread)
        slower |= is_slower
        times = [1000 * statistics.median(pair[side][name] for pair in rounds[1:]) for side in (0, 1)]
        verdict = "  SLOWER" if is_slower else ""
        print(f"{name:6} {times[0]:8.3f} ms {times[1]:8.3f} ms  ratio {ratio:.3f}  spread {spread:.3f}{verdict}")
    return int(slower)


class _Side:
    """One tree, in a process that measures when it is asked."""

    def __init__(self, tree: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve()), "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        seconds: dict[str, float] = json.loads(self._process.stdout.readline())
        return seconds


def _serve() -> None:
    """Measure for each line of the standard input, until it ends."""
    measures = _measures()
    for _ in sys.stdin:
        print(json.dumps({name: measure() for name, measure in measures.items()}), flush=True)


def _measures() -> dict[str, Callable[[], float]]:
    """Seconds of a step of `fit`, of a step of a `TrainStep` loop, and of tracing a `TrainStep`, on two logical CPUs."""
    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    random = np.random.default_rng(1)
    x, y = random.random((64 * 40, 64), "float32"), random.integers(0, 10, 64 * 40)
    data = gd.Pipeline.from_arrays((x, y), global_batch_size=64)

    def model() -> Any:
        hidden = keras.layers.Dense(128, activation="relu")
        return keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, activation="softmax")])

    def step() -> Any:
        with strategy.scope():
            return gd.TrainStep(model(), keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy())

    with strategy.scope():
        fitted = gd.distributed(model())
        fitted.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    batches = list(data.distribute(strategy))
    trained = step()

    def seconds(action: Callable[[], Any], steps: int) -> float:
        started = time.perf_counter()
        action()
        return (time.perf_counter() - started) / steps

    return {
        "fit": lambda: seconds(lambda: fitted.fit(data, epochs=3, verbose=0), 3 * len(batches)),
        "step": lambda: seconds(lambda: [float(trained(batch)) for _ in range(5) for batch in batches], 5 * len(batches)),
        "trace": lambda: seconds(lambda: step()(batches[0]), 1),
    }


if __name__ == "serve":
    _serve()
elif __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
