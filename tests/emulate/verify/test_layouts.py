"""Which entries of a tensor a share has follows from those of what it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emulate.evaluate.mixing import Entries, Layout, _derived, _in_turn, _stacked
from emulate.trace import entries_of_examples

SIZES = st.lists(st.integers(0, 4), min_size=2, max_size=3)


def arranged(entries: Entries, parts: Sequence[str]) -> list[str]:
    """Return the whole whose shares have these parts, a letter for each entry."""
    return list(Layout(0, entries).together([np.array(list(part)) for part in parts]))


@given(st.lists(SIZES.filter(any), min_size=1, max_size=3).filter(lambda all_sizes: len({*map(len, all_sizes)}) == 1))
def test_a_whole_is_put_together_from_the_parts_that_it_was_divided_into(all_sizes: list[list[int]]) -> None:
    layout = Layout(0, _stacked([_in_turn(sizes) for sizes in all_sizes]))
    whole = np.arange(sum(map(sum, all_sizes)))
    parts = [layout.part(whole, share) for share in range(len(all_sizes[0]))]
    assert np.array_equal(layout.together(parts), whole)
    ends = [list(itertools.accumulate(sizes, initial=0)) for sizes in all_sizes]
    assert [len(part) for part in parts] == [sum(end[s + 1] - end[s] for end in ends) for s in range(len(parts))]


def test_inputs_in_one_pass_their_results_and_repeats_lie_where_their_operation_puts_them() -> None:
    first, second = _in_turn([1, 2]), _in_turn([2, 1])
    both = next(_derived([first, second], 6))
    assert arranged(both, ["acd", "bbx"]) == list("abbcdx")
    assert {first, second} <= {*_derived([both], 3)}  # the results of each input
    tiled, repeated = _derived([first], 6)
    assert arranged(tiled, ["aa", "bcbc"]) == list("abcabc")
    assert arranged(repeated, ["aa", "bbcc"]) == list("aabbcc")


def test_what_has_no_entries_is_made_of_no_part_and_repeated_never() -> None:
    assert {*_derived([_in_turn([2, 1])], 0)} <= {((), ())}
    assert [*_derived([_in_turn([0, 0])], 3)] == []


def test_an_input_with_several_entries_for_each_example_is_told_from_a_table() -> None:
    def found(*shares: dict[str, np.ndarray]) -> dict[str, int]:
        counts = [len(share["x"]) for share in shares]
        return entries_of_examples(
            shares, counts, lambda key: all(np.array_equal(shares[0][key], share[key]) for share in shares)
        )

    table, number = np.arange(4), np.array(3)
    one = {"x": np.array([1, 2]), "more": np.array([1, 2, 3, 4]), "table": table, "number": number}
    other = {"x": np.array([3]), "more": np.array([5, 6]), "table": table, "number": number}
    assert found(one, other) == {"x": 1, "more": 2}
    assert found(one, one | {"more": np.arange(4)}) == {"x": 1, "more": 2}
