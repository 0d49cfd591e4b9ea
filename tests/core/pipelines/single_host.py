# ruff: noqa: E501 (a message is easier to read on one line)
"""What one host does with pipelines, to be looked at by the tests. Runs in a process with two devices."""

from __future__ import annotations

import _thread
import gc
import json
import random
import resource
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpudist_core.errors import UsageError

MESSAGES = {
    "global batch below the replicas": r"A global batch must have at least one example for each replica \(the last batch of an epoch may have fewer\)\. Received: global_batch_size=1, replicas=2\. Use a larger global batch or fewer devices\.",
    "global batch of nothing": r"global_batch_size must be an integer >= 1\. Received: global_batch_size=0\.",
    "a seed of another kind": r"seed must be an integer\. Received: seed=None\. Use one seed, the same on all hosts\.",
    "an iterator for a generator": r"make must be a function that returns a new iterable in each epoch\. Received: make='zip'\. Pass a function: lambda: zip\(x, y\)\.",
    "an iterator that comes again": r"make must return a new iterable at each call\. Received: make=.*, returned='the same zip again'\. Create the iterator inside the function: lambda: zip\(x, y\)\.",
    "an iterator that comes again, with a signature": r"make must return a new iterable at each call\. .*",
    "a pipeline without a strategy": r"A pipeline must be distributed before it is iterated\. Received: pipeline='Pipeline'\. .*",
    "no strategy": r"strategy must be a tf\.distribute\.Strategy\. Received: strategy=None\. .*",
    "objects": r"An array must hold numbers or strings\. Received: first='dict'\. Convert the objects to arrays of numbers\.",
    "no dataset": r"dataset must be a tf\.data\.Dataset\. Received: dataset='list'\. For arrays use from_arrays\.",
    "a map of fewer components": r"A map function must take the components of an example\. Received: functions=.*, row=.*\. Give it one parameter for each\.",
    "arrays of different lengths": r"All arrays must have the same number of examples\. Received: shapes=\[\(5, 2\), \(4,\)\]\. Cut them to the same length\.",
    "no rows": r"The data must have at least one example\. Received: shapes=\[\(0, 2\)\]\. Pass arrays with examples\.",
    "a scalar": r"Each array must have its examples along the first axis\. Received: shapes=\[\(\)\]\. .*",
    "nothing but a dropped remainder": r"An epoch must have at least one global batch\. Received: rows=5, global_batch_size=8, remainder='drop'\. .*",
    "another remainder": 'remainder must be "keep" or "drop"\\. Received: remainder=\\\'pad\\\'\\.',
    "unknown length": r"A length needs a known number of examples\. Received: source='GeneratorStream'\. Pass rows=\.\.\. .*",
    "other rows": r"A state must be restored over the same data in the same order: `data` must be what it was\. Received: data='.*', saved='.*'\. Make the pipeline as it was when the state was saved, or start again without restoring\.",
    "another batch size": r"A state must .*: `global_batch_size` must be what it was\. Received: global_batch_size=4, saved=2\. .*",
    "another seed": r"A state must .*: `seed` must be what it was\. Received: seed=1, saved=0\. .*",
    "another order": r"A state must .*: `order` must be what it was\. Received: order='shuffled', saved='as it stands'\. .*",
    "no state": r"state must be a result of Pipeline\.state\(\)\. Received: state=\{'epoch': 1\}\.",
    "an empty generator": r"A generator must yield at least one example\. .*",
    "an empty stream": r"A stream must yield at least one example, and as many as rows= says\. Received: rows=None, found=0\. .*",
    "another count": r"A stream must yield at least one example, and as many as rows= says\. Received: rows=6, found=5\. .*",
    "a row of another shape": r"All examples must have the same shape before they are batched\. Received: component=0, shapes=\[\(1,\), \(2,\)\], signature=\(1,\)\. Bring them to one shape where they are read\.",
    "rows of another type": r"All examples must fit the dtype of the signature, or of the first example if there is no signature\. Received: component=0, signature='int64', found='float64'\. Pass signature=\.\.\. with a dtype for all values, .*",
    "a value that its type does not hold": r"All examples must fit the dtype of .*signature='int8', found='int64'\. .*",
    "a row of nothing": r"All examples must fit the dtype of .*signature='float64', found='objects'\. .*",
    "a first row of nothing": r"An array must hold numbers or strings\. Received: first='NoneType'\. .*",
    "files of different types": r"All examples must fit the dtype of .*signature='int64', found='float64'\. .*",
    "files of different shapes": r"The examples of all files must have one shape\. Received: file='.*b\.npy', rows=\[\(3,\)\], first_file=\[\(2,\)\]\. Bring them to one shape where they are read\.",
    "times": r"An array must hold numbers or strings\. Received: first='datetime64\[s\]'\. .*",
    "a folder of records": r"A TFRecord file must not be a folder\. Received: folders=\['.*'\]\. .*",
    "batches of a dataset of many shapes": r"The examples of a dataset must have one shape\. Received: shapes=\[\(None,\)\]\. .*",
    "a row of another structure": r"Each example must have the structure of the signature\. .*",
    "no files": r"files must name at least one file\. Received: files=\[\]\. .*",
    "a pattern": r"Each file must exist on every host\. Received: missing=\['.*/\*\.tfrecord'\]\. .* Patterns are not expanded: sorted\(glob\.glob\(\.\.\.\)\)\.",
    "a map that returns nothing": r"A map function must return tensors\. Received: value=None\. Return the components of the example\.",
    "a missing file": r"Each file must exist on every host\. Received: missing=\['.*nothing\.tfrecord'\]\. Use paths that every host can read\.",
    "a record cut off": r"A TFRecord file must contain complete, uncompressed records\. Received: file='.*cut\.tfrecord', offset=40, found='the file ends inside a record'\. .*",
    "a header cut off": r"A TFRecord .* file='.*header\.tfrecord', offset=40, found='the file ends inside a record'\. .*",
    "a damaged length": r"A TFRecord .* file='.*length\.tfrecord', offset=20, found='the length does not match its checksum'\. .*",
    "damaged data": r"A TFRecord .* file='.*data\.tfrecord', offset=20, found='the data does not match its checksum'\. .*",
    "a compressed file": r"A TFRecord .* file='.*zipped\.tfrecord', offset=0, found='it looks compressed'\. .*",
    "files without records": r"The files must hold at least one record\. Received: files=\['.*empty\.tfrecord'\]\. Pass files with records\.",
    "a file of unequal arrays": r"read must return arrays with the same number of examples along their first axes\. Received: file='.*', shapes=\[\(2,\), \(3,\)\]\. .*",
    "a dataset without end": r"A dataset must end\. .* Leave repeat\(\) out: each iteration of a pipeline is one epoch\.",
    "an empty dataset": r"The data must have at least one example\. .*",
    "a dataset that varies": r"A dataset must yield the same examples in the same order each time, on every host\. Received: shuffles=\['unseeded'\]\. .*",
    "ragged rows": r"The components of an example must be dense tensors\. .*",
    "rows of a dataset of many shapes": r"The examples of a dataset must have one shape\. Received: shapes=\[\(None,\)\]\. Pad or crop .*",
    "a batched dataset of scalars": r"An element of a batched dataset must have its examples along the first axes\. .*",
    "a map that is none": r"map needs a function of an example\. Received: function=3\.",
    "a map that draws": r"A map function must depend on the example only, so that it is the same on every topology\. Received: operations=\['RandomUniform'\]\. For a random function use map\(function, random=True\)\. .*",
    "a map that counts": r"A map function must .* Received: operations=\['AssignAddVariableOp'\]\. .*",
    "a map with a large array": r"A map function must not use arrays above 16777216 bytes from outside\. Received: function='use', nbytes=\{'table': 24000000\}\. Convert the array to a tensor once, before the map: tf\.constant\(array\)\.",
    "a map to examples of many shapes": r"A map function must return examples of one shape\. .*",
    "a ragged map": r"A map function must return dense tensors\. .*",
    "a random map before the cache": r"A random map must come after cache\(\), which keeps its input for all epochs\. .* Call cache\(\) before the random map\.",
    "a random map before the cache, said later": r"A random map must come after cache\(\), which keeps its input for all epochs\. .*",
    "a buffer for arrays": r"Examples with random access must be shuffled as a whole\. Received: shuffle=100\. .*",
    "no buffer for a stream": r"A stream needs a shuffle buffer of a fixed size\. Received: shuffle=True\. Pass its number of examples: shuffle=10_000\.",
    "prefetching of less than nothing": r"prefetch needs an integer >= 0\. Received: batches=-1\.",
    "a balanced stream": r"balanced\(\) needs examples with random access\. Received: source='GeneratorStream'\. .*",
    "balanced examples of nothing": r"rows must be an integer >= 1\. Received: rows=0\.",
    "unknown classes": r"The class of each example must be known\. Received: source='RecordSource'\. Pass labels=\.\.\., one for each example\.",
    "no pairs": r"Classes need examples of the form \(x, y\)\. .*",
    "labels that are no classes": r"labels must be integers, one for each example\. Received: shape=\(5, 2\), dtype='float32', rows=5\. .*",
    "a class without a weight": r"Each class must have a weight\. Received: weights=\{0: 1\.0\}, without=\[1\]\. Pass one for each class, or otherwise=\.\.\.",
    "a class of a stream without a weight": r"Each class must have a weight\. Received: weights=\{0: 1\.0\}, without=\[1\]\. .*",
    "too few weights": r"weights must hold one weight for each example\. Received: shape=\(3,\), rows=5\.",
    "weights of another kind": "weights must be numbers or \"balanced\"\\. Received: weights=\\'even\\'\\.",
    "weights below nothing": r"Weights must be finite and >= 0\. Received: weights=\[-2\.0\]\. Use 0 to leave an example out\.",
    "weights without a number": r"Weights must be finite and >= 0\. Received: weights=\[nan\]\. Use 0 to leave an example out\.",
    "weights in letters": r"Weights must be numbers >= 0\. Received: weights=\['half', 1\.0\]\.",
    "classes by name": r"A class must be an integer\. Received: classes=\['cat'\]\. Number the classes, as y does\.",
    "weights twice": r"An example must have one weight only\. Received: weights=array\(.*\)\. Call weights\(\) once, with the product of all weights\.",
    "a map that draws by NumPy": r"A map function must depend on the example only, so that it is the same on every topology\. Received: operations=\['numpy\.random'\]\. .*",
    "a map that draws by a generator": r"A map function must depend on the example only, .* Received: operations=\['generator'\]\. For a random function use map.*",
    "a map that draws in a function of Python": r"A map function must depend on the example only, .* Received: operations=\['PyFunc'\]\. .*",
    "a map that draws by Python": r"A map function must depend on the example only, .* Received: operations=\['random'\]\. For a random function use map.*",
    "an epoch in letters": r"A state must count epochs and batches from 0, with 3 batches in an epoch\. Received: epoch='one', batch=0\. Pass the result of Pipeline\.state\(\)\.",
    "a batch beyond the epoch": r"A state must count epochs and batches from 0, with 3 batches in an epoch\. Received: epoch=0, batch=7\. .*",
    "a seed in letters": r"A state must be restored over the same data .*: `seed` must be what it was\. Received: seed=0, saved='one'\. .*",
    "weights of what is no pair": r"Weights need examples of the form \(x, y\)\. .*",
    "a loop in a tf.function": r"StagingError: .*UsageError: A pipeline must be iterated in Python\. Received: inside='tf\.function'\. .*",
    "an iterator after a new one": r"Only the last iteration of a pipeline can continue, and no iteration can continue after a restore\. Received: iteration=1, last=2\. .*",
    "an iterator after a restore": r"Only the last iteration .*",
}

