"""Gradients that one device has too, when it is given the rows of one replica after the other."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, Rerun, case_of, codes, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Array

ROWS = [f"row-{k}" for k in range(64)]
WHOLE = np.random.default_rng(1).normal(size=(3, 32)).astype("f4")
"""What the whole batch gives, step by step."""
PARTS = np.random.default_rng(2).normal(size=(3, 4, 32)).astype("f4")
"""What each replica's rows give alone: no weighted sum of them is the whole."""


def trained(
    folder: Folder,
    locals_: Array,
    objective: float = 1.0,
    reported: float | None = None,
    *,
    repeats: bool = False,
    joins: bool = False,
    clips: bool = False,
    draws: bool = False,
) -> Trace:
    """A run with these local gradients: step, replica, element; several updates in a call or one."""

    def step(made: Made, k: int) -> None:
        replicas = locals_.shape[1]
        after = np.ones(32, "f4") - np.float32(0.1) * locals_[: k + 1].sum(axis=(0, 1), dtype="f4")
        for r in range(replicas):
            rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
            made.step(k, {"w": locals_[k, r]}, {"w": after}, replica=r, rows=rows, objective=objective / replicas)
        if reported is not None:
            made.report("loss", "train/reduce", k, reported)

    made = folder.made(f"1x{locals_.shape[1]}")
    clipped_by = ["clip_by_global_norm"] if clips else []
    made.event({"event": "program", "repeated": ["sgd"] * repeats, "joins_gradients": joins, "clipped_by": clipped_by})
    if draws:
        line = {"file": "train.py", "line": 9, "text": "gradient += noise", "roles": {"draw": 1}, "operations": {"Add": 1}}
        made.event({"event": "lines", "function": "step", "stages": {"given": [line]}})
    return loop(made, step, weights=32)


def judged(
    folder: Folder,
    switch: str,
    one_after_the_other: Array,
    objective: float = 1.3,
    *,
    regrouped: Array | None = None,
    backwards: Array | None = None,
    draws: bool = False,
) -> Judgement:
    topology = trained(folder, PARTS, objective, draws=draws)
    ways = {f"{switch}-regrouped": regrouped, f"{switch}-backwards": backwards}
    given = {switch: one_after_the_other} | {name: way for name, way in ways.items() if way is not None}

    def rerun(asked: str) -> Rerun | None:
        return Rerun(trained(folder, given[asked], objective), topology) if asked in given else None

    return judge(case_of(trained(folder, WHOLE[:, None]), topology, rerun=rerun))


def test_another_loss_that_the_replicas_rows_alone_explain_couples_the_rows(folder: Folder) -> None:
    found = judged(folder, "replicas-summed", PARTS.sum(axis=1, keepdims=True))
    assert (found.verdict, codes(found)) == ("divergent", ["in-batch-negatives"])
    assert not found.causes[0].by_design
    assert "agrees in everything" in found.causes[0].evidence


def test_what_hangs_on_which_replica_comes_first_is_kept_from_call_to_call(folder: Folder) -> None:
    sums = PARTS.sum(axis=1, keepdims=True)
    other = np.random.default_rng(3).normal(size=sums.shape).astype("f4")
    found = judged(folder, "replicas-summed", sums, regrouped=other, backwards=other)
    assert (codes(found), found.causes[0].by_design) == (["python-state"], False)
    assert found.causes[0].evidence.endswith("agrees in everything; in the reverse order of the replicas it does not")
    assert codes(judged(folder, "replicas-summed", sums, regrouped=other, backwards=sums)) == ["in-batch-negatives"]


@pytest.mark.parametrize(("objective", "verdict"), [(1.3, "equivalent"), (3.1, "unverified")])
def test_losses_that_add_up_to_as_many_times_as_there_are_replicas_leave_the_scale_open(
    folder: Folder, objective: float, verdict: str
) -> None:
    topology, sums = trained(folder, PARTS, objective), PARTS.sum(axis=1, keepdims=True)
    again = Rerun(trained(folder, sums, objective), topology)
    case = case_of(trained(folder, WHOLE[:, None]), topology, rerun=lambda asked: again if asked == "replicas-summed" else None)
    found = judge(case, ["in-batch-negatives"])
    assert (found.verdict, codes(found)) == (verdict, ["in-batch-negatives"])
    assert any(one.startswith("scale: the replicas' losses add up to 3.1x") for one in found.not_compared) == (objective > 2)


def test_a_term_that_comes_with_each_replica_whichever_rows_it_has_couples_no_rows(folder: Folder) -> None:
    sums = PARTS.sum(axis=1, keepdims=True)
    found = judged(folder, "replicas-summed", sums, regrouped=sums)
    assert codes(found) == ["regularization-per-replica"]
    assert found.causes[0].evidence.endswith("agrees in everything, however the examples are grouped")
    other = np.random.default_rng(3).normal(size=sums.shape).astype("f4")
    assert codes(judged(folder, "replicas-summed", sums, regrouped=other)) == ["in-batch-negatives"]


