"""What the tests of static tensors run on hosts."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.versions import since

TABLE = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)
IDS = [np.array(ids) for ids in ([[3, 3], [10, 0], [5, 3]], np.zeros((0, 2), int), [[1], [9], [9], [3], [4]], [[2]])]
ROWS = [np.random.default_rng(n).normal(size=(n, 11)).astype(np.float32) for n in (2, 0, 3, 1)]


def strategy(kind: str = "mirrored") -> Any:
    import tensorflow as tf

    if kind == "default":
        return tf.distribute.get_strategy()
    if kind == "central":
        devices = [f"CPU:{k}" for k in range(len(tf.config.list_logical_devices("CPU")))]
        return tf.distribute.experimental.CentralStorageStrategy(compute_devices=devices, parameter_device="CPU:0")
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy()


def sharded(axis: int, kind: str = "mirrored") -> dict[str, Any]:
    """Lookup, gather along the other axis and matmul, with their gradients, each replica with its own number of rows."""
    import tensorflow as tf

    import gpudist_core as gd

    where = strategy(kind)
    replicas = gd.replicas_of(where)
    table = gd.shard(TABLE, where, axis, trainable=True, name="table")
    ids = gd.per_replica(where, [tf.constant(IDS[r], tf.int64) for r in replicas.local])
    rows = gd.per_replica(where, [tf.constant(ROWS[r]) for r in replicas.local])

    def step(ids: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = table.lookup(ids), table.gather(ids % 6, axis=1), table.matmul(x)
            loss = tf.reduce_sum(found[0] ** 2) + tf.reduce_sum(tf.sin(found[1])) + tf.reduce_sum(found[2] ** 3)
        gradient, of_x = tape.gradient(loss, [table.variable, x])
        return *found, tf.convert_to_tensor(gradient), of_x

    results = [where.experimental_local_results(one) for one in tf.function(lambda: where.run(step, args=(ids, rows)))()]
    table.assign_rows(4, TABLE.take([4, 5], axis) + 1)
    return {
        "results": {r: [np.asarray(one[k]) for one in results] for k, r in enumerate(replicas.local)},
        "info": table.info,
        "bytes": table.bytes_per_device(),
        "devices": [one.device for one in table.slices],
        "table": table.as_numpy(),
        "slices": list(table.state_slices()),
    }


def expected(replicas: int) -> dict[str, Any]:
    """The same on one device, with plain TensorFlow: the total loss is the sum over the replicas' rows."""
    import tensorflow as tf

    table, xs = tf.Variable(TABLE), [tf.Variable(x) for x in ROWS[:replicas]]
    with tf.GradientTape() as tape:
        found = [(tf.gather(table, i), tf.gather(table, i % 6, axis=1), x @ table) for i, x in zip(IDS, xs, strict=False)]
        loss = tf.add_n([tf.reduce_sum(a**2) + tf.reduce_sum(tf.sin(b)) + tf.reduce_sum(c**3) for a, b, c in found])
    gradient, *of_x = tape.gradient(loss, [table, *xs])
    values = [[np.asarray(one) for one in replica] for replica in found]
    return {"found": values, "gradient": np.asarray(tf.convert_to_tensor(gradient)), "of_x": [np.asarray(x) for x in of_x]}


def replicated(kind: str) -> dict[str, Any]:
    """A table of chunks, used in a step and in a `tf.data` map, and updated."""
    import tensorflow as tf

    import gpudist_core as gd

    where = strategy(kind)
    with where.scope():
        table = gd.replicate((TABLE[start : start + 4] for start in range(0, 11, 4)), where, shape=TABLE.shape)

    @tf.function
    def step() -> Any:
        return where.run(lambda: (tf.gather(table, [2, 5]), table * 2.0, tf.ones([1, 11]) @ table, table.value, table[3]))

    outcome = [[np.asarray(v) for v in where.experimental_local_results(one)] for one in step()]
    size = len(step.get_concrete_function().graph.as_graph_def().SerializeToString())
    table.update_rows(2, np.ones((1, 6)))
    after = [np.asarray(v) for v in where.experimental_local_results(step()[0])]
    rows = list(tf.data.Dataset.range(11).map(lambda k: table[k] + tf.gather(table, k)).as_numpy_iterator())
    devices = [copy.device for copy in table.copies]
    return {"step": outcome, "after": after, "map": rows, "bytes": table.bytes_per_device(), "devices": devices, "graph": size}


