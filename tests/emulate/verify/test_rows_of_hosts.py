"""Rows that each host makes with numbers, or a vocabulary, of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, codes
from tests.emulate.verify.test_host_seeds import disturbed, fixed, trained

TABLE = "train.py:7|table|string to int64"
MEAN = "train.py:7|float32|number"
Rows = Callable[[int], Sequence[str]]


def numbered(host: int) -> Sequence[str]:
    """Rows as one device has them on host 0, and of which host 1 calls most by other rows' names, one of them twice."""
    rows = list(fixed(host))
    return rows if host == 0 else [*rows[1:], rows[1]]


def judged(folder: Folder, rows: Rows, *mapped: Mapping[str, Sequence[str]]) -> Judgement:
    def told(host: int) -> list[dict[str, Any]]:
        return [{"event": "program", "mapped": mapped[host]}]

    return judge(case_of(trained(folder, None), trained(folder, rows, told=told)))


@pytest.mark.parametrize("rows", [disturbed, numbered], ids=["rows of their own", "names of other rows"])
def test_a_vocabulary_that_each_host_has_learnt_by_itself_is_told_with_what_each_has(folder: Folder, rows: Rows) -> None:
    found = judged(folder, rows, {TABLE: ["a for 1 (9 entries, ab)"]}, {TABLE: ["b for 1 (9 entries, cd)"]})
    assert (found.verdict, codes(found)) == ("divergent", ["host-values"])
    assert found.causes[0].summary == "Each host makes its examples with its own tables (train.py:7)."
    assert found.causes[0].evidence.startswith(
        "A function of the pipeline uses at train.py:7: a for 1 (9 entries, ab) on host 0, b for 1 (9 entries, cd) on host 1; "
    )
    assert "lookup.adapt(all_examples)" in found.causes[0].fix


def test_numbers_that_hosts_make_all_their_rows_with_are_told(folder: Folder) -> None:
    found = judged(folder, disturbed, {MEAN: ["0.5"]}, {MEAN: ["0.6"]})
    assert codes(found) == ["host-values"]
    assert "0.5 on host 0, 0.6 on host 1; from step 0 on the examples differ" in found.causes[0].evidence


def test_numbers_of_a_host_say_nothing_of_rows_that_one_device_has_too(folder: Folder) -> None:
    assert codes(judged(folder, numbered, {MEAN: ["0.5"]}, {MEAN: ["0.6"]})) == ["samples-reordered"]


def test_a_vocabulary_that_all_hosts_have_says_nothing(folder: Folder) -> None:
    same = {TABLE: ["a for 1 (9 entries, ab)"]}
    assert codes(judged(folder, disturbed, same, same)) == ["unexplained"]
    assert codes(judged(folder, fixed, {TABLE: ["a for 1"]}, {TABLE: ["b for 1"]})) == []
