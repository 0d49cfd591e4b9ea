"""Causes in the whole of a run (weights, replicas, rows, draws): each is named in traces made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate.trace import Facts, Trace
from emulate.verify.case import Case
from emulate.verify.judge import Judgement, judge
from emulate.verify.result import Outcome, RunResult
from tests.emulate.verify.cases import Folder, Rerun, case_of, codes, loop
from tests.emulate.verify.hand_made import LOCALS, ROWS, hand_made, right_reference, right_topology, weights_after
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Array, Problem


def test_traces_by_hand_are_equivalent(folder: Folder) -> None:
    found = judge(hand_made(folder, right_topology))
    assert (found.verdict, codes(found)) == ("equivalent", [])


def one_number(folder: Folder, topology: str, local: float, switched: float | None = None, **facts: Any) -> Case:
    """A model of one trainable number: gradient 1 on one device, `local` on each replica (`switched` without clipping)."""

    def trained(shape: str, gradient: float) -> Trace:
        made, replicas = folder.made(shape), int(shape[2:])
        made.event({"event": "program", **facts})

        def step(made: Made, k: int) -> None:
            after = {"w": np.array([1.0 - 0.1 * gradient * replicas * (k + 1)], "f4")}
            for r in range(replicas):
                rows = ROWS[12 * k + 12 // replicas * r : 12 * k + 12 // replicas * (r + 1)]
                own = gradient * (1 + 0.1 * (r - (replicas - 1) / 2))
                made.step(k, {"w": np.array([own], "f4")}, after, replica=r, rows=rows, objective=1.0 / replicas)

        return loop(made, step, weights=1)

    again = None if switched is None else Rerun(trained("1x1", 1.0), trained(topology, switched))
    return case_of(
        trained("1x1", 1.0), trained(topology, local), rerun=lambda *asked: again if asked[-1] == "no-clipping" else None
    )


@pytest.mark.parametrize("topology", ["1x2", "1x3", "1x4"])
def test_a_model_of_one_number_whose_gradient_is_replicas_times_too_large_is_loss_scaling(
    folder: Folder, topology: str
) -> None:
    found = judge(one_number(folder, topology, 1.0))
    assert codes(found) == ["loss-scaling"]
    assert f"{topology[2:]}x too large" in found.causes[0].summary


@pytest.mark.parametrize(("objective", "expected"), [(0.5, ["clip-before-reduce"]), (1.0, ["loss-scaling"])])
def test_a_factor_that_the_loss_has_not_is_of_clipping_where_the_program_clips(
    folder: Folder, objective: float, expected: list[str]
) -> None:
    def trained(shape: str, factor: float) -> Trace:
        made, replicas = folder.made(shape), int(shape[2:])
        made.event({"event": "program", "clipped_by": ["clip_by_global_norm"]})

        def step(made: Made, k: int) -> None:
            for r in range(replicas):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                own = np.linspace(0.5, 1.5, 128, dtype="f4") * np.float32(factor * (1 + 0.1 * (r - (replicas - 1) / 2)))
                after = {"w": np.full(128, 1.0 - 0.1 * (k + 1), "f4")}
                made.step(k, {"w": own}, after, replica=r, rows=rows, objective=1.0 if replicas == 1 else objective)

        return loop(made, step)

    again = Rerun(trained("1x1", 1.0), trained("1x2", 0.5))
    found = judge(case_of(trained("1x1", 1.0), trained("1x2", 1.0), rerun=lambda *asked: again))
    assert codes(found) == expected


def test_equal_gradients_of_equal_rows_are_not_taken_for_sums(folder: Folder) -> None:
    def trained(shape: str) -> Trace:
        def step(made: Made, k: int) -> None:
            for r in range(int(shape[2:])):
                rows = ["the row"] * (4 // int(shape[2:]))
                after = {"w": np.full(9, 1.0 - 0.1 * int(shape[2:]) * (k + 1), "f4")}
                made.step(k, {"w": np.ones(9, "f4")}, after, replica=r, rows=rows, objective=1.0)

        return loop(folder.made(shape), step, weights=9)

    assert codes(judge(case_of(trained("1x1"), trained("1x2")))) == ["loss-scaling"]


def test_a_model_of_one_number_with_another_factor_is_unexplained(folder: Folder) -> None:
    assert codes(judge(one_number(folder, "1x2", 0.7))) == ["unexplained"]


def test_a_model_of_one_number_that_every_replica_clips_is_not_taken_for_loss_scaling(folder: Folder) -> None:
    assert codes(judge(one_number(folder, "1x2", 1.0, switched=0.5, clipped_by=["clip_by_global_norm"]))) == [
        "clip-before-reduce"
    ]
    assert codes(judge(one_number(folder, "1x2", 1.0, switched=1.0, clipped_by=["clip_by_global_norm"]))) == ["loss-scaling"]


def test_a_metric_that_differs_alone_is_none_of_a_clipping_that_the_step_has(folder: Folder) -> None:
    def reporting(step: Any, value: float) -> Any:
        def report(made: Made, k: int) -> None:
            if k == 0:
                made.event({"event": "program", "clipped_by": ["clip_by_value"]})
            step(made, k)
            made.report("metric", "batch/auc", k, value)

        return report

    one, four = loop(folder.made(), reporting(right_reference, 0.4)), loop(folder.made("1x4"), reporting(right_topology, 0.3))
    found = judge(case_of(one, four, rerun=lambda *asked: Rerun(one, four)))
    assert codes(found) == ["metric-aggregation"]


def test_replicas_that_follow_their_own_gradients_miss_the_all_reduce(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            own = np.float32(1) - np.float32(0.1) * LOCALS[: k + 1, r].sum(axis=0)
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": own}, replica=r, rows=ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2], objective=0.25
            )

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["missing-all-reduce"]
    assert "trains its own model" in found.causes[0].summary


def test_replicas_that_all_follow_one_miss_the_all_reduce(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            one = np.float32(1) - np.float32(0.1) * LOCALS[: k + 1, 2].sum(axis=0)
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": one}, replica=r, rows=ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2], objective=0.25
            )

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["missing-all-reduce"]
    assert "apply the gradient of replica 2" in found.causes[0].summary


def test_what_each_host_learns_by_itself_before_the_steps_is_told_of_all_that_follows(folder: Folder) -> None:
    def started(topology: str, means: list[float], gradient: Array) -> Trace:
        """A mean that no optimizer trains, on each host its own, and gradients that come of it."""
        made = folder.made(topology)
        for host, mean in enumerate(means):
            made.initial({"w": np.ones(128, "f4"), "mean": np.full(4, mean, "f4")}, replica=host, host=host, frozen=["mean"])
            rows = ROWS[: 8 // len(means)] if host == 0 else ROWS[4:8]
            share = gradient / np.float32(len(means))
            made.step(0, {"w": share}, {"w": weights_after(0)}, replica=host, host=host, rows=rows, objective=1 / len(means))
        return made.trace()

    reference = started("1x1", [0.5], LOCALS[0].sum(axis=0))
    found = judge(case_of(reference, started("2x1", [0.25, 0.75], LOCALS[1].sum(axis=0))))
    assert codes(found) == ["initial-weights"]
    assert "The hosts start with different values of mean" in found.causes[0].summary
    assert "is not the same on all hosts" in found.causes[0].evidence


def test_replicas_that_drift_for_another_reason_disagree(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            weights = weights_after(k) * (np.float32(0.5) if r == 1 and k == 1 else 1)
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": weights}, replica=r, rows=ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2], objective=0.25
            )

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["replicas-disagree"]
    assert "(replica 0, replica 2, replica 3) and (replica 1)" in found.causes[0].evidence
    assert "assert_cardinality" not in found.causes[0].fix
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.replica) == (1, 1)
    assert found.first_divergence.error > 0.1


@pytest.mark.parametrize(
    ("sparse", "relative", "expected"),
    [(True, 1e-5, []), (True, 1e-2, ["replicas-disagree"]), (False, 1e-5, ["replicas-disagree"])],
)
def test_copies_of_a_table_that_sums_of_its_rows_round_differently_do_not_disagree(
    folder: Folder, sparse: bool, relative: float, expected: list[str]
) -> None:
    """TensorFlow adds up the rows of a sparse gradient in any order, on each replica for itself."""

    def topology(made: Made, k: int) -> None:
        for r in range(4):
            moved = (weights_after(k) - (weights_after(k - 1) if k else 1)) * np.float32(relative if r == 1 else 0)
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": weights_after(k) + moved}, replica=r, rows=rows, objective=0.25, sparse=sparse
            )

    found = judge(hand_made(folder, topology))
    assert codes(found) == expected
    assert any("The replicas' copies of w differ by rounding" in note for note in found.notes) == (not expected)


@pytest.mark.parametrize(
    ("assigned", "factor", "also"),
    [
        pytest.param("w", 1.0, [], id="in the loss"),
        pytest.param("w", None, [], id="in the gradients too"),
        pytest.param("w", 4.0, ["loss-scaling"], id="beside a factor"),
        pytest.param("other", 1.0, ["loss-report"], id="elsewhere"),
        pytest.param("other", 4.0, ["loss-scaling", "loss-report"], id="elsewhere, beside a factor"),
    ],
)
def test_what_follows_from_weights_that_the_step_itself_assigns_is_no_second_cause(
    folder: Folder, assigned: str, factor: float | None, also: list[str]
) -> None:
    """A layer that sets its weights by the first examples has them in the loss of the same step, SAM in its gradient."""
    record = {
        "file": "train.py",
        "line": 9,
        "text": "w.assign(...)",
        "operations": {},
        "roles": {"assign": 0},
        "name": assigned,
    }

    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            local = LOCALS[k, r] ** 3 if factor is None else LOCALS[k, r] * np.float32(factor)
            made.step(k, {"w": local}, {"w": weights_after(k) + r}, replica=r, rows=rows, objective=0.25)
        made.report("loss", "train/reduce", k, 0.7)

    def reference(made: Made, k: int) -> None:
        right_reference(made, k)
        made.report("loss", "train/reduce", k, 1.0)

    run = folder.made("1x4")
    run.event({"event": "lines", "function": "step", "stages": {"gradient": [], "assigned": [record]}})
    found = judge(case_of(loop(folder.made(), reference), loop(run, topology)))
    assert codes(found) == ["replicas-disagree", *also]


def test_a_replica_with_a_learning_rate_of_its_own_is_told_by_the_factor_of_its_updates(folder: Folder) -> None:
    def step(made: Made, k: int) -> None:
        for r in range(4):
            rate = 2 if r == 3 and k == 1 else 1
            after = weights_after(k - 1) + rate * (weights_after(k) - weights_after(k - 1)) if k else weights_after(k)
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": after}, replica=r, rows=ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2], objective=0.25
            )

    found = judge(hand_made(folder, step))
    assert codes(found) == ["replicas-disagree"]
    assert found.causes[0].evidence.endswith("in that step every weight changes 2x as much on replica 3 as on replica 0")
    assert "assert_cardinality" not in found.causes[0].fix


def test_a_program_that_stops_earlier_by_its_own_draws_lacks_no_examples(folder: Folder) -> None:
    one, four = loop(folder.made(), right_reference), loop(folder.made("1x4"), right_topology)
    own = loop(folder.made("1x4"), right_topology, steps=2)
    (ledger,) = case_of(one, four, untouched=own).ledgers.values()
    assert (len(ledger.topology), ledger.samples.missing) == (3, 0)
    (ledger,) = case_of(one, own, untouched=own).ledgers.values()
    assert len(ledger.topology) == 2


def test_replicas_that_disagree_after_an_epoch_of_fit_are_told_first_of_the_end_of_its_data(folder: Folder) -> None:
    """Keras counts a step that ends with the data, on some replicas in time for the next step and on some not."""

    def topology(made: Made, k: int) -> None:
        for r in range(4):
            weights = weights_after(k) * (np.float32(0.5) if r == 1 and k == 1 else 1)
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": weights}, replica=r, rows=ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2], objective=0.25
            )
        made.report("metric", "epoch/loss", k, 0.25, made=k + 1)

    (cause,) = judge(hand_made(folder, topology)).causes
    assert cause.code == "replicas-disagree"
    assert cause.fix.startswith("In Keras's `fit`, from the second epoch on, Keras itself may cause this.")


def test_variables_that_are_not_trained_may_differ_between_replicas(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            weights = {"w": weights_after(k), "moving_mean": np.float32([r])}
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": LOCALS[k, r]}, weights, replica=r, rows=rows, objective=0.25, frozen=["moving_mean"])

    assert judge(hand_made(folder, topology)).verdict == "equivalent"


def batchnorm(folder: Folder, switched: Any, allow: list[str]) -> Judgement:
    """Other gradients and other moving statistics; `switched` is the topology's step with synchronized ones."""

    def unsynchronized(made: Made, k: int) -> None:
        for r in range(4):
            weights = {"w": weights_after(k) + np.float32(0.01), "moving_mean": np.float32([1 + r])}
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            gradient = {"w": LOCALS[k, r] + np.float32(0.1)}
            made.step(k, gradient, weights, replica=r, rows=rows, objective=0.25, frozen=["moving_mean"])

    def reference(made: Made, k: int) -> None:
        weights = {"w": weights_after(k), "moving_mean": np.float32([0])}
        made.step(k, {"w": LOCALS[k].sum(axis=0)}, weights, rows=ROWS[8 * k : 8 * k + 8], objective=1.0, frozen=["moving_mean"])

    def rerun(*asked: str) -> Rerun | None:
        if asked[-1] != "batchnorm-synchronized" or switched is None:
            return None
        return Rerun(loop(folder.made(), right_reference), loop(folder.made("1x4"), switched))

    made = folder.made("1x4")
    made.event({"event": "program", "batchnorm": ["moving_mean"]})
    case = case_of(loop(folder.made(), reference), loop(made, unsynchronized), rerun=rerun)
    return judge(case, allow)