def refusals() -> dict[str, str]:
    """Bad input, by what is wrong with it."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    where = strategy()
    table, copies = gd.shard(TABLE, where), gd.replicate(TABLE, where)
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    calls: dict[str, Any] = {
        "axis": lambda: gd.shard(TABLE, where, axis=2),
        "axis in letters": lambda: gd.shard(TABLE, where, axis="0"),
        "half a row to update": lambda: copies.update_rows(1.5, TABLE[:2]),
        "no state": lambda: copies.restore({"x": 1}),
        "two sources": lambda: gd.shard(TABLE, where, initializer=lambda start, shape: np.zeros(shape)),
        "inside": lambda: where.run(lambda: gd.shard(TABLE, where)),
        "a copy inside": lambda: where.run(lambda: gd.replicate(TABLE, where)),
        "an initializer by name": lambda: gd.ShardedEmbedding(10, 4, where, initializer="uniform"),
        "an initializer of Keras": lambda: gd.shard(None, where, shape=(11, 6), initializer=keras.initializers.Zeros()),
        "a name of Keras": lambda: gd.ShardedEmbedding(10, 4, where, embeddings_initializer="uniform"),
        "names of Keras": lambda: gd.ShardedEmbedding(input_dim=10, output_dim=4),
        "what it lacks": lambda: gd.ShardedEmbedding(10, 4, where, mask_zero=True),
        "half a row": lambda: gd.ShardedEmbedding(10.5, 4, where),
        "strings": lambda: gd.replicate(np.array(["a"]), where),
        "too few": lambda: gd.shard(iter([TABLE[:4]]), where, shape=(11, 6)),
        "too many": lambda: gd.replicate(iter([TABLE, TABLE]), where, shape=(11, 6)),
        "no shape": lambda: gd.replicate(iter([TABLE]), where),
        "other width": lambda: gd.replicate(iter([TABLE[:, :2]]), where, shape=(11, 6)),
        "no rows": lambda: gd.shard(TABLE[:0], where),
        "outside": lambda: table.lookup([1]),
        "a tensor": lambda: tf.gather(table, [1]),
        "other strategy": lambda: other.run(lambda: copies + 1.0),
        "in a step": lambda: where.run(tf.function(lambda: copies.assign(TABLE))),
        "rows": lambda: table.assign_rows(10, TABLE[:2]),
        "update": lambda: copies.update_rows(-1, TABLE[:2]),
        "large": lambda: gd.shard(None, where, shape=(1 << 44, 4), initializer=lambda start, shape: np.zeros(shape)),
        "large copy": lambda: gd.replicate(iter(()), where, shape=(1 << 44, 4)),
        "id": lambda: tf.function(lambda: where.run(lambda: table.lookup([11])))(),
        "a chunk of another dtype": lambda: gd.replicate(iter([np.arange(2), np.array([0.5])]), where, shape=(3,)),
        "an update of another dtype": lambda: gd.replicate(np.arange(3), where).update_rows(0, [0.5]),
        "rows of another dtype": lambda: gd.shard(np.arange(3), where).assign_rows(0, [0.5]),
        "complex values": lambda: gd.replicate(np.arange(2.0), where).assign([1j, 2]),
        "values of another dtype": lambda: gd.replicate(np.arange(2), where).assign([0.5, 1.5]),
        "ragged ids": lambda: where.run(lambda: table.lookup(tf.ragged.constant([[1, 2], [3]]))),
        "x": lambda: where.run(lambda: table.matmul(tf.ones([2, 3]))),
        "in a loop": lambda: tf.function(
            lambda: where.run(lambda: tf.while_loop(lambda k: k < 2, lambda k: k + len(table.lookup([1])), [0])),
            autograph=False,
        )(),
        "in a function": lambda: where.run(lambda: tf.function(lambda: table.matmul(tf.ones([2, 11])), autograph=False)()),
        "not a strategy": lambda: gd.replicate(TABLE, "GPU:0"),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def few_rows() -> Any:
    """A table with fewer rows than replicas, filled by an initializer, through a Keras layer."""
    import tensorflow as tf

    import gpudist_core as gd

    where = strategy()
    with where.scope():
        layer = gd.ShardedEmbedding(3, 2, where, seed=7)
    run = tf.function(lambda: where.run(lambda: layer(tf.constant([[0, 2], [1, 1]]))))
    looked = [np.asarray(one) for one in where.experimental_local_results(run())]
    return looked, layer.table.as_numpy(), len(layer.trainable_variables)


def trained_table(folder: Path, steps: int, kind: str = "mirrored") -> dict[str, Any]:
    """A table trained by Adam up to a step, from the last checkpoint in a folder on; saved at the end."""
    import keras

    import gpudist_core as gd

    keras.utils.set_random_seed(3)
    where = strategy(kind)
    with where.scope():
        layers = [gd.ShardedEmbedding(11, 4, where), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers])
        optimizer = keras.optimizers.Adam(0.05)
    step = gd.TrainStep(model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.random.default_rng(7).integers(0, 11, (6 * 10, 2))
    data = gd.Pipeline.from_arrays((ids, ids.sum(1) % 3), global_batch_size=10)
    with gd.Checkpoints(folder, keep=1, step=step, pipeline=data) as checkpoints:
        restored = checkpoints.restore()
        number = started = 0 if restored is None else restored.step
        for batch in data.distribute(where):
            step(batch)
            number += 1
            if number == steps:
                break
        checkpoints.save(number)
    return {"from": started, "table": model.layers[0].table.as_numpy()}


def fitted(kind: str = "mirrored") -> dict[str, Any]:
    """Keras's own fit, evaluate and predict of a model that looks up rows, and whose own layer multiplies by a table."""
    import keras

    import gpudist_core as gd

    keras.utils.set_random_seed(3)
    where = strategy(kind)

    class Times(keras.layers.Layer):
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = [table]

        def call(self, x: Any) -> Any:
            return self.table[0].matmul(x)

    with where.scope():
        fixed = gd.shard(np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3), where, axis=1)
        ids = keras.Input((2,), dtype="int64")
        found = keras.layers.GlobalAveragePooling1D()(gd.ShardedEmbedding(11, 4, where, name="table")(ids))
        model = gd.distributed(keras.Model(ids, Times(fixed)(found)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05, global_clipnorm=0.5), loss, metrics=["accuracy"])
    x = np.random.default_rng(7).integers(0, 11, (44, 2))
    y = x.sum(1) % 3
    history = model.fit(x, y, batch_size=10, epochs=2, validation_data=(x[:9], y[:9]), verbose=0).history
    return {
        "table": model.get_layer("table").table.as_numpy(),
        "history": history,
        "evaluated": model.evaluate(x, y, batch_size=10, verbose=0),
        "predicted": model.predict(x[:7], batch_size=4, verbose=0),
    }


