"""Two numbers that differ are told apart in print, however little they differ."""

from __future__ import annotations

import math

import pytest

from emulate.report.runs import _first
from emulate.told import told_apart
from emulate.topology import Topology
from emulate.verify.causes.cause import as_factor
from emulate.verify.verdict import Difference, Run


@pytest.mark.parametrize(
    ("value", "other", "texts"),
    [
        (2.0, 0.5, ("2", "0.5")),
        (1.7997701, 1.7997702, ("1.7997701", "1.7997702")),
        (1.0, 1.0 + 2**-52, ("1", "1.0000000000000002")),
        (0.25, 0.25, ("0.25", "0.25")),
        (None, 0.25, ("?", "0.25")),
        (math.nan, 0.25, ("nan", "0.25")),
    ],
)
def test_as_many_digits_are_printed_as_it_takes(value: float, other: float, texts: tuple[str, str]) -> None:
    assert told_apart(value, other) == texts


def test_a_factor_that_four_decimals_do_not_tell_from_1_is_printed_by_its_distance() -> None:
    assert [as_factor(factor) for factor in (4.0, 0.25, 1.0002)] == ["4.0000", "0.2500", "1.0002"]
    assert [as_factor(1 + 2.5e-8), as_factor(1 - 3e-6)] == ["1 + 2.5e-08", "1 - 3e-06"]


def test_the_first_difference_of_a_report_shows_two_different_numbers() -> None:
    first = Difference("loss", "loss", 0, 2.5e-8, 1e-15, value=1.63281, reference_value=1.63281 + 2.5e-8)
    text = _first(Run(Topology.parse("1x2"), "divergent", first_divergence=first))
    assert "1.63281 where the reference has 1.63281003 (" in text