TRACEBACKS = {
    "map, tracing": ["in broken_while_traced", "KeyError: 'no such key'"],
    "map, running": ["InvalidArgumentError", "the row is bad"],
    "map in Python": ["row 3 is bad", "in broken_python"],
    "generator": ["in broken_rows", "OSError: the disk is gone"],
    "reader": ["in broken_reader", "OSError: no such sector"],
}

X = np.arange(10, dtype=np.float32).reshape(5, 2)
Y = np.array([0, 1, 0, 1, 0])


def everything(folder: Path) -> dict[str, Any]:
    """All that the tests look at."""
    strategy = _strategy()
    return {
        "messages": _messages(folder, strategy),
        "tracebacks": _tracebacks(folder, strategy),
        "threads": _threads(strategy),
        "prefetched": _prefetched(strategy),
        "interrupted": _interrupted(strategy),
        "after a failure": _after_a_failure(strategy),
        "left": _left(),
        "left at the end": _left_at_the_end(),
        "evaluation": _evaluation(),
        "calls": _calls(),
        "bytes of a memory map": _memory_map(folder),
        "lengths": _lengths(),
        "element_spec": _element_spec(),
        "beside a thread that draws": _beside_a_thread_that_draws(),
        "shuffles": _shuffles(),
        "an array used again": _array_used_again(),
    }


