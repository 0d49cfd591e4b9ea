"""What everyday programs do in their steps is not taken for an error: draws for a batch, captured tensors, parts of a sum."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.verify import Run

CASES = Path(__file__).parents[2] / "fixtures" / "everyday_cases"


def _judged(name: str, preload: Preload) -> Run:
    (run,) = emulate.verify(CASES / f"{name}.py", "1x4", preload=preload).runs
    return run


def _lines(name: str, *texts: str) -> list[str]:
    lines = (CASES / f"{name}.py").read_text().splitlines()
    return [f"{name}.py:{next(number for number, line in enumerate(lines, 1) if text in line)}" for text in texts]


@pytest.mark.parametrize(
    ("name", "apart", "alike"),
    [
        ("draws_of_a_batch", ["tf.random.uniform", "tf.random.normal", "tf.random.shuffle"], ["sampled_softmax_loss"]),
        ("python_draws", ["random.shuffle", "np.random.uniform"], []),
    ],
)
def test_a_draw_for_a_whole_batch_is_named_where_replicas_draw_apart(
    name: str, apart: list[str], alike: list[str], preload: Preload
) -> None:
    run = _judged(name, preload)
    assert (run.verdict, run.causes) == ("equivalent", ())
    (note,) = [note for note in run.notes if "its own random draw" in note]
    assert all(line in note for line in _lines(name, *apart))
    assert not any(line in note for line in _lines(name, *alike))


def test_a_step_takes_captured_tensors_nested_arguments_and_none_as_without_gpudist(preload: Preload) -> None:
    run = _judged("unusual_arguments", preload)
    assert (run.verdict, run.causes) == ("equivalent", ())
    assert not any("may be missing" in note or "started the program again" in note for note in run.notes)


def test_parts_that_replicas_keep_are_compared_by_their_sum(preload: Preload) -> None:
    run = _judged("sums_of_replicas", preload)
    assert (run.verdict, run.causes) == ("equivalent", ())


def test_synchronized_statistics_that_cancel_are_a_limit_of_keras_and_nothing_else(preload: Preload) -> None:
    run = _judged("synchronized_large_mean", preload)
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["framework-limit"])
    (cause,) = run.causes
    assert "E(x^2) - E(x)^2" in cause.summary
    assert "everything agrees" in cause.evidence
    assert "gd.distributed(model)" in cause.fix
    assert [location.line for location in cause.locations] == [12]


def test_a_step_is_judged_from_the_counts_that_it_read(preload: Preload) -> None:
    run = _judged("counted_by_a_callback", preload)
    assert (run.verdict, run.causes) == ("equivalent", ())


def test_the_step_that_ends_with_the_data_is_no_error_but_for_replicas_that_count_it_too_late(preload: Preload) -> None:
    """Whether they do is a matter of the moment: about one epoch in twenty of plain Keras, more on a busy machine."""
    run = _judged("unknown_length", preload)
    if run.causes:
        assert [cause.code for cause in run.causes] == ["replicas-disagree"]
        assert "Keras itself may cause this" in run.causes[0].fix
    else:
        assert run.verdict == "equivalent"


def test_what_rounding_makes_of_an_evaluation_is_measured_before_it_is_a_cause(preload: Preload) -> None:
    run = _judged("bias_before_normalization", preload)
    assert (run.verdict, run.causes) == ("equivalent", ())


@pytest.mark.slow
def test_it_is_measured_so_where_normalization_differs_by_design(preload: Preload) -> None:
    run = _judged("local_bias_before_normalization", preload)
    deciding = [cause.code for cause in run.causes if not cause.advice]
    assert (run.verdict, deciding) == ("by-design", ["batchnorm-local-statistics"])
