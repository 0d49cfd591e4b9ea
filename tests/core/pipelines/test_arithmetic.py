"""Shares, orders, buffers and checksums: arithmetic that holds for any numbers."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.hashing import balanced, in_order, permutation, shuffled, words
from gpudist_core.pipelines.plan import cuts, rebatched, shares, shuffled_chunks
from gpudist_core.pipelines.sources.files import masked_crc32c
from gpudist_core.pipelines.weighting import Weighting, balancing, by_class, classes_of

COUNTS = st.integers(1, 200)


@given(rows=st.integers(0, 1000), total=st.integers(1, 64))
def test_shares_are_all_rows_and_as_equal_as_can_be(rows: int, total: int) -> None:
    found = shares(rows, total)
    assert sum(found) == rows
    assert len(found) == total
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


@given(rows=st.integers(0, 1000), hosts=st.integers(1, 8), devices=st.integers(1, 8))
def test_the_cuts_of_all_hosts_are_the_shares(rows: int, hosts: int, devices: int) -> None:
    ends = [cuts(rows, hosts * devices, range(host * devices, (host + 1) * devices)) for host in range(hosts)]
    assert [b - a for found in ends for a, b in itertools.pairwise(found)] == shares(rows, hosts * devices)
    assert ends[0][0] == 0
    assert [found[-1] for found in ends] == [*(found[0] for found in ends[1:]), rows]


def test_a_share_is_of_rows_for_replicas() -> None:
    with pytest.raises(UsageError, match=r"shares needs rows >= 0 and total >= 1\. Received: rows=3, total=0\."):
        shares(3, 0)


def test_random_numbers_stay_what_they_are() -> None:
    # A run that is restored goes on in the order in which it began, also after an update of this package or of NumPy.
    assert permutation(8, 1, 2).tolist() == [5, 6, 0, 7, 1, 2, 4, 3]
    assert words(0, 1).tolist() == [15204172177749531820]


@given(rows=COUNTS, seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 1000))
def test_a_shuffled_epoch_has_each_row_once(rows: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(rows, seed, epoch).rows) == list(range(rows)) == in_order(rows).rows.tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(shuffled(50, seed, epoch).rows) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(labels=st.lists(st.integers(-3, 3), min_size=1, max_size=80), rows=COUNTS, epoch=st.integers(0, 9))
def test_balanced_classes_come_equally_often_and_their_rows_in_turn(labels: list[int], rows: int, epoch: int) -> None:
    known, classes = np.array(labels), len(set(labels))
    drawn = balanced(known, rows, 5, epoch)
    assert len(drawn.rows) == rows
    for start in range(0, rows - classes + 1, classes):
        assert len(set(known[drawn.rows[start : start + classes]])) == classes
    for label in set(labels):
        times = np.bincount(drawn.rows[known[drawn.rows] == label], minlength=len(known))[known == label]
        assert times.max() - times.min() <= 1
    assert len(set(zip(drawn.rows.tolist(), drawn.repeats.tolist(), strict=True))) == rows


@given(sizes=st.lists(st.integers(0, 12), max_size=20), size=st.integers(1, 15))
def test_rebatching_keeps_the_rows_in_order(sizes: list[int], size: int) -> None:
    rows, count = np.arange(sum(sizes)), 0
    chunks = []
    for each in sizes:
        chunks.append([rows[count : count + each], -rows[count : count + each]])
        count += each
    batches = list(rebatched(iter(chunks), size))
    assert [len(batch[0]) for batch in batches] == [size] * (count // size) + [count % size] * (count % size > 0)
    assert [row for batch in batches for row in batch[0]] == list(rows) == [-row for batch in batches for row in batch[1]]


@given(rows=st.integers(0, 120), chunk=st.integers(1, 17), size=st.integers(1, 40), epoch=st.integers(0, 3))
def test_a_buffer_gives_each_row_once_and_none_too_early(rows: int, chunk: int, size: int, epoch: int) -> None:
    numbers = np.arange(rows)
    chunks = ([numbers[i : i + chunk], numbers[i : i + chunk] * 2.0] for i in range(0, rows, chunk))
    out = list(shuffled_chunks(chunks, size, 7, epoch))
    found = [int(row) for part in out for row in part[0]]
    assert sorted(found) == list(range(rows))
    assert [2.0 * row for row in found] == [value for part in out for value in part[1]]
    assert all(row <= place + size + chunk for place, row in enumerate(found))


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_checksums_are_those_of_tfrecord(records: list[bytes]) -> None:
    assert masked_crc32c(records).tolist() == [_masked(_crc32c(record)) for record in records]


def test_the_checksum_of_the_standard_is_met() -> None:
    assert _crc32c(b"123456789") == 0xE3069283
    assert zlib.crc32(b"123456789") != 0xE3069283


def _crc32c(data: bytes) -> int:
    word = 0xFFFFFFFF
    for byte in data:
        word ^= byte
        for _ in range(8):
            word = (word >> 1) ^ (0x82F63B78 if word & 1 else 0)
    return word ^ 0xFFFFFFFF


def _masked(word: int) -> int:
    return (((word >> 15) | (word << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("targets", "classes"),
    [
        ([0, 2, 1], [0, 2, 1]),
        ([[0], [2]], [0, 2]),
        ([0.0, 1.9, -0.2], [0, 2, 0]),
        ([[0.1, 0.7, 0.2], [1, 0, 0]], [1, 0]),
        ([[[0, 1], [1, 0]]], [[1, 0]]),
        (np.zeros((0, 3)), []),
        ([True, False], [1, 0]),
    ],
)
def test_targets_stand_for_the_classes_that_keras_takes_them_for(targets: Any, classes: Any) -> None:
    found = classes_of(targets)
    assert found.dtype == np.int64
    assert found.tolist() == classes
    weights = Weighting(None, {0: 0.5, 1: 2.0}, 1.0).weights(np.arange(len(found)), targets)
    assert weights.dtype == np.float32
    assert weights.tolist() == np.select([found == 0, found == 1], [0.5, 2.0], 1.0).tolist()


def test_balancing_weights_make_classes_count_the_same() -> None:
    labels = np.array([0, 0, 0, 5, 5, 9])
    weights = by_class(labels, balancing(labels))
    assert weights.dtype == np.float32
    assert np.allclose([weights[labels == label].sum() for label in (0, 5, 9)], 2.0)