def _strategy() -> Any:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy()


def _one() -> Any:
    import tensorflow as tf

    return tf.distribute.get_strategy()


def _arrays(**changes: Any) -> Any:
    from gpudist_core.pipelines import Pipeline

    return Pipeline.from_arrays((X, Y), **{"global_batch_size": 2, **changes})


def _generator(make: Callable[[], Any] = lambda: zip(X, Y, strict=True), **changes: Any) -> Any:
    from gpudist_core.pipelines import Pipeline

    return Pipeline.from_generator(make, **{"global_batch_size": 2, **changes})


def _consume(pipeline: Any, strategy: Any = None) -> list[Any]:
    return list(pipeline.distribute(strategy or _one()))


def _messages(folder: Path, strategy: Any) -> dict[str, str]:
    found = {}
    for name, function in _mistakes(folder, strategy).items():
        try:
            function()
        except Exception as error:
            found[name] = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        else:
            found[name] = "nothing was raised"
    return found


def _mistakes(folder: Path, strategy: Any) -> dict[str, Callable[[], Any]]:
    return {**_wrong_sources(folder), **_wrong_records(folder), **_wrong_stages(), **_wrong_order(folder, strategy)}


def _wrong_sources(folder: Path) -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    from gpudist_core.pipelines import Pipeline

    dataset = tf.data.Dataset.range(5)
    (folder / "a.bin").touch()
    once, again, signature = zip(X, Y, strict=True), zip(X, Y, strict=True), (tf.TensorSpec((2,)), tf.TensorSpec((), tf.int64))

    def from_dataset(dataset: Any, **changes: Any) -> Any:
        return Pipeline.from_dataset(dataset, global_batch_size=2, **changes)

    def files(first: Any, second: Any) -> Any:
        np.save(folder / "a.npy", first)
        np.save(folder / "b.npy", second)
        return _consume(Pipeline.from_files([folder / "a.npy", folder / "b.npy"], np.load, global_batch_size=2))

    return {
        "global batch of nothing": lambda: _arrays(global_batch_size=0),
        "a seed of another kind": lambda: _arrays(seed=None),
        "an iterator for a generator": lambda: _generator(zip(X, Y, strict=True)),  # type: ignore[arg-type]
        "an iterator that comes again": lambda: _consume(_generator(lambda: once)),
        "an iterator that comes again, with a signature": lambda: [
            _consume(counted) for counted in [_generator(lambda: again, signature=signature)] * 2
        ],
        "a pipeline without a strategy": lambda: list(_arrays()),
        "no strategy": lambda: _arrays().distribute(None),
        "objects": lambda: Pipeline.from_arrays(np.array([{}, {}]), global_batch_size=2),
        "no dataset": lambda: from_dataset([1, 2]),
        "a map of fewer components": lambda: _consume(_arrays().map(lambda x: x)),
        "arrays of different lengths": lambda: Pipeline.from_arrays((X, Y[:4]), global_batch_size=2),
        "no rows": lambda: Pipeline.from_arrays(X[:0], global_batch_size=2),
        "a scalar": lambda: Pipeline.from_arrays(3.0, global_batch_size=2),
        "nothing but a dropped remainder": lambda: _arrays(global_batch_size=8, remainder="drop"),
        "another remainder": lambda: _arrays(remainder="pad"),
        "unknown length": lambda: len(_generator()),
        "an empty generator": lambda: _consume(_generator(lambda: iter(()))),
        "an empty stream": lambda: _consume(_generator(lambda: iter(()), signature=tf.TensorSpec(()))),
        "another count": lambda: _consume(_generator(rows=6)),
        "a row of another shape": lambda: _consume(_generator(lambda: iter([X[0, :1], X[1]]))),
        "rows of another type": lambda: _consume(_generator(lambda: iter([0, 0.5]))),
        "a value that its type does not hold": lambda: _consume(
            _generator(lambda: iter([1, 300]), signature=tf.TensorSpec((), tf.int8))
        ),
        "a row of nothing": lambda: _consume(_generator(lambda: iter([0.0, None]))),
        "a first row of nothing": lambda: _consume(_generator(lambda: iter([(0, None)]))),
        "files of different types": lambda: files(np.arange(2), np.arange(2) + 0.5),
        "files of different shapes": lambda: files(np.zeros((2, 2)), np.zeros((2, 3))),
        "times": lambda: Pipeline.from_arrays(np.arange(4).astype("M8[s]"), global_batch_size=2),
        "a folder of records": lambda: Pipeline.from_tfrecord(folder, global_batch_size=2),
        "batches of a dataset of many shapes": lambda: _consume(
            Pipeline.from_dataset(dataset.map(tf.range).padded_batch(2), batched=True, global_batch_size=3)
        ),
        "a row of another structure": lambda: _consume(_generator(lambda: iter([(1, 2), (1,)]))),
        "no files": lambda: Pipeline.from_files([], np.load, global_batch_size=2),
        "a file of unequal arrays": lambda: _consume(
            Pipeline.from_files(folder / "a.bin", lambda _: (X[:2, 0], Y[:3]), global_batch_size=2)
        ),
        "a dataset without end": lambda: from_dataset(dataset.repeat()),
        "an empty dataset": lambda: from_dataset(dataset.take(0)),
        "a dataset that varies": lambda: from_dataset(dataset.shuffle(3).map(lambda x: x)),
        "ragged rows": lambda: from_dataset(dataset.ragged_batch(2).map(tf.ragged.range)),
        "rows of a dataset of many shapes": lambda: _consume(from_dataset(dataset.map(lambda x: tf.range(x)))),
        "a batched dataset of scalars": lambda: from_dataset(dataset, batched=True),
    }


