"""The documentation's table of features: complete, as measured, and still so where it is measured again here."""

from __future__ import annotations

import pytest

from benchmarks.features import table
from benchmarks.features.feature import FEATURES
from benchmarks.features.judge import CENTRAL, COLUMNS, cells
from emulate.cluster import Preload

MEASURED_AGAIN = ("empty-convolution", "sharded-fit", "accumulation", "train-step")


def test_the_documentation_shows_the_table_that_was_measured() -> None:
    text = table.PAGE.read_text()
    assert table.in_page(text, table.read()) == text


def test_every_feature_was_judged_in_every_column_and_is_equivalent() -> None:
    wrong = {
        (name, column): table.read().get(name, {}).get("ours", {}).get(column)
        for name in FEATURES
        for column in COLUMNS
        if not table.is_right(table.read().get(name, {}).get("ours", {}).get(column) or {"verdict": "not judged"})
    }
    assert wrong == {}


def test_a_feature_is_equivalent_as_the_table_says(preload: Preload) -> None:
    found = cells("train-step", "ours", preload, columns=("1x3",))
    assert {column: table.is_right(cell) for column, cell in found.items()} == {"1x3": True}


@pytest.mark.slow  # longer forms of test_a_feature_is_equivalent_as_the_table_says
@pytest.mark.parametrize("name", MEASURED_AGAIN)
def test_a_feature_is_equivalent_on_replicas_that_share_unevenly_and_on_several_hosts(name: str, preload: Preload) -> None:
    columns = ("1x3", "2x2", CENTRAL)
    found = cells(name, "ours", preload, columns=columns)
    assert found.keys() == set(columns)
    assert {column: cell for column, cell in found.items() if not table.is_right(cell)} == {}


@pytest.mark.slow  # test_scorecard.py has programs of plain Keras that are wrong
def test_plain_keras_is_still_wrong_where_the_table_says_so(preload: Preload) -> None:
    found = cells("clip-global-norm", "keras", preload, columns=("1x3", "2x2"))
    assert (found["1x3"]["verdict"], found["2x2"]["raised"]) == ("divergent", "ValueError")
