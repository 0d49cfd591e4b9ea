"""Rows that Python code gives: none is taken that is not trained on, and hosts that read other ones are told so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.conftest import OnHosts
from tests.core.keras_model import of_hosts

UNLIKE = (
    "UsageError: All hosts must read the same examples in the same order. Received: batch={}, hosts={}. Give shuffles and "
    "random draws a seed that is the same on all hosts: np.random.default_rng(SEED)."
)


@pytest.mark.parametrize("topology", ["1x1", "1x2", "2x1"])
def test_a_generator_gives_each_epoch_the_batches_that_follow_whatever_the_time(on_hosts: OnHosts, topology: str) -> None:
    for seen in on_hosts(topology, of_hosts.one_generator_in_many_fits):
        assert seen == {
            "generator": [(2.0, 3), (5.0, 6), (8.0, 9)],
            # Keras looks at the first two batches of a generator, and trains on them in that fit only.
            "one step": [1.0, 10.0],
            # In each epoch it begins with these two again.
            "validation": ([pytest.approx((1 + 2 + next_one) / 3) for next_one in (3, 4, 5)], 5),
            "sequence": [pytest.approx((3 + 4 + 5) / 3), 5],
        }


@pytest.fixture
def refused(on_hosts: OnHosts) -> dict[str, str]:
    one, other = on_hosts("2x1", of_hosts.refused)
    broken = "a stream that breaks on one host"
    assert {name: text for name, text in one.items() if name != broken} == {
        name: text for name, text in other.items() if name != broken
    }
    assert other[broken] == "OSError: the disk is gone"
    return dict(one)


def test_hosts_that_read_other_rows_are_all_told_which_batch_differs_and_what_to_do(refused: dict[str, str]) -> None:
    assert refused.pop("alike") == f"went on: [[{sum(range(20)) / 20}], 3]"
    assert refused.pop("a stream that breaks on one host") == (
        "HostFailed: Every host must make each global batch. Received: batch=1, failed hosts={1: 'OSError: the disk is gone'}. "
        "See the error there."
    )
    rows = ["8 rows ..."] * 2
    last = {"a sequence, from its second epoch on": 0, "a generator that ends": 3, "a stream of some rows": 3}
    held = {"a generator that ends": ["8 rows ...", "no more rows"], "a stream of some rows": ["no more rows", "8 rows ..."]}
    assert refused == {name: UNLIKE.format(last.get(name, 0), held.get(name, rows)) for name in refused}
    assert len(refused) == 8


def test_devices_of_one_host_compare_nothing(on_hosts: OnHosts) -> None:
    assert on_hosts("1x2", of_hosts.compares_nothing) == [[[1.5], 2]]


def test_a_host_whose_batch_failed_goes_on_from_a_position_that_all_hosts_have(on_hosts: OnHosts) -> None:
    one, other = on_hosts("2x1", of_hosts.goes_on_after_an_error)
    refusal: Any = (
        "All hosts must continue from one position: after an error on one host, the others may have had the missing batch. "
        "Received: epoch=0, batch=0. Restore a saved position on all hosts, or make the pipeline again."
    )
    assert one == [4, 4, 4]
    assert other == ["InvalidArgumentError", refusal, "InvalidArgumentError"]