def _wrong_records(folder: Path) -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    from gpudist_core.pipelines import Pipeline

    def damage(name: str, change: Callable[[bytearray], Any], compression: str = "") -> Callable[[], Any]:
        path = str(folder / f"{name}.tfrecord")
        with tf.io.TFRecordWriter(path, compression) as writer:
            for record in (b"aaaa", b"bbbb", b"cccc"):
                writer.write(record)
        content = bytearray(Path(path).read_bytes())
        change(content)
        Path(path).write_bytes(content)
        return lambda: _consume(Pipeline.from_tfrecord(path, global_batch_size=2))

    def flip(place: int) -> Callable[[bytearray], Any]:
        return lambda content: content.__setitem__(place, content[place] ^ 4)

    return {
        "a pattern": lambda: Pipeline.from_tfrecord(f"{folder}/*.tfrecord", global_batch_size=2),
        "a missing file": lambda: Pipeline.from_tfrecord(folder / "nothing.tfrecord", global_batch_size=2),
        "a record cut off": damage("cut", lambda content: content.__delitem__(slice(55, None))),
        "a header cut off": damage("header", lambda content: content.__delitem__(slice(45, None))),
        "a damaged length": damage("length", flip(20)),
        "damaged data": damage("data", flip(33)),
        "a compressed file": damage("zipped", lambda _: None, "GZIP"),
        "files without records": damage("empty", lambda content: content.clear()),
        "unknown classes": lambda: (
            damage("whole", lambda _: None)(),
            Pipeline.from_tfrecord(folder / "whole.tfrecord", global_batch_size=2).balanced(),
        ),
    }