def coupled() -> dict[str, str]:
    """Optimizers that look at all of a variable, on a table in slices: what they say, empty where they train it."""
    import keras

    import gpudist_core as gd

    where, said = strategy(), {}
    kinds = {
        "Lamb": keras.optimizers.Lamb,
        "Adafactor": keras.optimizers.Adafactor,
        "Adam": keras.optimizers.Adam,
    }
    if since("keras", "3.13"):  # Keras 3.8 has no Muon, and that of 3.10 and 3.12 knows no variables of replicas
        muon = keras.optimizers.Muon
        kinds |= {"Muon": functools.partial(muon, exclude_embeddings=False), "Muon, AdamW for embeddings": muon}
    for name, kind in kinds.items():
        with where.scope():
            model = keras.Sequential([keras.Input((), dtype="int64"), gd.ShardedEmbedding(11, 3, where, name="table")])
            optimizer = kind(0.01)
        step = gd.TrainStep(model, optimizer, lambda y, y_pred: y_pred)
        batch = next(iter(gd.Pipeline.from_arrays((np.arange(8), np.zeros(8)), global_batch_size=8).distribute(where)))
        try:
            step(batch)
            said[name] = ""
        except gd.UsageError as error:
            said[name] = str(error)
    return said


def taken_and_put_back(folder: Path) -> dict[str, Any]:
    """Weights of a model with a table, taken and put back by Keras's own methods and callback; the model saved and loaded."""
    import keras

    import gpudist_core as gd

    keras.utils.set_random_seed(3)
    where = strategy()
    with where.scope():
        layers = [keras.Input((2,), dtype="int64"), gd.ShardedEmbedding(11, 4, where, name="table"), keras.layers.Flatten()]
        model = gd.distributed(keras.Sequential([*layers, keras.layers.Dense(3)]))
        model.compile(keras.optimizers.SGD(5.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    table = model.layers[0].table
    before = table.as_numpy()
    weights = model.get_weights()
    table.assign_rows(0, np.zeros_like(before))
    model.set_weights(weights)
    try:
        model.set_weights([weights[0][:4], *weights[1:]])
        refused = ""
    except ValueError as error:
        refused = str(error)
    x = np.random.default_rng(7).integers(0, 11, (29, 2))
    stops = keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True)
    tables: list[Any] = []
    keeps = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: tables.append(table.as_numpy()))
    losses = model.fit(x, x.sum(1) % 3, batch_size=8, epochs=5, shuffle=False, verbose=0, callbacks=[keeps, stops]).history[
        "loss"
    ]
    found = {"same": np.array_equal(before, weights[0]), "refused": refused, "after": table.as_numpy(), "losses": losses}
    found["best"] = np.array_equal(tables[int(np.argmin(losses))], table.as_numpy())
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras", custom_objects={"ShardedEmbedding": gd.ShardedEmbedding})
    return found | {"loaded": np.array_equal(loaded.get_weights()[0], table.as_numpy())}


