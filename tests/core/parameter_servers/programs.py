"""What the tests of parameter servers run on a chief."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Tasks:
    """The tasks of this cluster; made on each of them, it notes the process of each.

    Args:
        directory: Where.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        (directory / f"{task['type']}-{task['index']}.pid").write_text(str(os.getpid()))

    def kill(self, role: str, index: int) -> None:
        os.kill(int((self._directory / f"{role}-{index}.pid").read_text()), signal.SIGKILL)


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def linear(columns: int = 4) -> Any:
    """A model whose gradient does not depend on its weights: after N rows of x the weight is the negative of their sum."""
    import keras

    return keras.Sequential([keras.Input((columns,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])


def data(rows: int = 37, columns: int = 6) -> tuple[Any, Any]:
    """Inputs and classes; 37 rows are not divided by any number of workers."""
    import numpy as np

    random = np.random.default_rng(0)
    return random.normal(size=(rows, columns)).astype("float32"), random.integers(0, 3, rows).astype("int32")


def furthest(ours: Any, theirs: Any) -> float:
    """The largest difference between the weights of two models, in the order of `weights`."""
    import numpy as np

    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
