"""One pipeline of each kind over the same rows, and what each gives to the replicas of a host. Runs on hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

ROWS, BATCH = 25, 8


def write_files(folder: Path) -> None:
    """The rows as a memory map, as TFRecord in one file and in three, and as files of one row and of many."""
    import tensorflow as tf

    x, y = rows()
    np.save(folder / "x.npy", x)
    for name, numbers in {"one": range(ROWS), "a": range(4), "b": range(4, 4), "c": range(4, ROWS)}.items():
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as writer:
            for number in numbers:
                writer.write(x[number].tobytes() + b"padding" * number + bytes([y[number]]))
    for number in range(ROWS):
        np.savez(folder / f"row{number:02d}.npz", x=x[number], y=y[number])
    for number, start in enumerate(range(0, ROWS, 7)):
        np.savez(folder / f"part{number}.npz", x=x[start : start + 7], y=y[start : start + 7])


def rows() -> tuple[Any, Any]:
    """x[i] is (i, i / 7), y[i] is i."""
    numbers = np.arange(ROWS)
    return np.stack([numbers, numbers / np.float32(7)], axis=1).astype(np.float32), numbers.astype(np.int64)


def pipelines(folder: str) -> dict[str, Any]:
    """Pipelines over the same rows; all shuffle, augment and have x and y in the end."""
    import tensorflow as tf

    from gpudist_core.pipelines import Pipeline

    x, y = rows()
    path = Path(folder)

    def parse(record: Any) -> Any:
        return tf.io.decode_raw(tf.strings.substr(record, 0, 8), tf.float32), tf.cast(
            tf.io.decode_raw(tf.strings.substr(record, -1, 1), tf.uint8)[0], tf.int64
        )

    def load(name: str) -> Any:
        with np.load(name) as found:
            return found["x"], found["y"]

    def generate() -> Any:
        yield from zip(x, y, strict=True)

    def augment(x: Any, y: Any, seed: Any) -> Any:
        tf.debugging.assert_shapes([(x, (2,)), (y, ()), (seed, (2,))])
        return x + tf.random.stateless_uniform([2], seed), y

    same = {"global_batch_size": BATCH, "seed": 3}
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    made = {
        "arrays": Pipeline.from_arrays((x, y), **same).shuffle(),
        "memory map": Pipeline.from_arrays((np.load(path / "x.npy", mmap_mode="r"), y), **same, shuffle=True),
        "in order": Pipeline.from_arrays((x, y), **same),
        "drop": Pipeline.from_arrays((x, y), **same, shuffle=True, remainder="drop"),
        "balanced": Pipeline.from_arrays((x, y), **same).balanced(y // 20, rows=30),
        "one record file": Pipeline.from_tfrecord(str(path / "one.tfrecord"), parse, **same, shuffle=True),
        "three record files": Pipeline.from_tfrecord([path / f"{n}.tfrecord" for n in "abc"], parse, **same, shuffle=True),
        "a file a row": Pipeline.from_files(sorted(path.glob("row*")), load, **same, row_per_file=True, shuffle=True),
        "files": Pipeline.from_files(sorted(map(str, path.glob("part*"))), load, **same, shuffle=6),
        "generator": Pipeline.from_generator(generate, **same, rows=ROWS, shuffle=10),
        "generator in order": Pipeline.from_generator(generate, **same),
        "dataset": Pipeline.from_dataset(dataset, **same).shuffle(10),
        "batched dataset": Pipeline.from_dataset(dataset.batch(7), batched=True, **same, shuffle=10),
    }
    mapped = {name: pipeline.map(augment, random=True) for name, pipeline in made.items()}
    weighted = Pipeline.from_arrays((x, y % 3), **same, shuffle=True).weights("balanced")
    return mapped | {
        "without a map": made["arrays"],
        "eagerly": made["arrays"].prefetch(0),
        "cached": made["arrays"].map(lambda x, y: (x * 2, y)).cache().map(augment, random=True),
        "cached files": made["files"].map(lambda x, y: (x * 2, y)).cache().map(augment, random=True),
        "cached stream": made["generator"].map(lambda x, y: (x * 2, y)).cache(),
        "weights": weighted,
        "weighted stream": Pipeline.from_generator(lambda: zip(x, y % 2, strict=True), **same).weights({0: 0.5, 1: 2}),
        "a dict": Pipeline.from_arrays({"x": x, "name": y.astype(str)}, **same).map(lambda row: row | {"twice": row["x"] * 2}),
    }


def strategy_here() -> Any:
    """The strategy of this topology."""
    import tensorflow as tf

    several = "TF_CONFIG" in os.environ
    return tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.MirroredStrategy()


def on_replicas(folder: str, names: Any = None) -> Any:
    """For some pipelines, two epochs, each batch and replica of this host: the rows, checked to be on the replica's device."""
    strategy = strategy_here()
    made = {
        name: pipeline.distribute(strategy) for name, pipeline in pipelines(folder).items() if names is None or name in names
    }
    return {name: [epoch_of(distributed) for _ in range(2)] for name, distributed in made.items()}


def epoch_of(distributed: Any, limit: int | None = None) -> Any:
    """For each batch of an epoch (at most so many) and replica: its rows as arrays."""
    found = []
    for batch in distributed if limit != 0 else ():
        found.append(local(distributed.strategy, batch))
        if len(found) == limit:
            break
    return found


def local(strategy: Any, batch: Any) -> Any:
    """The values of each replica of this host, as arrays, with a check of where they are."""
    import tensorflow as tf

    from gpudist_core.replicas import replicas_of

    flat = [strategy.experimental_local_results(part) for part in tf.nest.flatten(batch)]
    for part in flat:
        for value, device in zip(part, replicas_of(strategy).devices, strict=True):
            assert value.device == device or value.dtype == tf.string, (value.device, device)
    return [[part[replica].numpy() for part in flat] for replica in range(len(flat[0]))]
