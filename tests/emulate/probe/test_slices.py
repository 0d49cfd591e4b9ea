"""A table of which each replica holds a slice is recorded in parts and read as one table, whatever the topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.recorder import HostTrace, Record
from emulate.trace import Shard, Trace, TraceWriter, digest, local_slice
from emulate.verify.case import agreement
from emulate.verify.compare import compare

TABLE = np.arange(66, dtype=np.float32).reshape(11, 6)


def record(folder: Path, table: Any, axis: int, total: int, *, sparse: bool = False, lacking: int | None = None) -> Trace:
    """One step of `total` replicas, on two hosts where there are four, whose gradient of a table is the table itself."""
    Trace.describe(folder, {"topology": "1x1"})
    shard = Shard(axis, table.shape[axis], total)
    hosts = 2 if total == 4 else 1
    for host in range(hosts):
        writer = TraceWriter(folder / f"host-{host}", budget=1 << 20)
        recording = HostTrace(writer, steps=None, send=lambda event: None)
        for replica in range(host * total // hosts, (host + 1) * total // hosts):
            part = local_slice(np.moveaxis(table, axis, 0), shard, replica)
            about = {"optimizer": "o", "replica": replica, "shards": {"w": tuple(shard)}, "rows": "none"}
            recording.handle(Record("initial", about, [(("variable", "w", True), part)]))
            values = [(("gradient", "w"), part)]
            if sparse:
                rows = np.array([*range(part.shape[0])] * 2)
                values = [(("sparse-gradient", "w"), np.concatenate([part, part]) / 2), (("sparse-rows", "w"), rows)]
            if replica != lacking:
                recording.handle(Record("step", about, [*values, (("weight", "w", True), part)]))
        writer.close()
    return Trace(folder)


@given(st.integers(1, 14), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1))
def test_the_parts_of_all_replicas_are_the_table(
    tmp_path_factory: pytest.TempPathFactory, rows: int, cols: int, total: int, axis: int
) -> None:
    table = np.random.default_rng(rows).normal(size=(rows, cols)).astype(np.float32)
    trace = record(tmp_path_factory.mktemp("trace"), table, axis, total)
    [step] = trace.steps("o")
    found = [one.gradients["w"] for one in step.values() if "w" in one.gradients]
    assert len(found) == 1
    for array in [*found, step[total - 1].weights["w"].array, *(v["w"].array for v in trace.variables("initial").values())]:
        assert array is not None
        np.testing.assert_array_equal(np.moveaxis(array.read(), 0, axis), table)


def test_a_sparse_gradient_of_a_slice_has_its_rows_in_the_table(tmp_path: Path) -> None:
    trace = record(tmp_path, TABLE, 0, 4, sparse=True)
    np.testing.assert_array_equal(trace.steps("o")[0][0].gradients["w"].read(), TABLE)


def test_topologies_agree_on_a_table_and_a_slice_that_differs_is_found(tmp_path: Path) -> None:
    one = record(tmp_path / "1", TABLE, 0, 1)
    same = compare(one, record(tmp_path / "4", TABLE, 0, 4))
    assert same.is_equivalent
    assert {point.measure.key.kind for point in same.points} == {"initial-weight", "gradient", "weight"}
    other = TABLE.copy()
    other[10, 5] += 1
    first = compare(one, record(tmp_path / "other", other, 0, 4)).first
    assert first is not None
    assert (first.kind, first.tensor, first.value, first.reference_value) == ("initial-weight", "w", 66.0, 65.0)


def test_replicas_that_hold_other_slices_do_not_disagree(tmp_path: Path) -> None:
    found = agreement(record(tmp_path, TABLE, 0, 4))
    assert found.initial is None
    assert found.first is None


def test_a_table_of_which_a_slice_is_missing_is_not_compared(tmp_path: Path) -> None:
    [step] = record(tmp_path, TABLE, 0, 3, lacking=1).steps("o")
    assert all(not one.gradients and not one.weights for one in step.values())


def test_of_a_large_table_the_same_rows_are_kept_on_every_topology(tmp_path: Path) -> None:
    large = np.random.default_rng(0).normal(size=(70_001, 3)).astype(np.float32)
    arrays = [record(tmp_path / str(n), large, 0, n).steps("o")[0][0].weights["w"].array for n in (1, 3)]
    assert arrays[0] is not None
    assert arrays[1] is not None
    np.testing.assert_array_equal(arrays[0].read(), large[::4])
    np.testing.assert_array_equal(arrays[1].read(), large[::4])
    assert not arrays[0].is_complete


def sharded_loop(*, reduces: bool = False, central: bool = False) -> None:
    """A table sharded over the replicas, trained by a loop of one's own; `reduces` sums gradients over the replicas."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    kind = tf.distribute.experimental.CentralStorageStrategy if central else tf.distribute.MirroredStrategy
    strategy = kind()
    table = gd.shard(np.linspace(-1, 1, 22, dtype="float32").reshape(11, 2), strategy, trainable=True, name="table")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([table.variable])
        if not reduces:
            optimizer._all_reduce_sum_gradients = list  # what gpudist_core does to an optimizer
    data = tf.data.Dataset.from_tensor_slices(np.arange(48) % 11).batch(12)

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(table.lookup(ids) - 0.5)) / 12
        optimizer.apply_gradients([(tape.gradient(loss, table.variable), table.variable)])
        return loss

    train = tf.function(lambda ids: strategy.reduce("SUM", strategy.run(step, args=(ids,)), axis=None))
    for ids in strategy.experimental_distribute_dataset(data):
        train(ids)


def test_a_sharded_table_is_compared_with_the_whole_one(recorded: Any) -> None:
    one = recorded(sharded_loop, "1x1", reference=True)
    same = compare(one, recorded(sharded_loop, "1x3"))
    assert same.is_equivalent
    assert same.kinds() == {"initial-weight", "gradient", "weight", "loss"}
    wrong = compare(one, recorded(lambda: sharded_loop(reduces=True), "1x3"))
    assert wrong.first is not None
    assert (wrong.first.kind, wrong.first.tensor, wrong.first.step) == ("weight", "table", 0)


@pytest.mark.slow  # test_a_sharded_table_is_compared_with_the_whole_one is the fast one
def test_a_table_in_one_piece_is_compared_and_each_gradient_is_a_part_of_the_sum(recorded: Any) -> None:
    one = recorded(lambda: sharded_loop(reduces=True), "1x1", reference=True)
    same = compare(one, recorded(lambda: sharded_loop(reduces=True, central=True), "1x3"))
    assert same.is_equivalent
    assert same.kinds() == {"initial-weight", "gradient", "weight", "loss"}
    wrong = compare(one, recorded(lambda: sharded_loop(central=True), "1x3"))
    assert wrong.first is not None
    assert (wrong.first.kind, wrong.first.tensor, wrong.first.step) == ("weight", "table", 0)


def test_a_replay_starts_from_the_table_that_another_topology_started_from(recorded: Any) -> None:
    three = recorded(sharded_loop, "1x3")
    again = recorded(sharded_loop, "1x2", initial=three.directory)
    starts = [next(iter(trace.variables("initial").values()))["table"].array for trace in (three, again)]
    np.testing.assert_array_equal(starts[0].read(), starts[1].read())
    assert digest(starts[0].read()) == digest(np.linspace(-1, 1, 22, dtype="float32").reshape(11, 2))
