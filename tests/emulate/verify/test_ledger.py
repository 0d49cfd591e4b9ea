"""The data ledger: every row by identity and count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.trace import Trace, row_names
from emulate.verify.ledger import Ledger
from emulate.verify.ledgers import ledgers
from emulate.verify.verdict import Samples
from tests.emulate.verify.cases import Folder


def ledger(reference: list[str], topology: list[list[str]], hosts: list[int] | None = None) -> Ledger:
    """Steps as words: each letter is a row; the topology's step is one word a replica."""
    places = dict(enumerate(hosts or [0] * max(len(step) for step in topology)))
    return Ledger(
        "sgd",
        tuple(tuple(step) for step in reference),
        tuple({r: tuple(rows) for r, rows in enumerate(step)} for step in topology),
        places,
    )


def test_the_same_rows_in_every_step_are_the_same_whatever_their_order_and_place() -> None:
    found = ledger(["abcd", "efgh"], [["db", "ca"], ["ef", "gh"]])
    assert found.is_same
    assert found.samples == Samples(8, 8, 0, 0)
    assert not found.uneven


def test_a_lost_row_is_missing() -> None:
    found = ledger(["abcd", "efgh"], [["ab", "c"], ["ef", "gh"]])
    assert found.first_apart == 0
    assert found.samples == Samples(8, 7, 1, 0)
    assert found.lost == 1
    assert found.uneven == (0,)


def test_rows_that_come_in_more_steps_than_one_device_makes_are_not_lost() -> None:
    found = ledger(["abcd", "efgh"], [["ab", "ef"], ["cd", ""], ["gh", ""]])
    assert (found.lost, found.first_apart) == (0, 0)
    assert ledger(["abcd", "efgh"], [["ab", "ef"], ["cd", ""], ["g", ""]]).lost == 1


def test_the_same_rows_on_every_host_are_repeated() -> None:
    found = ledger(["abcd"], [["ab", "cd", "ab", "cd"]], hosts=[0, 0, 1, 1])
    assert found.samples == Samples(4, 8, 0, 4)
    assert found.repeated_in_step == 4
    assert found.identical_hosts == (0,)
    assert not found.identical_replicas
    assert found.is_prefix


def test_rows_that_the_repeats_displaced_are_told_from_lost_ones() -> None:
    displaced = ledger(["abcd", "efgh"], [["ab", "ab"], ["cd", "cd"]])
    assert displaced.is_prefix
    lost = ledger(["abcd", "efgh"], [["ab", "ab"], ["gh", "gh"]])
    assert not lost.is_prefix


def test_equal_rows_of_the_data_are_no_repeats() -> None:
    found = ledger(["aabc"], [["aa", "bc"]])
    assert found.is_same
    assert found.repeated_in_step == 0
    one_each = ledger(["aabc"], [["ab", "ac"]])
    assert one_each.is_same
    assert one_each.repeated_in_step == 0


def test_the_same_rows_in_other_steps_are_reordered() -> None:
    found = ledger(["abcd", "efgh"], [["ab", "ef"], ["cd", "gh"]])
    assert found.first_apart == 0
    assert found.is_reordered
    assert found.lost == 0


def test_a_batch_that_grows_with_the_replicas_has_the_rows_of_that_many_steps() -> None:
    found = ledger(["ab", "cd", "ef", "gh", "ij"], [["ab", "cd"], ["eg", "fh"]])
    assert found.grows
    assert found.num_steps == 2
    assert found.first_apart is None
    assert found.samples == Samples(8, 8, 0, 0)
    assert not found.is_same


def test_a_batch_that_grows_with_the_hosts_is_told_from_one_that_grows_with_the_replicas() -> None:
    found = ledger(["abcd", "efgh", "ijkl", "mnop"], [["ab", "cd", "ef", "gh"], ["ij", "kl", "mn", "op"]])
    assert found.growth == 2
    assert ledger(["a", "b", "c", "d"], [["a", "b", "c", "d"]]).growth == 4
    assert ledger(["ab", "cd"], [["a", "b"], ["c", "d"]]).growth == 1


def test_the_last_batch_of_an_epoch_has_what_is_left_where_the_batch_grows() -> None:
    epoch = ["ab", "cd", "ef", "gh", "i"]
    found = ledger(2 * epoch, 2 * [["ab", "cd"], ["ef", "gh"], ["i", ""]])
    assert (found.growth, found.num_steps, found.first_apart, found.dropped) == (2, 6, None, 0)
    assert found.samples == Samples(18, 18, 0, 0)
    cut = ledger((2 * epoch)[:7], 2 * [["ab", "cd"], ["ef", "gh"], ["i", ""]])
    assert (cut.growth, cut.num_steps) == (2, 4)


