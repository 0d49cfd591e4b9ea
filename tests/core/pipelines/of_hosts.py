"""Pipelines of hosts that were given the same data, or each a part of them or other ones. Runs on hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.core.pipelines.every_source import strategy_here

BATCH = 4


def refused(folder: str) -> dict[str, str]:
    """What each host is told when it is given a part of the data, or other data."""
    strategy = strategy_here()
    host = _host(strategy)
    return {name: _told(make, strategy) for name, make in _unlike(Path(folder), host).items()}


def _host(strategy: Any) -> int:
    from gpudist_core.replicas import replicas_of

    return replicas_of(strategy).host


def _told(make: Callable[[], Any], strategy: Any) -> str:
    from gpudist_core.errors import UsageError

    try:
        return f"went on: {sum(1 for _ in make().distribute(strategy))}"
    except UsageError as error:
        return str(error)


def _files(folder: Path, host: int) -> list[str]:
    """Four files of this host, of the same names and sizes on each; those in `all` are the same."""
    import tensorflow as tf

    for name, number in {f"{host}": host, f"all{host}": 0}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part in range(4):
            np.save(folder / name / f"{part}.npy", np.arange(6.0) + 6 * part + 100 * number)
            with tf.io.TFRecordWriter(str(folder / name / f"{part}.tfrecord")) as writer:
                writer.write(np.float32([part, number]).tobytes())
    return [str(folder / f"{host}" / f"{part}") for part in range(4)]


def _unlike(folder: Path, host: int) -> dict[str, Callable[[], Any]]:
    from gpudist_core.pipelines import Pipeline

    own = _files(folder, host)
    same = [path.replace(f"{folder}/{host}", f"{folder}/all{host}") for path in own]
    npy, records = [f"{path}.npy" for path in own], [f"{path}.tfrecord" for path in own]
    x = np.arange(24.0)

    def arrays(*given: Any, **options: Any) -> Any:
        return Pipeline.from_arrays(given, global_batch_size=BATCH, **options)

    def files(paths: list[str], **options: Any) -> Any:
        return Pipeline.from_files(paths, np.load, global_batch_size=BATCH, **options)

    return {
        "a part of arrays": lambda: arrays(x[host::2]),
        "fewer rows": lambda: arrays(x[: 24 - host]),
        "other labels": lambda: arrays(x, np.arange(24) % (2 + host)),
        "other strings": lambda: arrays(np.array(["a", "b" * (1 + host)])),
        "an unseeded order": lambda: arrays(np.random.default_rng().permutation(x)),
        "another seed": lambda: arrays(x, shuffle=True, seed=host),
        "a part of the records": lambda: Pipeline.from_tfrecord(records[host::2], global_batch_size=BATCH),
        "records of the same names": lambda: Pipeline.from_tfrecord(records, global_batch_size=BATCH),
        "a part of the files": lambda: files(npy[host::2]),
        "files of the same names": lambda: files(npy),
        "a part of the files of a row": lambda: files(npy[host::2], row_per_file=True),
        "files of a row of the same names": lambda: files(npy, row_per_file=True),
        "the same": lambda: arrays(x, np.arange(24), np.array(["a"] * 24), shuffle=True),
        "the same, up to rounding": lambda: arrays(x / 7 * (1 + 1e-6 * host)),
        "the same records elsewhere": lambda: Pipeline.from_tfrecord(
            [f"{path}.tfrecord" for path in same], global_batch_size=BATCH
        ),
        "the same files elsewhere": lambda: files([f"{path}.npy" for path in same]),
        "folders": lambda: Pipeline.from_files(
            [str(folder)] * 4, lambda path: np.float32(1), global_batch_size=BATCH, row_per_file=True
        ),
    }


def asks_once() -> list[int]:
    """How often hosts tell each other of their data in two epochs, an evaluation and a restore; and of a second pipeline."""
    from gpudist_core.pipelines import Pipeline, distributed

    strategy, asked = strategy_here(), []
    original = distributed.told_by_all

    def told(*args: Any) -> Any:
        asked.append(args)
        return original(*args)

    distributed.told_by_all = told
    try:
        found = []
        for _ in range(2):
            data = Pipeline.from_arrays(np.arange(24.0), global_batch_size=BATCH, shuffle=True)
            batches = data.distribute(strategy)
            begin = data.state()
            rows = [sum(1 for _ in each) for each in (batches, batches, batches.epoch_batches())]
            data.restore(begin)
            found += [*rows, sum(1 for _ in batches), len(asked)]
        return found
    finally:
        distributed.told_by_all = original


def goes_on_in_fit() -> list[Any]:
    """Fit, evaluate and predict on arrays and a pipeline; and a fit on a part of the arrays."""
    import keras

    import gpudist_core as gd

    strategy = strategy_here()
    x = np.arange(24.0, dtype="float32")[:, None] / 24
    with strategy.scope():
        model = gd.distributed(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    model.fit(x, x, batch_size=8, epochs=2, validation_data=(x, x), verbose=0)
    model.fit(gd.Pipeline.from_arrays((x, x), global_batch_size=8), epochs=2, verbose=0)
    model.evaluate(x, x, verbose=0)
    rows = len(model.predict(x, verbose=0))
    try:
        model.fit(x[_host(strategy) :: 2], x[_host(strategy) :: 2], batch_size=8, verbose=0)
    except gd.errors.UsageError as error:
        return [rows, str(error)]
    return [rows, "trained"]