def of_any_dtype(all_reduce: str) -> dict[str, list[Any]]:
    """By dtype what replicas look up in a sharded table of it, one after the other."""
    import tensorflow as tf

    import gpudist_core as gd

    where = gd.make_strategy(all_reduce=all_reduce)
    found: dict[str, list[Any]] = {}
    summed: set[str] = set()
    for dtype in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int16", "uint32", "bool"):
        table = gd.shard(np.arange(20).reshape(10, 2) % 2, where, dtype=dtype)
        look_up = tf.function(lambda table=table: where.run(lambda: table.lookup([1, 7])))
        rows = look_up()
        made = look_up.get_concrete_function().graph.get_operations()
        summed |= {one.get_attr("T").name for one in made if one.type == "CollectiveReduceV2"}
        looked_up = [np.asarray(one) for one in where.experimental_local_results(rows)]
        assert all(one.dtype == tf.as_dtype(dtype).as_numpy_dtype for one in looked_up)
        found[dtype] = [one.astype(int).tolist() for one in looked_up]
    assert not summed & {"int32", "bool", "bfloat16"}, "collectives refuse these on GPUs"
    assert bool(summed) == (all_reduce == "ring")
    return found


def of_unknown_sizes() -> list[list[Any]]:
    """What replicas look up where one of four does not know how many ids it has, where none does, and not even the rank."""
    import tensorflow as tf

    import gpudist_core as gd

    where = strategy()
    rows, numbers = gd.shard(TABLE, where), gd.shard(TABLE[:, 0], where)
    ids = gd.per_replica(where, [tf.constant(one, tf.int64) for one in IDS])

    def look_up(ids: Any) -> Any:
        return rows.lookup(ids), numbers.lookup(ids)

    def one_unknown(ids: Any) -> Any:
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return look_up(tf.boolean_mask(ids, ids >= 0) if replica == 2 else ids)

    def unknown(rank: int | None) -> Any:
        @tf.function(autograph=False)
        def step(*ids: Any) -> Any:
            return where.run(look_up, args=(gd.per_replica(where, list(ids)),))

        spec = tf.TensorSpec(None if rank is None else [None] * rank, tf.int64)
        return step.get_concrete_function(*[spec] * len(IDS))(*(tf.constant(one, tf.int64) for one in IDS))

    found = [tf.function(lambda: where.run(one_unknown, args=(ids,)))(), unknown(2), unknown(None)]
    return [[[np.asarray(value) for value in where.experimental_local_results(one)] for one in pair] for pair in found]