def test_the_end_of_an_epoch_that_does_not_fill_a_batch_that_grows_may_be_dropped() -> None:
    epoch = ["ab", "cd", "ef"]
    found = ledger(2 * epoch, 2 * [["ab", "cd"]])
    assert (found.growth, found.num_steps, found.first_apart, found.dropped) == (2, 2, None, 2)
    assert not ledger(["ab", "cd", "ef", "gh"], [["ab", "cd"], ["gh", "ef"], ["ab", "cd"]]).dropped


def test_a_batch_that_grows_may_have_other_rows_in_later_epochs_and_that_is_known() -> None:
    reference = ["ab", "cd", "ef", "gh", "ij", "kl"]
    found = ledger(reference, [["ab", "cd"], ["ef", "gh"], ["xa", "yc"]])
    assert (found.growth, found.num_steps, found.first_apart, found.others_from) == (2, 2, None, 2)
    assert ledger(reference, [["ab", "cd"], ["ef", "gh"], ["ij", "kl"]]).others_from is None
    assert ledger(reference[:5], [["ab", "cd"], ["ef", "gh"], ["ij", "kl"]]).others_from is None
    assert ledger(reference, [["ab", "cd"], ["ef", "gh"], ["xa", "xa"]]).growth == 1  # the same rows on both


def test_a_batch_does_not_grow_whose_later_rows_are_others() -> None:
    assert ledger(["ab", "cd", "ef", "gh"], [["ab", "cd"], ["ef", "gx"]]).growth == 1
    assert ledger(["ab", "cd", "ef", "gh"], [["ab", "cd"], ["ab", "cd"]]).growth == 1


def test_rows_changed_in_their_own_steps_are_told_from_rows_in_others() -> None:
    changed = ledger(["ab", "cd"], [["a", "X"], ["Y", "d"]])
    assert changed.is_changed_in_place
    assert not ledger(["ab", "cd"], [["a", "c"], ["Y", "d"]]).is_changed_in_place
    assert not ledger(["ab", "cd"], [["a", "b"], ["c", "d"]]).is_changed_in_place


def test_a_replica_without_rows_is_found() -> None:
    found = ledger(["abc"], [["ab", "c", ""]])
    assert found.is_same
    assert found.counts(0) == {0: 2, 1: 1, 2: 0}


rows = st.text("abcdef", max_size=8)


@given(st.lists(rows, min_size=1, max_size=4), st.lists(st.lists(rows, min_size=3, max_size=3), min_size=1, max_size=4))
def test_the_four_numbers_add_up(reference: list[str], topology: list[list[str]]) -> None:
    found = ledger(reference, topology)
    numbers = found.samples
    assert numbers.seen == numbers.reference - numbers.missing + numbers.repeated + found.foreign
    assert min(numbers.missing, numbers.repeated, found.foreign) >= 0


@given(st.lists(rows, min_size=1, max_size=4), st.randoms())
def test_any_way_to_deal_the_rows_out_is_the_same(reference: list[str], random: object) -> None:
    topology = []
    for step in reference:
        places: list[str] = ["", "", ""]
        for row in step:
            places[random.randrange(3)] += row  # type: ignore[attr-defined]
        topology.append(places)
    assert ledger(reference, topology).first_apart is None


def test_a_run_that_ends_before_the_reference_lost_the_rows_of_the_rest() -> None:
    found = replace(ledger(["ab", "cd", "ef"], [["a", "b"], ["c", "d"]]), ended=True)
    assert found.first_apart == 2
    assert found.sizes(2) == (0, 2)
    assert found.samples == Samples(6, 4, 2, 0)
    assert not found.is_same


def test_rows_of_an_epoch_that_the_last_step_cuts_are_not_seen_too_often() -> None:
    assert ledger(["abcd", "efab"], [["ab", "ef"], ["cd", "ef"]]).is_cut_within_an_epoch
    assert not ledger(["abcd", "efgh"], [["ab", "ef"], ["cd", "ef"]]).is_cut_within_an_epoch
    assert not ledger(["abcd", "efab"], [["ab", "ab"], ["ab", "cd"]]).is_cut_within_an_epoch