def _wrong_stages() -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    from gpudist_core.pipelines import Pipeline

    counter = tf.Variable(0)
    table = np.zeros(3_000_000)
    generator = np.random.default_rng(1)

    def use(x: Any, y: Any) -> Any:
        return table[0] + tf.cast(x, tf.float64), y

    def augment(x: Any, y: Any, seed: Any) -> Any:
        return x, y

    def in_python(y: Any) -> Any:
        own = [generator]  # where no closure shows it
        return tf.ensure_shape(tf.numpy_function(lambda _: np.float32(own[0].random()), [y], tf.float32), [])

    def mapped(function: Any) -> Callable[[], Any]:
        return lambda: _consume(_arrays().map(function))

    return {
        "a map that is none": mapped(3),
        "a map that returns nothing": mapped(lambda x, y: None),
        "a map that draws": mapped(lambda x, y: (x + tf.random.uniform([2]), y)),
        "a map that draws by NumPy": mapped(lambda x, y: (x + np.random.rand(), y)),
        "a map that draws by a generator": mapped(lambda x, y: (x + generator.random(), y)),
        "a map that draws by Python": mapped(lambda x, y: (x + random.random(), y)),
        "a map that draws in a function of Python": mapped(lambda x, y: (x + in_python(y), y)),
        "a map that counts": mapped(lambda x, y: (x, y + tf.cast(counter.assign_add(1), tf.int64))),
        "a map with a large array": mapped(use),
        "a map to examples of many shapes": mapped(lambda x, y: (x[: y + 1], y)),
        "a ragged map": mapped(lambda x, y: (tf.ragged.range([y]), y)),
        "a random map before the cache": lambda: _arrays().map(augment, random=True).cache(),
        "a random map before the cache, said later": lambda: _arrays().map(augment, random=True).prefetch(1).cache(),
        "a buffer for arrays": lambda: _arrays().shuffle(100),
        "no buffer for a stream": lambda: _generator().shuffle(),
        "prefetching of less than nothing": lambda: _arrays().prefetch(-1),
        "a balanced stream": lambda: _generator().balanced(),
        "balanced examples of nothing": lambda: _arrays().balanced(rows=0),
        "no pairs": lambda: Pipeline.from_arrays(X, global_batch_size=2).balanced(),
        "labels that are no classes": lambda: _arrays().balanced(X),
        "a class without a weight": lambda: _consume(_arrays().weights({0: 1.0})),
        "a class of a stream without a weight": lambda: _consume(_generator().weights({0: 1.0})),
        "too few weights": lambda: _arrays().weights([1, 2, 3]),
        "weights of another kind": lambda: _arrays().weights("even"),
        "weights below nothing": lambda: _arrays().weights([1.0, -2.0, 1.0, 1.0, 1.0]),
        "weights without a number": lambda: _arrays().weights({0: float("nan"), 1: 1.0}),
        "weights in letters": lambda: _arrays().weights({0: "half", 1: 1.0}),
        "classes by name": lambda: _arrays().weights({"cat": 1.0}),
        "weights twice": lambda: _arrays().weights({0: 1.0, 1: 2.0}).weights(np.ones(5)),
        "weights of what is no pair": lambda: _consume(Pipeline.from_arrays(X, global_batch_size=2).weights(np.ones(5))),
    }


