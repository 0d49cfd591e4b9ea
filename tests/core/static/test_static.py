"""Static tensors: one resident copy on each device, or one slice of a table on each, right in value and gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.cluster import Cluster, Preload
from gpudist_core.static.operations import ShardInfo
from tests.core.conftest import OnHosts
from tests.core.static import on_host


@pytest.fixture(scope="module")
def sharded(preload: Preload) -> Callable[[str, int], list[Any]]:
    """sharded("2x2", axis): what each host saw of a table in slices, from one run for all tests that look at it."""

    @functools.cache
    def run(topology: str, axis: int) -> list[Any]:
        with Cluster(topology, preload=preload, timeout=120) as cluster:
            return cluster.run(on_host.sharded, axis)

    return run


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("topology", ["1x1", "1x4", "2x2"])
def test_a_sharded_table_computes_what_the_whole_one_does(
    on_hosts: OnHosts, sharded: Callable[[str, int], list[Any]], topology: str, axis: int
) -> None:
    hosts = sharded(topology, axis)
    by_replica = {r: values for host in hosts for r, values in host["results"].items()}
    [one] = on_hosts("1x1", on_host.expected, len(by_replica))
    for r, (*found, gradient, of_x) in by_replica.items():
        for ours, theirs in zip([*found, of_x], [*one["found"][r], one["of_x"][r]], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        low, high = hosts[0]["info"].span(r)
        whole = one["gradient"].take(range(low, high), axis)
        np.testing.assert_allclose(gradient.take(range(high - low), axis), whole, rtol=1e-4, atol=1e-3)
        assert not gradient.take(range(high - low, gradient.shape[axis]), axis).any(), "padding is never trained"


@pytest.mark.parametrize("axis", [0, 1])
def test_central_storage_keeps_the_table_in_one_piece_and_computes_the_same(on_hosts: OnHosts, axis: int) -> None:
    [host] = on_hosts("1x4", on_host.sharded, axis, "central")
    [one] = on_hosts("1x1", on_host.expected, 4)
    for r, (*found, _, of_x) in host["results"].items():
        for ours, theirs in zip([*found, of_x], [*one["found"][r], one["of_x"][r]], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    gradients = [gradient for *_, gradient, _ in host["results"].values()]
    np.testing.assert_allclose(np.sum(gradients, axis=0), one["gradient"], rtol=1e-4, atol=1e-3)
    assert host["bytes"] == {host["devices"][0]: on_host.TABLE.nbytes}
    changed = on_host.TABLE.copy()
    changed[(slice(None),) * axis + ([4, 5],)] += 1
    np.testing.assert_array_equal(host["table"], changed)


@pytest.mark.slow
def test_a_table_in_one_piece_goes_on_as_slices_and_back(on_hosts: OnHosts, tmp_path: Path) -> None:
    straight = on_hosts("1x1", on_host.trained_table, tmp_path / "a", 6)[0]
    for kinds in (("central", "mirrored"), ("mirrored", "central")):
        folder = tmp_path / kinds[0]
        on_hosts("1x3", on_host.trained_table, folder, 3, kinds[0])
        [continued] = on_hosts("1x3", on_host.trained_table, folder, 6, kinds[1])
        assert continued["from"] == 3
        np.testing.assert_allclose(continued["table"], straight["table"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("topology", "kind"),
    [
        pytest.param("1x3", "mirrored", marks=pytest.mark.slow),
        pytest.param("2x2", "mirrored", marks=pytest.mark.slow),
        ("1x3", "central"),
    ],
)
def test_fit_evaluate_and_predict_of_a_model_with_tables_are_those_of_one_device(
    on_hosts: OnHosts, topology: str, kind: str
) -> None:
    [one] = on_hosts("1x1", on_host.fitted)
    for host in on_hosts(topology, on_host.fitted, kind):
        np.testing.assert_allclose(host["table"], one["table"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(host["predicted"], one["predicted"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(host["evaluated"], one["evaluated"], rtol=1e-5)
        assert host["history"].keys() == one["history"].keys()
        for name, values in one["history"].items():
            np.testing.assert_allclose(host["history"][name], values, rtol=1e-5, err_msg=name)


def test_weights_of_a_table_in_slices_are_taken_and_put_back_whole(on_hosts: OnHosts, tmp_path: Path) -> None:
    alone, several = (on_hosts(topology, on_host.taken_and_put_back, tmp_path)[0] for topology in ("1x1", "1x3"))
    for found in (alone, several):
        assert found["same"]
        assert found["best"]
        assert found["loaded"]
    np.testing.assert_allclose(several["losses"], alone["losses"], rtol=1e-4)
    np.testing.assert_allclose(several["after"], alone["after"], rtol=1e-4, atol=1e-5)
    assert several["refused"] == (
        "A weight must keep its shape. Received: weight='table/embeddings', shape=(4, 4), needed=(11, 4). Pass the result of "
        "get_weights() of such a model."
    )


def test_an_optimizer_that_looks_at_a_whole_variable_is_refused_where_there_are_slices_of_it(on_hosts: OnHosts) -> None:
    rule = "A sharded table needs an optimizer that updates each element by itself. Received: optimizer="
    [found] = on_hosts("1x2", on_host.coupled)
    muon = ["Muon"] if "Muon" in found else []
    for name in ("Lamb", "Adafactor", *muon):
        assert found.pop(name).startswith(f"{rule}'{name}', variable='table/embeddings'. Use Adam, Adagrad or SGD. ")
    assert found == {"Adam": "", **({"Muon, AdamW for embeddings": ""} if muon else {})}
    [alone] = on_hosts("1x1", on_host.coupled)
    assert set(alone.values()) == {""}


@pytest.mark.parametrize("topology", ["1x4", "2x2"])
def test_each_device_has_one_slice_and_every_host_can_read_the_table(
    sharded: Callable[[str, int], list[Any]], topology: str
) -> None:
    changed = on_host.TABLE.copy()
    changed[[4, 5]] += 1
    hosts = sharded(topology, 0)
    for host in hosts:
        np.testing.assert_array_equal(host["table"], changed)
        assert list(host["bytes"]) == host["devices"]
        assert set(host["bytes"].values()) == {3 * 6 * 4}
    parts = sorted(((start, rows) for host in hosts for start, rows in host["slices"]), key=lambda part: part[0])
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in parts]), changed)


@pytest.mark.parametrize(
    ("topology", "kind"), [("1x2", "mirrored"), ("1x2", "central"), ("1x1", "default"), ("2x2", "mirrored")]
)
def test_a_replicated_tensor_is_there_once_on_each_device(on_hosts: OnHosts, topology: str, kind: str) -> None:
    table = on_host.TABLE
    changed = table.copy()
    changed[2] = 1
    for host in on_hosts(topology, on_host.replicated, kind):
        assert host["bytes"] == dict.fromkeys(host["devices"], table.nbytes)
        assert len(set(host["devices"])) == (1 if kind == "default" else 2)
        for values, whole in zip(host["step"], [table[[2, 5]], table * 2, table.sum(0)[None], table, table[3]], strict=True):
            assert len(values) == len(host["devices"])
            for one in values:
                np.testing.assert_allclose(one, whole, rtol=1e-5, atol=1e-5)
        for one in host["after"]:
            np.testing.assert_array_equal(one, changed[[2, 5]])
        np.testing.assert_array_equal(np.stack(host["map"]), 2 * changed)


_OF_ITS_DTYPE = "UsageError: The dtype of a static tensor must be able to hold its values. Received: "
_NOT_HELD = f"{_OF_ITS_DTYPE}dtype='int64', values='float64'. Give dtype=... where"
REFUSALS = {
    "axis": r"UsageError: axis must be an axis of the tensor. Received: axis=2, shape=(11, 6). Axes count from 0.",
    "axis in letters": "UsageError: axis must be an axis of the tensor. Received: axis='0', shape=(11, 6). Axes count from 0.",
    "half a row to update": "UsageError: Rows to update must be rows of the tensor. Received: start=1.5, values=(2, 6), shape=",
    "no state": "UsageError: state must be a result of Replicated.state(). Received: state={'x': 1}.",
    "two sources": "UsageError: A table needs either a tensor or an initializer. Received: tensor='ndarray', initializer=<func",
    "an initializer by name": "UsageError: A table's initializer must be a function of (start, (count, ...)) that returns "
    "those rows and depends on their numbers only, so that each device can make its own slice. Received: "
    "initializer='uniform'. Use gpudist_core.",
    "an initializer of Keras": "UsageError: A table's initializer must be a function of (start, (count, ...)) that returns "
    "those rows and depends on their numbers only, so that each device can make its own slice. Received: "
    "initializer='Zeros'. Use gpudist_core.",
    "inside": "UsageError: A table must be made once, for all replicas. Received: inside='Strategy.run'. Make it before "
    "Strategy.run.",
    "a copy inside": "UsageError: A replicated tensor must be made once, for all replicas. Received: inside='Strategy.run'. "
    "Make it",
    "a name of Keras": "UsageError: ShardedEmbedding accepts rows, dim, strategy, initializer, seed and name only. Received: "
    "embeddings_initializer='uniform'. Use initializer.",
    "names of Keras": "UsageError: ShardedEmbedding accepts rows, dim, strategy, initializer, seed and name only. Received: "
    "input_dim=10. Use rows.",
    "what it lacks": "UsageError: ShardedEmbedding accepts rows, dim, strategy, initializer, seed and name only. Received: "
    "mask_zero=True. Leave it out: regularizers, constraints and masks need a table in one piece.",
    "half a row": "UsageError: rows must be a positive integer. Received: rows=10.5.",
    "strings": "UsageError: A static tensor must hold numbers. Received: dtype='<U1'. Encode strings as numbers first.",
    "too few": "UsageError: The chunks must have as many rows as shape says. Received: rows=4, shape=(11, 6). The chunks "
    "have fewer rows.",
    "too many": "UsageError: The chunks must have as many rows as shape says. Received: rows=22, shape=(11, 6). The chunks "
    "have more rows.",
    "no shape": "UsageError: A table from chunks needs its whole shape. Received: shape=None. Give",
    "other width": "UsageError: A chunk must have the table's shape, except for the number of rows. Received: chunk=(11, 2), "
    "shape=(11, 6).",
    "no rows": "UsageError: A table must have at least one row to split. Received: shape=(0, 6), axis=0. Pass a table with "
    "rows.",
    "outside": "UsageError: ShardedTable.gather needs all replicas of the table's own strategy at once. Received: strategy=",
    "a tensor": "UsageError: A sharded table cannot be converted to one tensor. Received: table='sharded'. In a step, use "
    "lookup, gather or",
    "other strategy": "UsageError: A replicated tensor must be used in steps of its own strategy. Received: strategy=",
    "rows": "UsageError: Rows to assign must be rows of the table. Received: start=10, values=(2, 6), table=(11, 6). Fix",
    "update": "UsageError: Rows to update must be rows of the tensor. Received: start=-1, values=(2, 6), shape=(11, 6).",
    "large": "Unavailable: A static tensor must fit into the memory of its device. Received: needed=281474976710656 bytes (",
    "large copy": "Unavailable: A static tensor must fit into the memory of its device. Received: needed=562949953421312 bytes",
    "id": "InvalidArgumentError: ",
    "a chunk of another dtype": _NOT_HELD,
    "an update of another dtype": _NOT_HELD,
    "rows of another dtype": _NOT_HELD,
    "complex values": f"{_OF_ITS_DTYPE}dtype='float64', values='complex128'. Give dtype=... where",
    "values of another dtype": _NOT_HELD,
    "ragged ids": "UsageError: Ids must be a dense tensor. Received: ids='RaggedTensor'. Look up ids.values. For ragged "
    "ids, tf.ragged.",
    "x": "UsageError: x @ table needs x of shape (..., rows). Received: x=3, table=(11, 6). Fix the shapes.",
    "in a loop": "UsageError: ShardedTable.gather must be called directly in the function that Strategy.run gets. Received: "
    "inside='a function within it'. Move the call out of the inner tf.function, loop (tf.while_loop, a Keras RNN) or",
    "in a function": "UsageError: ShardedTable.matmul must be called directly in the function that Strategy.run gets",
    "not a strategy": "UsageError: gd.replicate needs a tf.distribute.Strategy. Received: strategy='GPU:0'. gd.make_strategy()",
}


def test_what_cannot_be_meant_is_refused_with_the_values(on_hosts: OnHosts) -> None:
    [found] = on_hosts("1x2", on_host.refusals)
    for name, start in REFUSALS.items():
        assert found[name].startswith(start), (name, found[name])
    assert "Replicated.assign must be called between steps" in found["in a step"]
    assert "An id must be a row of the table: 0 <= id < 11." in found["id"]


def test_ids_of_a_number_that_one_replica_or_none_knows_beforehand_are_looked_up_too(on_hosts: OnHosts) -> None:
    [found] = on_hosts("1x4", on_host.of_unknown_sizes)
    for known, (rows, numbers) in enumerate(found):
        for replica, ids in enumerate(on_host.IDS):
            flat = ids.ravel() if not known and replica == 2 else ids
            np.testing.assert_array_equal(rows[replica], on_host.TABLE[flat])
            np.testing.assert_array_equal(numbers[replica], on_host.TABLE[flat, 0])


@pytest.mark.parametrize("topology", ["1x2", "2x2"])
def test_a_bad_id_is_told_on_all_hosts_and_none_is_left_waiting(on_hosts: OnHosts, topology: str) -> None:
    for heard in on_hosts(topology, on_host.bad_ids):
        assert heard == ["", "An id must be a row"] * 12


def test_with_fewer_rows_than_replicas_the_last_hold_none_and_values_are_those_of_one_device(on_hosts: OnHosts) -> None:
    tables: list[Any] = []
    for topology in ("1x1", "1x4"):
        [(looked, table, weights)] = on_hosts(topology, on_host.few_rows)
        for one in looked:
            np.testing.assert_array_equal(one, table[[[0, 2], [1, 1]]])
        assert weights == 1
        tables.append(table)
    np.testing.assert_array_equal(*tables)


@given(st.integers(1, 100), st.integers(1, 12))
def test_every_row_lies_in_one_slice(rows: int, replicas: int) -> None:
    info = ShardInfo(0, rows, replicas)
    spans = [info.span(r) for r in range(replicas)]
    assert [row for low, high in spans for row in range(low, high)] == list(range(rows))
    assert all(high - low <= info.height for low, high in spans)


@pytest.mark.parametrize("all_reduce", ["hierarchical", "ring", "one-device"])
def test_a_table_of_any_dtype_is_looked_up_by_any_all_reduce(on_hosts: OnHosts, all_reduce: str) -> None:
    [found] = on_hosts("1x2", on_host.of_any_dtype, all_reduce)
    assert all(rows == [[[0, 1], [0, 1]]] * 2 for rows in found.values()), found


@pytest.mark.parametrize("name", ["_scatter", "_assign_slice"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("rest", [(), (3,), (3, 2)])
def test_rows_are_written_in_place_on_a_cpu_and_by_the_way_of_a_gpu(name: str, dtype: str, rest: tuple[int, ...]) -> None:
    import tensorflow as tf

    from gpudist_core.static import memory

    whole = np.arange(7 * int(np.prod(rest))).reshape(7, *rest) % 2
    variable = tf.Variable(tf.zeros(whole.shape, dtype))
    getattr(memory, name)(variable, 2, whole[2:5].astype(variable.dtype.as_numpy_dtype))
    expected = np.zeros_like(whole)
    expected[2:5] = whole[2:5]
    np.testing.assert_array_equal(variable.numpy().astype(int), expected)


@pytest.mark.parametrize("topology", ["1x1", "1x2"])
def test_a_large_table_stays_in_the_memory_it_was_given(on_hosts: OnHosts, topology: str) -> None:
    (kept,) = on_hosts(topology, on_host.memory_of_a_large_table)
    slices = int(topology[-1])
    assert kept == {"given": slices, "filled in place": slices, "trained in place": slices}


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bfloat16", "bool"])
def test_a_large_tensor_of_any_dtype_is_written_in_place_and_its_memory_given_back(on_hosts: OnHosts, dtype: str) -> None:
    (found,) = on_hosts("1x2", on_host.large_of_any_dtype, dtype)
    whole = on_host.LARGE // np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize
    ours = dtype not in ("bfloat16", "bool")  # which NumPy has not, or DLPack; TensorFlow's allocator keeps them
    assert found == {"values": whole, "given": 2 * ours, "given back": 2 * ours}