def test_whatever_a_sequential_replay_explains_what_it_hides_is_said(folder: Folder) -> None:
    sums = PARTS.sum(axis=1, keepdims=True)
    other = np.random.default_rng(3).normal(size=sums.shape).astype("f4")
    ways = [{}, {"regrouped": sums}, {"regrouped": other, "backwards": other}]
    found = [judged(folder, "replicas-summed", sums, **way) for way in ways]
    assert [codes(one) for one in found] == [["in-batch-negatives"], ["regularization-per-replica"], ["python-state"]]
    assert all("code-without-examples" in [text.code for text in one.not_compared] for one in found)


def test_a_loss_that_is_a_mean_is_explained_by_the_mean_of_the_replicas(folder: Folder) -> None:
    assert codes(judged(folder, "replicas", PARTS.sum(axis=1, keepdims=True))) == ["in-batch-negatives"]


def test_the_same_loss_with_other_gradients_was_changed_after_the_tape(folder: Folder) -> None:
    found = judged(folder, "replicas-summed", PARTS.sum(axis=1, keepdims=True), objective=1.0)
    assert codes(found) == ["clip-before-reduce"]
    assert "clips or normalizes" in found.causes[0].summary


def test_noise_that_each_replica_adds_to_its_gradient_is_no_clipping_and_couples_no_rows(folder: Folder) -> None:
    found = judged(folder, "replicas-summed", PARTS.sum(axis=1, keepdims=True), objective=1.0, draws=True)
    assert codes(found) == ["unexplained"]
    assert [location.line for location in found.causes[0].locations] == [9]


@pytest.mark.parametrize(
    ("joins", "by_loss", "found"),
    [
        (True, PARTS, ["local-normalization"]),
        (True, 1.5 * PARTS, ["unexplained"]),  # it is not what the run had
        (False, PARTS, ["unexplained"]),  # no gradient passes from one replica to another
    ],
)
def test_where_gradients_pass_from_replica_to_replica_each_loss_alone_has_its_weight(
    folder: Folder, joins: bool, by_loss: Array, found: list[str]
) -> None:
    passed = PARTS + np.random.default_rng(3).normal(size=(3, 1, 32)).astype("f4") * np.float32([[[1], [-1], [2], [-2]]])
    weights = np.float32([1.5, 0.5, 1.2, 0.8])
    whole = np.einsum("r,krw->kw", weights, PARTS)[:, None]
    topology = trained(folder, passed, joins=joins)
    again = Rerun(trained(folder, by_loss), topology)
    case = case_of(trained(folder, whole), topology, rerun=lambda asked: again if asked == "by-loss" else None)
    assert codes(judge(case)) == found


def test_what_the_replicas_rows_alone_do_not_explain_stays_unexplained(folder: Folder) -> None:
    assert codes(judged(folder, "replicas-summed", WHOLE[:, None])) == ["unexplained"]


def test_a_reference_whose_rounding_hides_the_difference_explains_nothing(folder: Folder) -> None:
    sums = PARTS.sum(axis=1, keepdims=True)
    drawn = np.random.default_rng(4).normal(size=(3, *sums.shape)).astype("f4")
    topology = trained(folder, PARTS, 1.3)
    noise = [trained(folder, sums + one, 1.3) for one in drawn]
    again = Rerun(trained(folder, sums, 1.3), topology, noise)
    case = case_of(
        trained(folder, WHOLE[:, None]), topology, rerun=lambda asked: again if asked.startswith("replicas-summed") else None
    )
    assert codes(judge(case)) == ["unexplained"]


def test_of_several_updates_in_a_call_the_first_alone_is_judged_on_one_replicas_rows_after_the_other(folder: Folder) -> None:
    other = PARTS.sum(axis=1, keepdims=True)
    other[1:] = 0
    topology = trained(folder, PARTS, 1.3, repeats=True)
    again = Rerun(trained(folder, other, 1.3), topology)
    case = case_of(trained(folder, WHOLE[:, None]), topology, rerun=lambda asked: again if asked == "replicas-summed" else None)
    found = judge(case)
    assert codes(found) == ["in-batch-negatives"]
    assert any(one.startswith("everything except the gradients of sgd up to step 0") for one in found.not_compared)


def test_what_differs_besides_from_a_later_step_on_is_told(folder: Folder) -> None:
    other = PARTS.sum(axis=1, keepdims=True)
    other[2] *= np.linspace(0.5, 2, 32)
    found = judged(folder, "replicas-summed", other)
    assert codes(found) == ["unexplained", "in-batch-negatives"]  # what is by design comes last
    assert "w differs from step 2 on" in found.causes[1].evidence


def test_what_one_device_reports_of_one_replica_after_the_other_is_not_compared(folder: Folder) -> None:
    topology = trained(folder, PARTS, 1.3, reported=0.7)
    again = Rerun(trained(folder, PARTS.sum(axis=1, keepdims=True), 1.3, reported=2.8), topology)
    case = case_of(
        trained(folder, WHOLE[:, None], reported=0.5), topology, rerun=lambda asked: again if asked == "replicas" else None
    )
    found = judge(case, ["in-batch-negatives"])
    assert codes(found) == ["in-batch-negatives"]
    assert found.verdict == "equivalent"
    assert any(one.startswith("losses and metrics") for one in found.not_compared)