def computed(
    folder: Folder, replicas: int, *, off: float = 0.0, later: float = 0.0, labels: bool = False, weight: float = 1.0
) -> Trace:
    """Two steps with an input of data (or labels) and one that the model computes: `off` in the first step, `later` then."""
    made = folder.made(f"1x{replicas}")
    for k in range(2):
        data = np.arange(16, dtype="f4").reshape(8, 2) + 100 * k
        values = np.linspace(1, 2, 8, dtype="f4") * np.float32(1 + (off, later)[k])
        data = data[:, :1] % 2 if labels else data
        each = -(-8 // replicas)  # of 5 replicas the last has no rows
        for r in range(replicas):
            part = slice(each * r, each * (r + 1))
            inputs = [data[part], values[part]]
            rows = row_names([{"dense": array} for array in inputs])
            one = np.ones(2, "f4")
            made.step(k, {"w": one}, {"w": np.float32(weight) * one}, replica=r, rows=rows, inputs=inputs)
    return made.trace()


def test_rows_with_an_input_that_the_model_computes_are_told_apart_by_the_others(folder: Folder) -> None:
    one = computed(folder, 1)
    found = ledgers(one, computed(folder, 2, off=1e-6, later=0.5, weight=1.1))["sgd"]
    assert found.is_same
    assert found.by == (0,)
    assert ledgers(one, computed(folder, 5, off=1e-6))["sgd"].by == (0,)
    assert ledgers(one, computed(folder, 2))["sgd"].by == ()


@pytest.mark.parametrize("weight", [1.0, 1.0 + 1e-6])
def test_what_differs_while_the_weights_are_the_same_is_not_computed_by_the_model(folder: Folder, weight: float) -> None:
    found = ledgers(computed(folder, 1), computed(folder, 2, later=0.5, weight=weight))["sgd"]
    assert found.first_apart == 1
    assert found.by == ()


def test_rows_with_other_contents_are_other_rows_though_a_part_of_them_agrees(folder: Folder) -> None:
    assert ledgers(computed(folder, 1), computed(folder, 2, off=0.1))["sgd"].first_apart == 0
    labels = computed(folder, 1, labels=True)
    assert ledgers(labels, computed(folder, 2, off=1e-3, labels=True))["sgd"].first_apart == 0
    assert ledgers(labels, computed(folder, 2, later=1e-3, labels=True, weight=1.1))["sgd"].first_apart == 1


def test_rows_of_equal_labels_that_differ_by_rounding_in_every_step_are_the_same(folder: Folder) -> None:
    """What a model gives that was trained before: the predictions of a teacher, the logits that a temperature is fit to."""
    found = ledgers(computed(folder, 1, labels=True), computed(folder, 2, off=1e-6, later=-1e-6, labels=True, weight=1.1))[
        "sgd"
    ]
    assert found.is_same
    assert found.by == (0,)


@pytest.mark.parametrize("classes", [8, 4, 3])
def test_an_input_that_is_as_long_as_a_batch_in_one_run_alone_has_no_rows(folder: Folder, classes: int) -> None:
    """A weight for each class, with as many classes as a batch or a share of it has examples, or with others."""

    def trace(replicas: int) -> Trace:
        made, each = folder.made(f"1x{replicas}"), 8 // replicas
        for k in range(2):
            data, weights = np.arange(16, dtype="f4").reshape(8, 2) + 100 * k, np.linspace(1, 2, classes, dtype="f4")
            for r in range(replicas):
                inputs = [data[each * r : each * (r + 1)], weights]
                places = [place for place, array in enumerate(inputs) if len(array) == each]
                rows = row_names([{"dense": inputs[place]} for place in places])
                one = {"w": np.ones(2, "f4")}
                made.step(k, one, one, replica=r, rows=rows, inputs=inputs, row_inputs=places)
        return made.trace()

    found = ledgers(trace(1), trace(2))["sgd"]
    assert found.is_same
    assert found.by == ((0,) if classes in (8, 4) else ())


def test_steps_that_have_the_rows_of_one_step_together_are_that_many_times_as_small() -> None:
    small = [["ab", "cd"], ["ef", "gh"], ["ij", "kl"], ["mn", "op"]]
    assert ledger(["abcdefgh", "ijklmnop"], small).times_as_small == 2
    assert ledger(["abcdefgh", "ijkl"], [*small[:3], ["mn", ""]]).times_as_small == 2  # an epoch's last batch says nothing
    assert ledger(["abcdefghijklmnop"], small).times_as_small == 4
    assert ledger(["abcdefgh"], small[:1]).times_as_small == 1  # a part of a step says nothing


def test_steps_that_lack_rows_are_not_small() -> None:
    assert ledger(["abcdefgh", "ijklmnop"], [["ab", "cd"], ["ij", "kl"]]).times_as_small == 1
    assert ledger(["abcdefgh"], [["ab", "c"], ["ef", "g"]]).times_as_small == 1
    assert ledger(["abcd", "efgh"], [["ab", "cd"], ["ef", "gh"]]).times_as_small == 1