def _wrong_order(folder: Path, strategy: Any) -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    from gpudist_core.pipelines import Pipeline

    state = json.loads(json.dumps(_arrays().state()))

    @tf.function
    def loop() -> None:
        for _ in _arrays().distribute(_one()):
            pass

    def two_iterations() -> None:
        data = _arrays().distribute(_one())
        first = iter(data)
        next(first)
        next(iter(data))
        next(first)

    def restored() -> None:
        data = _arrays()
        batches = iter(data.distribute(_one()))
        next(batches)
        data.restore(state)
        next(batches)

    return {
        "global batch below the replicas": lambda: _arrays(global_batch_size=1).distribute(strategy),
        "other rows": lambda: Pipeline.from_arrays((X + 1, Y), global_batch_size=2).restore(state),
        "another batch size": lambda: _arrays(global_batch_size=4).restore(state),
        "another seed": lambda: _arrays(seed=1).restore(state),
        "another order": lambda: _arrays(shuffle=True).restore(state),
        "no state": lambda: _arrays().restore({"epoch": 1}),
        "an epoch in letters": lambda: _arrays().restore(state | {"epoch": "one"}),
        "a batch beyond the epoch": lambda: _arrays().restore(state | {"batch": 7}),
        "a seed in letters": lambda: _arrays().restore(state | {"seed": "one"}),
        "a loop in a tf.function": loop,
        "an iterator after a new one": two_iterations,
        "an iterator after a restore": restored,
    }


def _tracebacks(folder: Path, strategy: Any) -> dict[str, str]:
    import tensorflow as tf

    from gpudist_core.pipelines import Pipeline

    def broken_while_traced(x: Any, y: Any) -> Any:
        raise KeyError("no such key")

    def broken_while_running(x: Any, y: Any) -> Any:
        tf.debugging.assert_less(x[0], 5.0, "the row is bad")
        return x, y

    def broken_python(row: Any) -> Any:
        if row == 6:
            raise ValueError("row 3 is bad")
        return row

    def broken_rows() -> Any:
        yield X[0], Y[0]
        raise OSError("the disk is gone")

    def broken_reader(path: str) -> Any:
        raise OSError("no such sector")

    in_python = _arrays().map(lambda x, y: (tf.ensure_shape(tf.numpy_function(broken_python, [x[0]], tf.float32), []), y))
    (folder / "one").touch()
    broken = {
        "map, tracing": lambda: _consume(_arrays().map(broken_while_traced), strategy),
        "map, running": lambda: _consume(_arrays().map(broken_while_running), strategy),
        "map in Python": lambda: _consume(in_python, strategy),
        "generator": lambda: _consume(_generator(broken_rows), strategy),
        "reader": lambda: _consume(Pipeline.from_files(folder / "one", broken_reader, global_batch_size=2), strategy),
    }
    found = {}
    for name, function in broken.items():
        try:
            function()
        except Exception:
            found[name] = traceback.format_exc()
    return found