def test_batchnorm_is_confirmed_by_synchronizing_it_and_then_may_be_allowed(folder: Folder) -> None:
    found = batchnorm(folder, right_topology, [])
    assert (found.verdict, codes(found), found.causes[0].by_design) == ("by-design", ["batchnorm-local-statistics"], True)
    assert "synchronized in both runs everything agrees" in found.causes[0].evidence
    assert batchnorm(folder, right_topology, ["batchnorm-local-statistics"]).verdict == "equivalent"


def test_what_batchnorm_would_drown_is_found_with_it_synchronized_and_comes_first(folder: Folder) -> None:
    def scaled(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": 4 * LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=1.0)

    assert codes(batchnorm(folder, scaled, [])) == ["loss-scaling", "batchnorm-local-statistics"]
    assert batchnorm(folder, scaled, ["batchnorm-local-statistics"]).verdict == "divergent"


def test_batchnorm_that_cannot_be_synchronized_is_not_called_equivalent_when_it_is_allowed(folder: Folder) -> None:
    found = batchnorm(folder, None, ["batchnorm-local-statistics"])
    assert (found.verdict, codes(found)) == ("unverified", ["batchnorm-local-statistics"])
    assert "BatchNormalization affects them" in found.not_compared[0]


@pytest.mark.parametrize(("how", "times"), [("sum", 1), ("mean", 4)])
def test_a_loop_that_reduces_by_itself_may_add_up_or_average(folder: Folder, how: str, times: int) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            gradient, weights = {"w": np.float32(times) * LOCALS[k, r]}, {"w": weights_after(k)}
            made.step(k, gradient, weights, replica=r, rows=rows, objective=0.25, tape=True)

    assert judge(hand_made(folder, topology)).verdict == "equivalent", how


def test_an_optimizer_that_is_told_of_the_sum_does_not_add_it_up_again(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)

    made = folder.made("1x4")
    made.event({"event": "program", "optimizers": {"sgd": {"aggregation": "skipped"}}})
    assert judge(case_of(loop(folder.made(), right_reference), loop(made, topology))).verdict == "equivalent"


def test_a_loop_that_adds_up_means_by_itself_is_loss_scaling(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        after = np.float32(1) + np.float32(4) * (weights_after(k) - np.float32(1))
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": 4 * LOCALS[k, r]}, {"w": after}, replica=r, rows=rows, objective=0.8 + 0.1 * r, tape=True)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["loss-scaling"]
    assert found.causes[0].fix.startswith("Divide by the size of the global batch")
    for facts in (Facts(gathers=True), Facts(joins=True)):
        of_all_rows = hand_made(folder, topology)
        of_all_rows.__dict__["facts"] = facts
        assert "loss = loss_of_all_examples / strategy.num_replicas_in_sync" in judge(of_all_rows).causes[0].fix


def test_the_same_random_numbers_on_all_replicas_are_by_design_and_can_be_allowed(folder: Folder) -> None:
    case = hand_made(folder, lambda made, k: right_topology(made, k, draws=[f"mask-{k}"]))
    found = judge(case)
    assert (found.verdict, codes(found), found.causes[0].by_design) == ("by-design", ["identical-dropout"], True)
    assert "noise = generator.normal(tf.shape(x))" in found.causes[0].fix  # there is no dropout to mend
    again = hand_made(Folder(case.topology.directory / "again"), lambda made, k: right_topology(made, k, draws=[f"mask-{k}"]))
    allowed = judge(again, allow=["identical-dropout"])
    assert (allowed.verdict, allowed.causes[0].allowed) == ("equivalent", True)


@pytest.mark.parametrize(
    ("numbers", "shapes", "is_noted"), [("kr", "() ()", True), ("k", "() ()", False), ("kr", "(8,) (2,)", False)]
)
def test_a_draw_for_the_batch_as_a_whole_is_noted_where_replicas_make_others(
    folder: Folder, numbers: str, shapes: str, is_noted: bool
) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            draws = [f"main.step:3 0 {shapes.split()[1]}={k}{r if 'r' in numbers else ''}"]
            made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25, draws=draws)

    case = hand_made(folder, topology)
    for trace, shape in zip((case.plain, case.untouched), shapes.split(), strict=True):
        of = f"main.step:3 0 {shape}"
        event = {"event": "made", "kind": "draw", "of": of, "line": {"file": "train.py", "line": 7}}
        trace.events.append((0, event))
    found = judge(case)
    assert (found.verdict, found.causes) == ("equivalent", ())  # nor are equal ones the masks of dropout
    assert any("draw for its whole part of the batch at train.py:7, where" in note for note in found.notes) is is_noted


@pytest.mark.parametrize("alike", [True, False])
def test_draws_that_are_the_same_because_hosts_were_seeded_for_the_comparison_are_none_of_the_programs(
    folder: Folder, alike: bool
) -> None:
    with_draws, with_others = (
        loop(folder.made("1x4"), lambda made, k, draws=draws: right_topology(made, k, draws=draws), replicas=4)
        for draws in (["mask"], [] if not alike else ["mask"])
    )
    own = RunResult("own seeds", with_others.topology, with_others)
    found = judge(case_of(loop(folder.made(), right_reference), with_draws, own_seeds=lambda: own))
    assert codes(found) == (["identical-dropout"] if alike else [])


@pytest.mark.parametrize(("alike", "expected"), [(True, ["identical-dropout"]), (False, [])])
def test_hosts_that_draw_alike_for_replicas_that_do_not_are_found_out_too(
    folder: Folder, alike: bool, expected: list[str]
) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            draws = [f"mask-{k}-{r % 2 if alike else r}"]
            weights = {"w": weights_after(k)}
            made.step(k, {"w": LOCALS[k, r]}, weights, replica=r, host=r // 2, rows=rows, objective=0.25, draws=draws)

    made = folder.made("2x2")
    made.event({"event": "strategy", "name": "MultiWorkerMirroredStrategy", "replicas": 4, "local": 2})
    for r in range(4):
        made.initial({"w": np.ones(128, "f4")}, replica=r, host=r // 2)
    for k in range(3):
        topology(made, k)
    found = judge(case_of(loop(folder.made(), right_reference), made.trace()))
    assert codes(found) == expected
    assert all("all 2 hosts drew" in cause.evidence for cause in found.causes)


def test_replicas_whose_shards_are_as_large_are_found_to_draw_alike_beside_one_that_has_fewer_rows(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            draws = [f"mask-{k}-{'of fewer' if r == 3 else 'of all'}"]
            weights = {"w": weights_after(k)}
            made.step(k, {"w": LOCALS[k, r]}, weights, replica=r, rows=rows, objective=0.25, draws=draws)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["identical-dropout"]
    assert found.causes[0].summary.startswith("Replicas 0, 1, 2 draw the same random numbers")
    assert "In 3 of 3 steps" in found.causes[0].evidence


def test_a_strategy_with_fewer_replicas_than_devices_is_missing_some(folder: Folder) -> None:
    reference = loop(folder.made(), right_reference)
    topology = loop(folder.made("1x4"), right_reference, replicas=2)
    found = judge(case_of(reference, topology))
    assert codes(found)[0] == "replicas-missing"
    assert "2 of 4 devices train" in found.causes[0].summary
    assert "`MirroredStrategy()` without a list of devices" in found.causes[0].fix


def test_what_hides_the_devices_that_are_missing_is_told_in_the_cure(folder: Folder) -> None:
    topology = loop(folder.made("1x4"), right_reference, replicas=2)
    hides = "the program sets CUDA_VISIBLE_DEVICES='0,1': 2 of this host's 4 GPUs are visible to it"
    found = judge(case_of(loop(folder.made(), right_reference), topology, outcome=Outcome(hides=hides)))
    assert found.causes[0].fix.startswith("Let the program see all GPUs")
    assert found.causes[0].evidence.endswith(f"the program hides GPUs ({hides})")


@pytest.mark.parametrize(
    ("topology", "cure"),
    [("1x4", "with strategy.scope():"), ("2x1+1ps", "Verify the program on the topology without parameter servers.")],
)
def test_a_program_without_a_strategy_is_told_to_make_one(folder: Folder, topology: str, cure: str) -> None:
    there = loop(folder.made(topology), right_reference, replicas=1, strategy="_DefaultDistributionStrategy")
    found = judge(case_of(loop(folder.made(), right_reference), there))
    assert (found.verdict, codes(found)) == ("divergent", ["replicas-missing"])
    assert cure in found.causes[0].fix


def test_a_strategy_for_one_host_on_two_trains_two_models(folder: Folder) -> None:
    made = folder.made("2x1")
    for host in (0, 1):
        made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": 1, "local": 1}, host)
        made.initial({"w": np.ones(128, "f4")}, host=host)
        made.step(0, {"w": LOCALS[0, 0]}, {"w": weights_after(0)}, host=host, rows=ROWS[:8], objective=1.0)
    found = judge(case_of(loop(folder.made(), right_reference), made.trace()))
    assert codes(found) == ["replicas-missing"]
    assert "Each of the 2 hosts trains its own model" in found.causes[0].summary


def test_replicas_that_start_apart_are_initial_weights(folder: Folder) -> None:
    made = folder.made("1x4")
    for replica in range(4):
        made.initial({"w": np.full(128, replica, "f4")}, replica=replica)
    for k in range(3):
        right_topology(made, k)
    found = judge(case_of(loop(folder.made(), right_reference), made.trace()))
    assert codes(found) == ["initial-weights"]


def test_a_run_that_starts_from_other_weights_is_initial_weights(folder: Folder) -> None:
    made = folder.made("1x4")
    for replica in range(4):
        made.initial({"w": np.full(128, 7, "f4")}, replica=replica)
    for k in range(3):
        right_topology(made, k)
    found = judge(case_of(loop(folder.made(), right_reference), made.trace()))
    assert codes(found) == ["initial-weights"]
    assert found.first_divergence is not None
    assert found.first_divergence.kind == "initial-weight"


def test_a_reference_that_does_not_repeat_is_named_before_anything_else(folder: Folder) -> None:
    def other(made: Made, k: int) -> None:
        made.step(k, {"w": LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, rows=ROWS[8 * k + 1 : 8 * k + 9], objective=1.0)

    found = judge(hand_made(folder, right_topology, repeat=lambda: loop(folder.made(), other)))
    assert codes(found) == ["unseeded-randomness"]
    assert "the choice or contents of the examples" in found.causes[0].summary


def test_rows_that_every_replica_has_are_repeated(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k : 8 * k + 8]
            made.step(k, {"w": LOCALS[k].sum(axis=0) / 4}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["samples-repeated"]
    assert "Every replica trains on the same examples" in found.causes[0].summary
    assert found.samples.repeated == 72
    assert "passes a plain tensor or NumPy array to every replica, without splitting it" in found.causes[0].fix


def test_rows_that_no_replica_has_are_missing(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 1]
            made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["samples-missing"]
    assert found.samples.missing == 12
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.value) == ("data", 4)


def test_rows_in_other_steps_are_reordered(folder: Folder) -> None:
    order = [1, 0, 2]

    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * order[k] + 2 * r : 8 * order[k] + 2 * r + 2]
            made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)

    assert codes(judge(hand_made(folder, topology))) == ["samples-reordered"]


def test_batches_that_are_larger_and_in_another_order_are_not_called_reordered(folder: Folder) -> None:
    order = np.random.default_rng(1).permutation(24)

    def reference(made: Made, k: int) -> None:
        made.step(k, {"w": np.zeros(9, "f4")}, {"w": np.zeros(9, "f4")}, rows=ROWS[4 * k : 4 * k + 4], objective=1.0)

    def topology(made: Made, k: int) -> None:
        for r in range(2):
            rows = [ROWS[j] for j in order[8 * (k % 3) + 4 * r : 8 * (k % 3) + 4 * r + 4]]
            made.step(k, {"w": np.zeros(9, "f4")}, {"w": np.zeros(9, "f4")}, replica=r, rows=rows, objective=0.5)

    one, two = loop(folder.made(), reference, steps=6), loop(folder.made("1x2"), topology, steps=6)
    found = judge(case_of(one, two))
    assert codes(found) == ["batch-size"]
    assert "2x as many examples" in found.causes[0].summary
    assert "get_per_replica_batch_size" in found.causes[0].fix


def test_a_batch_that_is_divided_before_the_strategy_divides_it_is_no_loss_of_rows(folder: Folder) -> None:
    def reference(made: Made, k: int) -> None:
        made.step(k, {"w": np.zeros(9, "f4")}, {"w": np.zeros(9, "f4")}, rows=ROWS[8 * k : 8 * k + 8], objective=1.0)

    def topology(made: Made, k: int) -> None:
        for r in range(2):
            rows = ROWS[4 * k + 2 * r : 4 * k + 2 * r + 2]
            made.step(k, {"w": np.zeros(9, "f4")}, {"w": np.zeros(9, "f4")}, replica=r, rows=rows, objective=0.5)

    found = judge(case_of(loop(folder.made(), reference), loop(folder.made("1x2"), topology)))
    assert codes(found) == ["batch-size"]
    assert found.causes[0].summary == (
        "A step has 1/2 of the examples of one device's batch, and an epoch has 2x as many steps."
    )
    assert "model.fit(x, y, batch_size=GLOBAL_BATCH_SIZE)" in found.causes[0].fix


def test_a_number_that_a_replica_without_rows_loses_is_an_empty_shard(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            gradient = LOCALS[k, r] * (np.float32(np.nan) if (k, r) == (2, 3) else 1)
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2] if (k, r) != (2, 3) else []
            more = ROWS[22:24] if (k, r) == (2, 0) else []
            made.step(k, {"w": gradient}, {"w": weights_after(k)}, replica=r, rows=[*rows, *more], objective=0.25)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["empty-shard"]
    assert found.causes[0].summary.startswith("In step 2 replica 3 has no examples. Dividing by zero examples gives NaN: ")
    assert "on replica 3; examples per replica in this step: 4, 2, 2 and 0" in found.causes[0].evidence
    assert found.first_divergence is not None
    assert found.first_divergence.non_finite


@pytest.mark.parametrize(("scales", "lost", "is_of_scale"), [(True, 3, True), (True, 0, False), (False, 3, False)])
def test_a_loss_scale_that_looks_at_the_first_replica_alone_is_named(
    folder: Folder, scales: bool, lost: int, is_of_scale: bool
) -> None:
    def topology(made: Made, k: int) -> None:
        made.event({"event": "program", "optimizers": {"sgd": {"loss_scale": scales}}})
        for r in range(4):
            gradient = LOCALS[k, r] * (np.float32(np.inf) if (k, r) == (2, lost) else 1)
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": gradient}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["nan"]
    assert ("LossScaleOptimizer" in found.causes[0].summary) == is_of_scale
    assert ("gd.TrainStep" in found.causes[0].fix) == is_of_scale


@pytest.mark.parametrize("empty", [None, 1])
def test_a_number_that_is_lost_on_a_replica_with_rows_is_nan(folder: Folder, empty: int | None) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            gradient = LOCALS[k, r] * (np.float32(np.nan) if (k, r) == (2, 3) else 1)
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2] if (k, r) != (2, empty) else []
            more = ROWS[18:20] if (k, r) == (2, 0) and empty is not None else []
            made.step(k, {"w": gradient}, {"w": weights_after(k)}, replica=r, rows=[*rows, *more], objective=0.25)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["nan"]
    assert "on replica 3; examples per replica in this step: " in found.causes[0].evidence


def test_a_report_that_is_lost_takes_nothing_of_the_training_with_it(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)
        made.report("loss", "test/reduce", k, float("nan") if k == 1 else 0.5)

    def reference(made: Made, k: int) -> None:
        gradient = LOCALS[k].sum(axis=0, dtype="f4")
        made.step(k, {"w": gradient}, {"w": weights_after(k)}, rows=ROWS[8 * k : 8 * k + 8], objective=1.0)
        made.report("loss", "test/reduce", k, 0.5)

    found = judge(case_of(loop(folder.made(), reference), loop(folder.made("1x4"), topology)))
    assert (codes(found), found.not_compared) == (["nan"], ())
    assert "examples per replica" not in found.causes[0].evidence  # those of the step are not those of the evaluation


def test_a_report_that_an_evaluation_without_rows_loses_is_an_empty_shard(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)
            made.event({"event": "evaluation", "replica": r, "rows": ROWS[r : r + 1] if r < 3 else []})
        made.report("loss", "test/reduce", k, float("nan") if k == 1 else 0.5)

    def reference(made: Made, k: int) -> None:
        gradient = LOCALS[k].sum(axis=0, dtype="f4")
        made.step(k, {"w": gradient}, {"w": weights_after(k)}, rows=ROWS[8 * k : 8 * k + 8], objective=1.0)
        made.event({"event": "evaluation", "replica": 0, "rows": ROWS[:3]})
        made.report("loss", "test/reduce", k, 0.5)

    found = judge(case_of(loop(folder.made(), reference), loop(folder.made("1x4"), topology)))
    assert codes(found) == ["empty-shard"]
    assert found.causes[0].summary.startswith("In an evaluation replica 3 has no examples. Dividing by zero")
    assert "divide once, after the last batch" in found.causes[0].fix


def test_nothing_is_called_equivalent_without_its_rows(folder: Folder) -> None:
    def without(made: Made, k: int) -> None:
        made.step(k, {"w": LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, objective=1.0)

    found = judge(case_of(loop(folder.made(), without), loop(folder.made("1x1"), without)))
    assert found.verdict == "unverified"
    assert len(found.not_compared) == 1
    assert "data: gpudist could not see the batch" in found.not_compared[0]


def test_a_loss_that_no_report_shows_is_said_not_to_be_seen(folder: Folder) -> None:
    assert "gpudist did not see a number that the program itself reports" in judge(hand_made(folder, right_topology)).notes[-1]
    reported = judge(folder.case(Problem(steps=2), Problem(steps=2)))
    assert reported.notes == ()


@pytest.mark.parametrize(("epoch", "verdict"), [(0.5, "equivalent"), (0.7, "divergent"), (None, "equivalent")])
def test_a_metric_that_keras_averages_within_an_epoch_alone_is_advice(
    folder: Folder, epoch: float | None, verdict: str
) -> None:
    def reporting(step: Any, within: float, of_epoch: float | None) -> Any:
        def report(made: Made, k: int) -> None:
            step(made, k)
            made.report("metric", "batch/auc", k, within)
            if of_epoch is not None and k == 2:
                made.report("metric", "epoch/auc", 0, of_epoch)

        return report

    one = loop(folder.made(), reporting(right_reference, 0.4, None if epoch is None else 0.5))
    four = loop(folder.made("1x4"), reporting(right_topology, 0.3, epoch))
    found = judge(case_of(one, four))
    assert (found.verdict, codes(found)) == (verdict, ["metric-aggregation"])
    assert found.causes[0].advice == (verdict == "equivalent")
    assert found.worst is not None
    assert (found.worst.error > found.worst.noise * 10) == (verdict == "divergent")  # what is advice is not what is shown


@pytest.mark.parametrize(
    ("within", "epoch", "verdict"),
    [((0.3, 0.35, 0.41), 0.5, "equivalent"), ((0.3, 0.35, 0.41), 0.7, "divergent"), ((0.1, 0.1, 0.1), 0.5, "divergent")],
)
def test_a_loss_that_keras_averages_within_an_epoch_alone_is_advice_and_one_divided_twice_is_not(
    folder: Folder, within: tuple[float, ...], epoch: float, verdict: str
) -> None:
    def reporting(step: Any, losses: tuple[float, ...], of_epoch: float) -> Any:
        def report(made: Made, k: int) -> None:
            step(made, k)
            made.report("loss", "batch/loss", k, losses[k])
            if k == 2:
                made.report("loss", "epoch/loss", 0, of_epoch)

        return report

    one, four = loop(folder.made(), reporting(right_reference, (0.4, 0.4, 0.4), 0.5)), folder.made("1x4")
    found = judge(case_of(one, loop(four, reporting(right_topology, within, epoch))))
    assert (found.verdict, codes(found)) == (verdict, ["loss-report"])
    assert found.causes[0].advice == (verdict == "equivalent")
    assert found.causes[0].advice or "Return the loss of all replicas from `train_step`" in found.causes[0].fix


def test_what_is_reported_now_and_then_is_told_by_its_number_and_the_step_before_it(folder: Folder) -> None:
    def reporting(step: Any, value: float) -> Any:
        def report(made: Made, k: int) -> None:
            step(made, k)
            if k == 1:  # an evaluation after the second of three steps
                made.report("loss", "evaluate/reduce", 0, value, made=2)

        return report

    case = case_of(
        loop(folder.made(), reporting(right_reference, 0.3)), loop(folder.made("1x4"), reporting(right_topology, 0.7))
    )
    found = judge(case)
    assert codes(found) == ["loss-report"]
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.report) == (1, 0)
    assert "evaluate/reduce) is not the loss of one device on the same examples" in found.causes[0].summary
    assert "evaluate/reduce is 0.7 in report 0, after step 1, 0.3 on one device" in found.causes[0].evidence


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_wrong_loss_is_seen_where_the_gradients_are_rounding_alone(folder: Folder, factor: float) -> None:
    """A deep network: from the second step on each run has other gradients, and much the same loss."""

    def deep(made: Made, replicas: int, seed: int, times: float = 1.0) -> Trace:
        rng = np.random.default_rng(seed)

        def step(made: Made, k: int) -> None:
            gradient = np.linspace(1, 2, 64).astype("f4") * (1 + (0.4 * rng.normal(size=64).astype("f4") if k else 0))
            loss = (1.0 + (0.005 * float(rng.normal()) if k else 0.0)) * (times if k else 1.0)
            for r in range(replicas):
                rows = ROWS[8 * k + 8 // replicas * r : 8 * k + 8 // replicas * (r + 1)]
                weights = {"w": np.full(64, 1.0 - 0.1 * (k + 1), "f4")}
                made.step(k, {"w": gradient / replicas}, weights, replica=r, rows=rows, objective=loss / replicas)
            made.report("loss", "train/reduce", k, loss)

        return loop(made, step, weights=64)

    noise = [deep(folder.made(), 1, seed) for seed in (1, 2, 3)]
    found = judge(case_of(deep(folder.made(), 1, 0), deep(folder.made("1x2"), 2, 4, factor), noise=noise))
    assert any("rounding errors are amplified" in note for note in found.notes)
    assert codes(found) == (["loss-scaling"] if factor == 2 else [])
    if factor == 2:
        assert found.causes[0].summary.startswith("The loss that is minimized is, from step 1 on,")
        assert (
            "the number of replicas is 2" in found.causes[0].summary
            or "x the gradient of one device" in found.causes[0].summary
        )


def test_an_update_after_fewer_of_the_same_batches_is_accumulation_and_no_smaller_batch(folder: Folder) -> None:
    def reference(made: Made, k: int) -> None:
        made.step(k, {"w": np.zeros(9, "f4")}, {"w": np.zeros(9, "f4")}, rows=ROWS[8 * k : 8 * k + 8], objective=1.0, runs=2)

    def topology(made: Made, k: int) -> None:
        for r in range(2):
            rows = ROWS[4 * k + 2 * r : 4 * k + 2 * r + 2]
            made.step(k, {"w": np.zeros(9, "f4")}, {"w": np.zeros(9, "f4")}, replica=r, rows=rows, objective=0.5)

    found = judge(case_of(loop(folder.made(), reference), loop(folder.made("1x2"), topology)))
    assert codes(found) == ["accumulation"]
    assert found.causes[0].summary == (
        "An update is made after 1 batch on 2 replicas, and after 2 on one device. Each batch is the same."
    )
    assert found.causes[0].fix.startswith("Count the batches outside of `Strategy.run`")
