"""What one process sees of a pipeline: prefetching, threads, errors, positions, what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from emulate.cluster import Cluster, Preload
from tests.core.pipelines import single_host


@pytest.fixture(scope="module")
def host(preload: Preload, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What all the functions of `single_host` returned, in one process with two devices."""
    cloudpickle.register_pickle_by_value(single_host)
    with Cluster("1x2", preload=preload, timeout=120) as cluster:
        yield cluster.run(single_host.everything, tmp_path_factory.mktemp("files"))[0]
    cloudpickle.unregister_pickle_by_value(single_host)


def test_the_next_batches_are_on_each_device_before_they_are_asked_for(host: dict[str, Any]) -> None:
    assert host["prefetched"] == [["GPU:0", "GPU:1"]] * 2 or host["prefetched"] == [["CPU:0", "CPU:1"]] * 2


@pytest.mark.parametrize(
    "how", ["left", "error in a map", "error in a generator", "error in the loop", "interrupt", "to the end"]
)
def test_no_thread_is_left(how: str, host: dict[str, Any]) -> None:
    assert host["threads"][how] == []


@pytest.mark.parametrize(("where", "texts"), list(single_host.TRACEBACKS.items()), ids=list(single_host.TRACEBACKS))
def test_an_error_in_the_users_code_shows_where(where: str, texts: list[str], host: dict[str, Any]) -> None:
    for text in texts:
        assert text in host["tracebacks"][where]


def test_an_interrupt_reaches_a_loop_that_waits(host: dict[str, Any]) -> None:
    assert host["interrupted"] == "KeyboardInterrupt"


def test_an_epoch_that_failed_goes_on_where_it_failed(host: dict[str, Any]) -> None:
    assert host["after a failure"] == [[0, 1], [2, 3], [4, 5]]


def test_an_iteration_that_was_left_goes_on_where_it_was_left(host: dict[str, Any]) -> None:
    assert host["left"] == {"first": [0, 1], "rest": [[2, 3], [4]], "next": [[0, 1], [2, 3], [4]], "epochs": [0, 0, 1, 2]}


def test_an_iteration_left_at_the_very_end_goes_on_with_the_next_epoch(host: dict[str, Any]) -> None:
    assert host["left at the end"] == {"arrays": [5, 5, 2], "stream": [5, 5, 2]}


def test_an_evaluation_does_not_move_the_position(host: dict[str, Any]) -> None:
    assert host["evaluation"] == {"rows": [[4], [2]], "position": (0, 1)}


def test_a_cache_runs_a_map_once_for_each_row(host: dict[str, Any]) -> None:
    # The first row is made once more, as Python has a part in it.
    assert host["calls"] == {"cached": 6, "not cached": 11, "generator": 1}


def test_only_the_rows_of_a_memory_map_that_are_needed_are_read(host: dict[str, Any]) -> None:
    # 200 MB lie in the file; the system maps some pages around each row that is read.
    assert host["bytes of a memory map"] < 100_000_000


def test_a_length_is_that_of_an_epoch(host: dict[str, Any]) -> None:
    assert host["lengths"] == {"kept": 3, "dropped": 2, "counted generator": 3, "dataset": 3, "list": 3}


def test_what_a_batch_is_made_of_is_known_before(host: dict[str, Any]) -> None:
    assert host["element_spec"] == [((None, 2), "float32"), ((None,), "int64"), ((None,), "float32")]


def test_a_thread_that_draws_while_a_map_is_traced_is_not_taken_for_the_map(host: dict[str, Any]) -> None:
    assert [value for batch in host["beside a thread that draws"] for value in batch] == [2.0 * i for i in range(10)]


def test_a_generator_may_yield_one_array_with_other_numbers_each_time(host: dict[str, Any]) -> None:
    assert host["an array used again"] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("case", "message"), list(single_host.MESSAGES.items()), ids=list(single_host.MESSAGES))
def test_what_cannot_be_meant_is_refused(case: str, message: str, host: dict[str, Any]) -> None:
    found = host["messages"][case]
    assert re.fullmatch(message, found, re.DOTALL), found


def test_every_refusal_has_a_test(host: dict[str, Any]) -> None:
    assert host["messages"].keys() == single_host.MESSAGES.keys()


def test_upstream_still_tells_shuffles_that_vary(host: dict[str, Any]) -> None:
    assert host["shuffles"] == [["unseeded"], ["reshuffled"], [], ["unseeded", "reshuffled"]]
