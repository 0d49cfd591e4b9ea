"""`--allow` covers what it names: an allowed cause hides neither examples that are lost nor those that come too often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, loop
from tests.emulate.verify.made_traces import Made


def run(folder: Folder, steps: Sequence[Sequence[str]], *, ended: bool = True) -> Trace:
    """A run whose steps have these examples, a letter each: a word for each replica."""
    replicas = len(steps[0])

    def step(made: Made, k: int) -> None:
        for r, mine in enumerate(steps[k]):
            weights = {"w": np.full(8, float(k))}
            made.step(k, {"w": np.full(8, 1 / replicas)}, weights, replica=r, rows=list(mine), objective=1.0)

    made = folder.made(f"1x{replicas}")
    if ended:
        made.event({"event": "end", "reason": "returned"})
    return loop(made, step, steps=len(steps))


def judged(
    folder: Folder, reference: str, topology: str, *allow: str, ended: bool = True, whole: bool | None = None
) -> Judgement:
    """Judge a run on two replicas: steps are separated by a blank, replicas by a slash."""
    theirs = run(folder, [[step] for step in reference.split()], ended=ended if whole is None else whole)
    return judge(case_of(theirs, run(folder, [step.split("/") for step in topology.split()], ended=ended)), allow)


def causes(judgement: Judgement) -> list[str]:
    return [cause.code for cause in judgement.causes if not cause.allowed]


def test_equal_examples_of_which_some_are_lost_are_missing_not_reordered(folder: Folder) -> None:
    found = judged(folder, "abcd efgh abcd efgh", "ab/ef cd/gh ab/ef", "samples-reordered")
    assert (found.verdict, causes(found)) == ("divergent", ["samples-missing"])
    assert found.causes[0].summary == "Examples are lost: 4 fewer than on one device."


def test_equal_examples_that_are_only_in_another_order_are_reordered(folder: Folder) -> None:
    found = judged(folder, "abcd efgh abcd efgh", "ab/ef cd/gh ab/ef cd/gh", "samples-reordered")
    assert causes(found) == []
    assert not any(text.startswith("data") for text in found.not_compared)


def test_steps_after_the_end_of_one_device_are_examples_too_many(folder: Folder) -> None:
    found = judged(folder, "abcd efgh", "ab/cd ef/gh ab/cd")
    assert (found.verdict, causes(found)) == ("divergent", ["samples-repeated"])
    assert (found.samples.seen, found.samples.repeated) == (12, 4)
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.value, found.first_divergence.reference_value) == (2, 4, 0)


def test_steps_that_one_device_would_have_made_too_are_not_too_many(folder: Folder) -> None:
    assert causes(judged(folder, "abcd efgh", "ab/cd ef/gh ab/cd", whole=False)) == []


def test_a_step_without_examples_after_the_end_is_none_too_many(folder: Folder) -> None:
    assert causes(judged(folder, "abcd efgh", "ab/cd ef/gh /")) == []


@pytest.mark.parametrize(
    ("topology", "code"),
    [("a/b c/d e/f", "samples-missing"), ("a/b c/d e/f g/h a/b", "samples-repeated"), ("a/b c/d e/f g/h", None)],
    ids=["lost", "too many", "neither"],
)
def test_an_allowed_batch_size_hides_neither(folder: Folder, topology: str, code: str | None) -> None:
    found = judged(folder, "abcd efgh", topology, "batch-size")
    assert found.causes[0].code == "batch-size"
    assert causes(found) == ([code] if code else [])
    assert [cause.code for cause in judged(folder, "abcd efgh", topology).causes] == ["batch-size"]


def test_allowed_repeats_hide_no_examples_whose_place_they_took(folder: Folder) -> None:
    found = judged(folder, "abcd efgh", "ab/ab cd/cd", "samples-repeated")
    assert (found.verdict, causes(found)) == ("divergent", ["samples-missing"])
    assert [cause.code for cause in judged(folder, "abcd efgh", "ab/ab cd/cd").causes] == ["samples-repeated"]


def test_allowed_losses_hide_no_repeats(folder: Folder) -> None:
    found = judged(folder, "abcd efgh", "ab/cd eb/fc", "samples-missing")
    assert (found.verdict, causes(found)) == ("divergent", ["samples-repeated"])
    assert [cause.code for cause in judged(folder, "abcd efgh", "ab/cd eb/fc").causes] == ["samples-missing"]


def test_a_run_that_is_stopped_says_that_the_rest_was_not_seen(folder: Folder) -> None:
    found = judged(folder, "abcd efgh", "ab/ef cd/gh", "samples-reordered", ended=False)
    assert causes(found) == []
    assert [text for text in found.not_compared if text.startswith("data from step 2 on:")]
    right = judged(folder, "abcd efgh", "ab/cd ef/gh", "samples-reordered", ended=False)
    assert (right.verdict, right.not_compared) == ("equivalent", ())


def test_that_one_run_went_further_is_said_only_where_no_cause_says_it(folder: Folder) -> None:
    text = "step 2 of sgd (only one run went so far)"
    assert text not in judged(folder, "abcd efgh", "ab/cd ef/gh ab/cd").not_compared
    assert text in judged(folder, "abcd efgh", "ab/cd ef/gh ab/cd", whole=False).not_compared
    assert text in judged(folder, "abcd efgh", "ab/cd ef/gh ab/cd", "samples-repeated").not_compared
