"""A worker may die at any moment; a server may not, and that is said."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.core.parameter_servers.conftest import OnChief
from tests.core.parameter_servers.programs import Tasks, linear


def _whole_numbers(seed: int) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(-8, 8, (240, 4)).astype("float32")


def _slowly(y: Any, y_pred: Any) -> Any:
    """The output as the loss, after some milliseconds, so that a worker is killed while it works."""
    import tensorflow as tf

    busy = tf.while_loop(lambda i, _: i < 30, lambda i, m: (i + 1, m @ m), (0, tf.zeros((200, 200))))[1]
    return y_pred[:, 0] + tf.stop_gradient(busy[0, 0]) + tf.cast(y, tf.float32)


@contextlib.contextmanager
def _lost_work() -> Iterator[list[str]]:
    """What TensorFlow says of work that must be done again."""
    import logging

    lost: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lost.append(record.getMessage()) if "failed with" in record.getMessage() else None  # type: ignore[method-assign]
    logging.getLogger("tensorflow").addHandler(handler)
    yield lost
    logging.getLogger("tensorflow").removeHandler(handler)


def _training(strategy: Any, schedule: str, **options: Any) -> Any:
    import keras

    from gpudist_core.parameter_servers import CoordinatedTraining

    with strategy.scope():
        model, optimizer = linear(), keras.optimizers.SGD(1.0)
    return CoordinatedTraining(model, optimizer, _slowly, schedule=schedule, **options)


def _batches(x: Any, at: int = -1, act: Any = None) -> Any:
    import numpy as np

    for i in range(len(x) // 2):
        if i == at:
            act()
        yield x[2 * i : 2 * i + 2], np.full(2, i)


def _survive_and_end(tasks: Tasks) -> dict[str, Any]:
    import numpy as np

    import gpudist_core as gd

    strategy, x, found = gd.make_strategy(), _whole_numbers(0), {}
    for worker, schedule in enumerate(("asynchronous", "lock-step")):
        training = _training(strategy, schedule)
        # In the middle of the work of the batches that follow.
        soon = threading.Timer(0.02, tasks.kill, ("worker", worker))
        with _lost_work() as lost:
            losses = training.train(_batches(x, 40, soon.start))
        found[schedule] = {
            "counts": [len(losses), training.num_updates, int(training.optimizer.iterations)],
            "missed": np.abs(training.model.get_weights()[0][:, 0] + x.sum(0) / 2).max(),
            "losses": losses,
            "lost": lost,
        }
    try:
        _training(strategy, "asynchronous").train(_batches(x, 40, lambda: tasks.kill("ps", 1)))
    except Exception as error:
        found["server"] = f"{type(error).__name__}: {error}"
    return found


def test_a_lost_workers_work_is_done_again_once_and_a_lost_server_is_an_error(on_chief: OnChief) -> None:
    import numpy as np

    found = on_chief("3x1+2ps", _survive_and_end)
    for schedule in ("asynchronous", "lock-step"):
        assert found[schedule]["counts"] == [120, 120, 120]
        assert len(found[schedule]["lost"]) == 1, found[schedule]["lost"]
        assert found[schedule]["missed"] == 0  # whole numbers: every row once, or it shows
    x = _whole_numbers(0).reshape(120, 2, 4)
    before = np.concatenate([np.zeros((1, 4)), -np.cumsum(x.sum(1) / 2, 0)[:-1]])
    one_device = (x.sum(1) / 2 * before).sum(1) + np.arange(120)
    assert found["lock-step"]["losses"].tolist() == one_device.tolist()
    assert found["server"] == (
        "Unavailable: A parameter server must stay up: the variables that it held are lost. Received: "
        "error=UnavailableError, servers=['/job:ps/replica:0/task:1']. Restart all tasks and continue from the last checkpoint."
    )


def _alone(tasks: Tasks) -> str:
    import gpudist_core as gd

    training = _training(gd.make_strategy(), "asynchronous", timeout_seconds=3.0)
    training.train(_batches(_whole_numbers(0)[:4]))
    tasks.kill("worker", 0)
    try:
        training.train(_batches(_whole_numbers(1)))
    except gd.Unavailable as error:
        return str(error)
    return "nothing"


def test_without_any_worker_it_says_so_in_time(on_chief: OnChief) -> None:
    assert on_chief("1x1+1ps", _alone) == (
        "A worker must finish its work in time. Received: timeout_seconds=3.0, workers=1, under_way=2. "
        "Restart the workers, or give them more time."
    )
