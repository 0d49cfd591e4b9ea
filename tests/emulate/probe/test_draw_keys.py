"""A key belongs to an example, whatever other examples are beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from emulate.recorder.row_keys import RowKeys, keys_of

BATCHES = arrays(np.int32, st.tuples(st.integers(2, 12), st.just(2)), elements=st.integers(0, 2))


def found(batch: Any, value: Any) -> tuple[list[int], bool]:
    """Return the keys of a value's rows, and whether they are rows of the batch."""
    keys, are_rows = RowKeys([tf.constant(batch)])._found(value)
    return keys.numpy().tolist(), bool(are_rows)


@settings(max_examples=20)
@given(batch=BATCHES, cut=st.integers(1, 11))
def test_two_replicas_have_the_keys_of_one_device_in_parts_of_their_shares(batch: Any, cut: int) -> None:
    shares = [share for share in (batch[:cut], batch[cut:]) if len(share)]
    parts = [found(share, tf.constant(part)) for share in shares for part in (share[::2], share[1::2]) if len(part)]
    assert all(are_rows for _, are_rows in parts)
    whole = [found(batch, tf.constant(part)) for part in (batch[: len(batch) // 2], batch[len(batch) // 2 :])]
    assert Counter(key for keys, _ in parts for key in keys) == Counter(key for keys, _ in whole for key in keys)


@settings(max_examples=20)
@given(batch=BATCHES, cut=st.integers(1, 11))
def test_a_batch_that_is_there_twice_has_other_keys_the_second_time_on_two_replicas_as_on_one(batch: Any, cut: int) -> None:
    shares = [share for share in (batch[:cut], batch[cut:]) if len(share)]
    of_shares = [found(share, tf.concat([share, share], 0))[0] for share in shares]
    keys, are_rows = found(batch, tf.concat([batch, batch], 0))
    assert are_rows
    assert Counter(key for one in of_shares for key in one) == Counter(keys)
    assert all(one != other for one, other in zip(keys[: len(batch)], keys[len(batch) :], strict=True))


def test_what_is_computed_from_the_examples_is_not_taken_for_them() -> None:
    batch = np.arange(6, dtype="f4").reshape(3, 2)
    assert not found(batch, tf.constant(batch + 1))[1]
    assert found(batch, tf.constant(batch[:0])) == ([], True)


@settings(max_examples=20)
@given(batch=BATCHES)
def test_a_row_has_its_key_whether_the_graph_knows_how_wide_it_is_or_not_and_whatever_it_is_padded_with(batch: Any) -> None:
    specs = [tf.TensorSpec(shape, tf.int32) for shape in ([None, 2], [None, None])]
    known, unknown = [tf.function(lambda rows: keys_of([rows]), input_signature=[spec]) for spec in specs]
    keys = known(batch).numpy().tolist()
    assert unknown(batch).numpy().tolist() == keys
    assert unknown(np.pad(batch, [(0, 0), (0, 3)])).numpy().tolist() == keys


@pytest.mark.parametrize("others", [3 * [0.0], 12 * [0.0]], ids=["fewer", "more"])
def test_an_input_with_another_number_of_rows_has_no_part_in_the_keys(others: list[float]) -> None:
    rows, others_rows = tf.reshape(tf.range(8.0), (4, 2)), tf.constant(others)[:, None]
    spec = tf.TensorSpec([None, None])
    keys = tf.function(lambda *tensors: keys_of([*tensors]), input_signature=[spec, spec, spec])
    alone = keys(rows, rows, tf.zeros((3, 1)))
    assert keys(rows, rows, others_rows).numpy().tolist() == alone.numpy().tolist()
    assert keys(rows, rows + 1.0, others_rows).numpy().tolist() != alone.numpy().tolist()