def bad_ids() -> list[str]:
    """What a program hears that catches the error of a bad id and goes on; ids are bad in every other step."""
    import tensorflow as tf

    import gpudist_core as gd

    where = strategy()
    tables = [gd.shard(TABLE * factor, where) for factor in (1.0, 2.0)]

    @tf.function
    def step(ids: Any) -> Any:
        def of_replica() -> Any:
            found = [tf.reduce_sum(table.lookup(ids)) for table in tables]
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.add_n(found))

        return where.run(of_replica)

    heard = []
    for ids in ([1, 2], [1, 11], [3, 4], [-1, 0]) * 6:
        try:
            step(tf.constant(ids))
            heard.append("")
        except tf.errors.InvalidArgumentError as error:
            heard.append(
                "An id must be a row" if "An id must be a row of the table: 0 <= id < 11." in str(error) else str(error)
            )
    return heard


def memory_of_a_large_table() -> dict[str, int]:
    """How many slices of a table lie in the memory they were given, after it is filled and after a step."""
    import keras

    import gpudist_core as gd

    given: list[np.ndarray[Any, Any]] = []
    zeros = np.zeros

    def note(*args: Any) -> Any:
        given.append(zeros(*args))
        return given[-1]

    where, rows = gd.make_strategy(), 1 << 20
    np.zeros = note  # type: ignore[assignment]
    try:
        with where.scope():
            table = gd.ShardedEmbedding(rows, 4, where, initializer=lambda start, shape: np.full(shape, 5.0, "float32"))
            model = keras.Sequential([keras.Input((1,), dtype="int64"), table, keras.layers.Flatten()])
            optimizer = keras.optimizers.SGD(4.0)
    finally:
        np.zeros = zeros
    given = [raw for raw in given if raw.nbytes >= rows * 16 // where.num_replicas_in_sync]
    kept = {"given": len(given), "filled in place": sum(bool((raw == 0xA0).any()) for raw in given)}  # 5.0 is 00 00 A0 40
    step = gd.TrainStep(model, optimizer, lambda target, found: found[:, 0])
    data = gd.Pipeline.from_arrays((np.array([[0], [rows - 1]]), np.zeros(2)), global_batch_size=2)
    for batch in data.distribute(where):
        step(batch)
    kept["trained in place"] = sum(bool((raw == 0x40).sum() != (raw == 0xA0).sum()) for raw in given)  # 3.0 is 00 00 40 40
    return kept


LARGE = 8 << 20
"""Bytes of a tensor that TensorFlow's allocator on CPU need not keep."""


def large_of_any_dtype(dtype: str) -> dict[str, int]:
    """How many values of a replicated tensor are right, and how many copies of it were given memory and gave it back."""
    import gc
    import weakref

    import tensorflow as tf

    import gpudist_core as gd

    given: list[Any] = []
    where = gd.make_strategy()
    values = tf.cast(tf.ones([LARGE // tf.as_dtype(dtype).size]), dtype)
    zeros = np.zeros

    def note(*args: Any) -> Any:
        raw = zeros(*args)
        given.extend([weakref.ref(raw)] if raw.nbytes >= LARGE else [])
        return raw

    np.zeros = note  # type: ignore[assignment]
    try:
        tensor = gd.replicate(values, where)
    finally:
        np.zeros = zeros
    right = int(tf.reduce_sum(tf.cast(tensor.copies[1], tf.int64)))
    del tensor
    gc.collect()
    return {"values": right, "given": len(given), "given back": sum(raw() is None for raw in given)}