def _lookahead_threads() -> list[str]:
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpudist")]


def _threads(strategy: Any) -> dict[str, list[str]]:
    import tensorflow as tf

    def faulty_map(x: Any, y: Any) -> Any:
        tf.debugging.assert_less(x[0], 5.0)
        return x, y

    def faulty_rows() -> Any:
        yield X[0], Y[0]
        raise OSError

    def left() -> None:
        for _ in _arrays().distribute(strategy):
            assert _lookahead_threads()
            break

    def fails(pipeline: Any, error: type[BaseException], raises: type[BaseException] | None = None) -> None:
        try:
            for _ in pipeline.distribute(strategy):
                if raises is not None:
                    raise raises
        except error:
            return
        raise AssertionError("nothing was raised")

    cases = {
        "left": left,
        "error in a map": lambda: fails(_arrays().map(faulty_map), tf.errors.InvalidArgumentError),
        "error in a generator": lambda: fails(_generator(faulty_rows), OSError),
        "error in the loop": lambda: fails(_arrays(), RuntimeError, RuntimeError),
        "interrupt": lambda: fails(_arrays(), KeyboardInterrupt, KeyboardInterrupt),
        "to the end": lambda: _consume(_arrays(), strategy) and None,
    }
    found = {}
    for name, function in cases.items():
        function()
        found[name] = _lookahead_threads()
    return found


def _prefetched(strategy: Any) -> list[list[str]]:
    """The devices of two batches that are there while only the first was asked for."""
    data = _arrays(global_batch_size=2).distribute(strategy)
    batches = iter(data)
    next(batches)
    shared = batches._batches._shared
    deadline = time.monotonic() + 60
    while len(shared._results) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    ready = [shared._results[number][0] for number in sorted(shared._results)]
    assert [part.numpy().tolist() for part in strategy.experimental_local_results(ready[0][1])] == [[0], [1]]
    return [[value.device.split("device:")[1] for value in strategy.experimental_local_results(batch[0])] for batch in ready]


def _interrupted(strategy: Any) -> str:
    go_on = threading.Event()

    def slow() -> Any:
        yield X[0], Y[0]
        yield X[1], Y[1]
        _thread.interrupt_main()
        go_on.wait(60)
        yield X[2], Y[2]

    try:
        for _ in _generator(slow, signature=None).distribute(strategy):
            pass
    except KeyboardInterrupt:
        go_on.set()
        return "KeyboardInterrupt"
    return "nothing"


def _after_a_failure(strategy: Any) -> list[Any]:
    """Rows of each batch, where reading row 3 fails once."""
    failures = [OSError("once")]

    def rows() -> Any:
        for number in range(6):
            if number == 3 and failures:
                raise failures.pop()
            yield X[0], number

    import tensorflow as tf

    signature = (tf.TensorSpec((2,)), tf.TensorSpec((), tf.int64))
    data = _generator(rows, signature=signature).distribute(strategy)
    found: list[Any] = []
    for _ in range(2):
        try:
            found.extend([int(value[0]) for value in strategy.experimental_local_results(batch[1])] for batch in data)
        except OSError:
            continue
    return found


def _numbers(limit: int | None = None, **changes: Any) -> tuple[Any, Callable[[], list[Any]]]:
    from gpudist_core.pipelines import Pipeline

    data = Pipeline.from_arrays(np.arange(5), global_batch_size=2, **changes)
    distributed = data.distribute(_one())
    return data, lambda: [batch.numpy().tolist() for batch in distributed]


def _left() -> dict[str, Any]:
    data, epoch = _numbers()
    distributed, epochs = data.distribute(_one()), [data.epoch]
    for batch in distributed:
        first = batch.numpy().tolist()
        break
    epochs.append(data.epoch)
    rest = epoch()
    epochs.append(data.epoch)
    after = epoch()
    return {"first": first, "rest": rest, "next": after, "epochs": [*epochs, data.epoch]}


