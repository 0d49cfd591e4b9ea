"""Hosts that were given other data than each other are told so, all of them; those with the same go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.core.conftest import OnHosts
from tests.core.pipelines import of_hosts

RULE = "All hosts must be given the same data, in the same order: each takes the examples of its replicas. Received: "
ADVICE = (
    ". Pass all of the data on each host: gpudist_core splits it. Code that draws, splits or shuffles it before needs a seed "
    "that is the same on all hosts."
)


def test_hosts_with_a_part_of_the_data_or_other_data_are_all_told_before_the_first_batch(
    on_hosts: OnHosts, tmp_path: Path
) -> None:
    one, other = on_hosts("2x1", of_hosts.refused, str(tmp_path))
    assert one == other
    went_on = {name: text for name, text in one.items() if text.startswith("went on")}
    assert went_on == {
        "the same": "went on: 6",
        "the same, up to rounding": "went on: 6",
        "the same records elsewhere": "went on: 1",
        "the same files elsewhere": "went on: 6",
        "folders": "went on: 1",
    }
    for name, text in one.items():
        assert name in went_on or (text.startswith(RULE) and text.endswith(ADVICE)), (name, text)
    assert "rows=[24, 23]" in one["fewer rows"]
    assert "Received: seed=[0, 1]. " in one["another seed"]
    assert re.search(r"data=\[\"2 files from '0.npy' on: \w+\", \"2 files from '1.npy' on: \w+\"\]", one["a part of the files"])


@pytest.mark.parametrize(("topology", "asked"), [("2x1", 1), ("1x2", 0)])
def test_hosts_compare_their_data_once_for_a_pipeline_and_one_host_never(on_hosts: OnHosts, topology: str, asked: int) -> None:
    for found in on_hosts(topology, of_hosts.asks_once):
        assert found == [6, 6, 6, 6, asked, 6, 6, 6, 6, 2 * asked]


def test_fit_refuses_a_part_of_the_arrays_on_each_host_and_takes_all_of_them(on_hosts: OnHosts) -> None:
    for rows, text in on_hosts("2x1", of_hosts.goes_on_in_fit):
        assert rows == 24
        assert text.startswith(RULE)