def test_an_update_that_one_device_makes_too_when_it_is_told_the_number_of_replicas_depends_on_it(folder: Folder) -> None:
    def run(replicas: int, rate: float) -> Trace:
        def step(made: Made, k: int) -> None:
            after = np.ones(32, "f4") - np.float32(rate) * WHOLE[: k + 1].sum(axis=0, dtype="f4")
            for r in range(replicas):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                share = WHOLE[k] / np.float32(replicas)
                made.step(k, {"w": share}, {"w": after}, replica=r, rows=rows, objective=1 / replicas)

        return loop(folder.made(f"1x{replicas}"), step, weights=32)

    topology = run(4, 0.4)

    def judged_when_told(rate: float) -> Judgement:
        told = Rerun(run(1, rate), topology)
        return judge(case_of(run(1, 0.1), topology, rerun=lambda *asked: told if asked[-1] == "batch-of" else None))

    found = judged_when_told(0.4)
    assert codes(found) == ["depends-on-replicas"]
    assert "given 4 as the number of replicas, has the same weights" in found.causes[0].evidence
    assert "BASE_RATE * strategy.num_replicas_in_sync" in found.causes[0].fix
    assert codes(judged_when_told(0.1)) == ["update-scaling"]


def test_where_32_bits_agree_no_cause_of_arithmetic_is_named(folder: Folder) -> None:
    found = judged(folder, "replicas-summed", PARTS.sum(axis=1, keepdims=True)).of_16_bits()
    assert (found.verdict, codes(found)) == ("divergent", ["unexplained"])
    assert found.causes[0].evidence.startswith(
        "With the program's layers in 32 bits everything agrees; w (gradient) differs by "
    )
    assert "only the rounding to 16 bits differs" in found.notes[-1]


def test_of_two_optimizers_in_a_call_the_first_is_judged_where_the_second_depends_on_its_update(folder: Folder) -> None:
    def trained_by_two(critic: Array, generator: Array) -> Trace:
        """Both begin at ones; the generator's gradients are taken after the critic's update."""

        def step(made: Made, k: int) -> None:
            replicas = critic.shape[1]
            for name, locals_ in (("critic", critic), ("generator", generator)):
                after = {name: np.ones(32, "f4") - np.float32(0.1) * locals_[: k + 1].sum(axis=(0, 1), dtype="f4")}
                for r in range(replicas):
                    rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                    entry = {name: locals_[k, r]}
                    made.step(k, entry, after, replica=r, rows=rows, objective=1.3 / replicas, optimizer=name)

        return loop(folder.made(f"1x{critic.shape[1]}"), step, weights=32)

    sums, other = PARTS.sum(axis=1, keepdims=True), np.random.default_rng(5).normal(size=(3, 1, 32)).astype("f4")
    topology = trained_by_two(PARTS, PARTS)
    again = Rerun(trained_by_two(sums, other), topology)
    reference = trained_by_two(WHOLE[:, None], WHOLE[:, None])
    found = judge(case_of(reference, topology, rerun=lambda asked: again if asked.startswith("replicas-summed") else None))
    assert codes(found) == ["regularization-per-replica"]
    assert found.causes[0].evidence.endswith("has the same gradients, however the examples are grouped")
    assert any(one.startswith("everything except the gradients of critic up to step 0") for one in found.not_compared)


@pytest.mark.parametrize(
    ("clips", "objective", "off", "found"),
    [
        pytest.param(True, 0.25, 0.0, ["depends-on-replicas"], id="clipped parts of a divided loss"),
        pytest.param(True, 1.0, 0.0, ["unexplained"], id="a loss that agrees: each replica may clip its own gradient"),
        pytest.param(False, 0.25, 0.0, ["unexplained"], id="nothing is clipped"),
        pytest.param(True, 0.25, 0.1, ["unexplained"], id="one device with that number has other gradients"),
    ],
)
def test_gradients_that_are_clipped_after_a_division_by_the_number_of_replicas_depend_on_it(
    folder: Folder, clips: bool, objective: float, off: float, found: list[str]
) -> None:
    """One device that gets that number has a quarter of the sum, each part of which was divided by it before."""
    topology = trained(folder, PARTS, objective, clips=clips)
    again = PARTS.sum(axis=1, keepdims=True) / 4 + np.float32(off) * WHOLE[:, None]

    def rerun(asked: str) -> Rerun | None:
        return Rerun(trained(folder, again, objective / 4, clips=clips), topology) if asked == "told" else None

    judgement = judge(case_of(trained(folder, WHOLE[:, None], clips=clips), topology, rerun=rerun))
    assert codes(judgement) == found
    assert (judgement.causes[0].fix.startswith("Clip the gradient of a loss that nothing divides")) == (
        found == ["depends-on-replicas"]
    )