def _left_at_the_end() -> dict[str, Any]:
    """Rows of two epochs, the first counted by hand and left at its last batch; then the epoch."""
    found = {}
    for name, data in {"arrays": _arrays(), "stream": _generator()}.items():
        distributed, counts = data.distribute(_one()), []
        batches = iter(distributed)
        counts.append(sum(len(next(batches)[1]) for _ in range(3)))
        counts.append(sum(len(batch[1]) for batch in distributed))
        found[name] = [*counts, data.epoch]
    return found


def _evaluation() -> dict[str, Any]:
    data, _ = _numbers()
    distributed = data.distribute(_one())
    batches = iter(distributed)
    next(batches)
    rows = [[batch.numpy().tolist()[0] for batch in distributed.epoch_batches(0, start)][:1] for start in (2, 1)]
    return {"rows": rows, "position": (data.state()["epoch"], data.state()["batch"])}


def _calls() -> dict[str, int]:
    """How often a map was called in two epochs of five rows, and a generator."""
    import tensorflow as tf

    calls: list[int] = []
    starts: list[int] = []

    def count(x: Any, y: Any) -> Any:
        def called(value: Any) -> Any:
            calls.append(1)
            return value

        return x, tf.ensure_shape(tf.numpy_function(called, [y], tf.int64), [])

    def rows() -> Any:
        starts.append(1)
        yield from zip(X, Y, strict=True)

    def times(pipeline: Any) -> int:
        calls.clear()
        data = pipeline.distribute(_one())
        first, second = list(data), list(data)
        assert sorted(_labels(first)) == sorted(_labels(second)) == [0, 0, 0, 1, 1]
        return len(calls)

    signature = (tf.TensorSpec((2,)), tf.TensorSpec((), tf.int64))
    found = {
        "cached": times(_arrays(shuffle=True).map(count).cache()),
        "not cached": times(_arrays(shuffle=True).map(count)),
    }
    times(_generator(rows, signature=signature).cache())
    return {**found, "generator": len(starts)}


def _labels(batches: list[Any]) -> list[int]:
    return [int(label) for batch in batches for label in batch[1]]


def _memory_map(folder: Path) -> int:
    """Bytes by which the most memory that this process had grows, where some rows of 200 MB are read."""
    from gpudist_core.pipelines import Pipeline

    np.lib.format.open_memmap(folder / "large.npy", "w+", np.float32, (50_000, 1000)).flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = Pipeline.from_arrays(np.load(folder / "large.npy", mmap_mode="r"), global_batch_size=100, shuffle=True)
    for _, batch in zip(range(5), data.distribute(_one()), strict=False):
        assert batch.shape == (100, 1000)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def _lengths() -> dict[str, int]:
    import tensorflow as tf

    from gpudist_core.pipelines import Pipeline

    return {
        "kept": len(_arrays()),
        "dropped": len(_arrays(remainder="drop").distribute(_one())),
        "counted generator": len(_generator(rows=5)),
        "dataset": len(Pipeline.from_dataset(tf.data.Dataset.range(5), global_batch_size=2)),
        "list": len(list(_generator().distribute(_one()))),
    }


def _element_spec() -> list[Any]:
    spec = _arrays().map(lambda x, y: (x, y)).weights("balanced").element_spec
    return [(tuple(part.shape), part.dtype.name) for part in spec]


def _beside_a_thread_that_draws() -> list[list[float]]:
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            np.random.rand()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        return [x.numpy().ravel().tolist() for x, _ in _arrays().map(lambda x, y: (2 * x, y)).distribute(_one())]
    finally:
        over.set()
        thread.join()


def _shuffles() -> list[list[str]]:
    import tensorflow as tf

    from gpudist_core.upstream.datasets import shuffles_that_vary

    rows = tf.data.Dataset.range(5)
    return [
        shuffles_that_vary(rows.shuffle(3).batch(2)),
        shuffles_that_vary(rows.shuffle(3, seed=1).map(lambda x: x)),
        shuffles_that_vary(rows.shuffle(3, seed=1, reshuffle_each_iteration=False)),
        shuffles_that_vary(tf.data.Dataset.zip(rows.shuffle(3), rows.shuffle(3, seed=1))),
    ]


def _array_used_again() -> list[list[float]]:
    def rows() -> Any:
        row = np.zeros(1)
        for i in range(5):
            row[0] = i
            yield row

    return [batch.numpy()[:, 0].tolist() for batch in _consume(_generator(rows))]
