"""Each cause is named when it is planted, before any that resembles it, and not on a correct program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.errors import WrongUse
from emulate.probe.trace import Trace
from emulate.verify import causes
from emulate.verify.case import Case, Outcome, Rerun
from emulate.verify.causes import clipping
from emulate.verify.causes.framework_limits import LIMITS
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Adam, Array, Problem, Sgd, Weights, clipped

UNEVEN: dict[str, Any] = {"num_rows": 166, "steps": 4}


def codes(found: Judgement) -> list[str]:
    return [cause.code for cause in found.causes]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
@pytest.mark.parametrize(
    "options", [{}, UNEVEN, {"l2": 1e-3}, {"clip": 0.5}, {"l2": 1e-3, **UNEVEN}], ids=["plain", "uneven", "l2", "clip", "both"]
)
def test_a_correct_program_has_no_cause(folder: Folder, optimizer: type, options: dict[str, Any]) -> None:
    right = Problem(optimizer=optimizer, **{"steps": 5, **options})
    facts = {"optimizers": {"sgd": {"global_clipnorm": options.get("clip")}}, "regularized": ["dense_0/kernel"]}
    found = judge(folder.case(right, right, facts=facts))
    assert (found.verdict, codes(found), found.first_divergence, found.not_compared) == ("equivalent", [], None, ())
    assert found.steps == right.steps
    assert found.samples.missing == found.samples.repeated == 0


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_mean_over_the_replica_is_loss_scaling(folder: Folder, optimizer: type, replicas: int) -> None:
    right = Problem(optimizer=optimizer, steps=4)
    found = judge(folder.case(right, Problem(optimizer=optimizer, steps=4, scale=lambda rows, batch, n: 1 / rows), replicas))
    assert codes(found) == ["loss-scaling"]
    assert f"{replicas}.0000 times too large" in found.causes[0].summary
    assert ("hardly show" in found.causes[0].evidence) == (optimizer is Adam)


def test_a_loss_divided_twice_is_loss_scaling(folder: Folder) -> None:
    found = judge(folder.case(Problem(steps=3), Problem(steps=3, scale=lambda rows, batch, n: 1 / batch / n)))
    assert codes(found) == ["loss-scaling"]
    assert "4.0000 times too small" in found.causes[0].summary


@pytest.mark.parametrize("times", [1.01, 0.5, 17.0])
def test_a_factor_that_means_nothing_is_loss_scaling_where_many_elements_have_it(folder: Folder, times: float) -> None:
    wrong = Problem(steps=3, scale=lambda rows, batch, n: times / batch)
    found = judge(folder.case(Problem(steps=3), wrong))
    assert codes(found) == ["loss-scaling"]
    assert f"{times:.4g} times the reference's" in found.causes[0].summary


def test_a_right_regularization_beside_a_loss_that_is_scaled_wrong_is_not_blamed(folder: Folder) -> None:
    right = Problem(l2=1e-2, steps=3)
    found = judge(folder.case(right, Problem(l2=1e-2, steps=3, scale=lambda rows, batch, n: 1 / rows)))
    assert codes(found) == ["loss-scaling"]
    assert "regularization term of dense_0/kernel, dense_1/kernel and 1 more is not scaled" in found.causes[0].evidence


def test_gradients_summed_by_the_program_and_the_optimizer_are_double_all_reduce(folder: Folder) -> None:
    right = Problem(steps=3)
    case = folder.case(right, right)
    made = folder.made("1x4")
    made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": 4, "local": 4})
    for k, step in enumerate(case.topology.steps("sgd")):
        whole = {name: np.sum([one.gradients[name].read() for one in step.values()], axis=0) for name in step[0].gradients}
        weights = {
            name: variable.array.read() - 0.3 * whole[name] for name, variable in step[0].weights.items() if variable.array
        }
        for replica, one in step.items():
            made.step(k, whole, weights, replica=replica, rows=one.rows, objective=one.objective)
    found = judge(Case(case.reference, made.trace(), case.noise))
    assert codes(found) == ["double-all-reduce"]
    assert "4.0000 times" in found.causes[0].summary


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_a_mean_of_means_over_uneven_shards_is_uneven_batch(folder: Folder, optimizer: type) -> None:
    right = Problem(optimizer=optimizer, **UNEVEN)
    found = judge(folder.case(right, Problem(optimizer=optimizer, scale=lambda rows, batch, n: 1 / (rows * n), **UNEVEN)))
    assert codes(found) == ["uneven-batch"]
    assert "step 3 has 6, 6, 5 and 5 rows" in found.causes[0].summary
    assert found.first_divergence is not None
    assert found.first_divergence.step == 3


def test_uneven_shards_and_a_wrong_factor_in_one_step_are_both_named(folder: Folder) -> None:
    def one_row_more(rows: Array, n: int) -> list[Array]:
        return [rows[: len(rows) // n + 1], *np.array_split(rows[len(rows) // n + 1 :], n - 1)]

    wrong = Problem(steps=2, shards=one_row_more, scale=lambda rows, batch, n: 1 / rows)
    found = judge(folder.case(Problem(steps=2), wrong))
    assert codes(found) == ["loss-scaling", "uneven-batch"]


def test_a_count_of_the_replica_under_even_shards_is_local_normalization(folder: Folder) -> None:
    # The sum of rows that count is even-handed on one device; on several each replica divides by its own share.
    counts = {0: 10, 1: 14, 2: 9, 3: 15}
    calls = iter(range(10_000))

    def scale(rows: int, batch: int, n: int) -> float:
        return 1 / batch if n == 1 else 1 / (n * counts[next(calls) % 4])

    found = judge(folder.case(Problem(steps=2), Problem(steps=2, scale=scale)))
    assert codes(found) == ["local-normalization"]


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_regularization_in_full_on_every_replica_is_named_with_its_coefficient(folder: Folder, optimizer: type) -> None:
    right = Problem(l2=1e-4, optimizer=optimizer, steps=4)
    found = judge(folder.case(right, Problem(l2=1e-4, optimizer=optimizer, steps=4, reg_times=lambda n: 1.0)))
    assert codes(found) == ["regularization-per-replica"]
    assert "coefficient of 0.0001, 4 times instead of once" in found.causes[0].evidence


def test_regularization_of_variables_without_a_regularizer_is_not_believed(folder: Folder) -> None:
    right, wrong = Problem(l2=1e-3, steps=3), Problem(l2=1e-3, steps=3, reg_times=lambda n: 1.0)
    found = judge(folder.case(right, wrong, facts={"regularized": ["embedding"]}))
    assert codes(found) == ["unexplained"]


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_an_optimizer_that_clips_before_the_sum_is_seen_in_the_numbers(folder: Folder, optimizer: type) -> None:
    right = Problem(clip=0.5, optimizer=optimizer, steps=4)
    wrong = Problem(clip=0.5, clip_first=True, optimizer=optimizer, steps=4)
    found = judge(folder.case(right, wrong, facts={"optimizers": {"sgd": {"global_clipnorm": 0.5}}}))
    assert codes(found) == ["clip-before-reduce"]
    assert "global_clipnorm=0.5" in found.causes[0].summary


def _clipped_locals(problem: Problem) -> Problem:
    """What a probe sees of a loop that clips before apply: clipped local gradients."""
    inner = problem.gradient

    def gradient(weights: Weights, rows: Array, scale: float, reg: float) -> tuple[Weights, float]:
        found, loss = inner(weights, rows, scale, reg)
        return clipped(found, 0.25), loss

    problem.gradient = gradient  # type: ignore[method-assign]
    return problem


@pytest.mark.parametrize("can_rerun", [True, False])
def test_a_loop_that_clips_before_apply_is_not_taken_for_local_normalization(folder: Folder, can_rerun: bool) -> None:
    right, wrong = _clipped_locals(Problem(steps=3)), _clipped_locals(Problem(steps=3))
    switches = {"no-clipping": (Problem(steps=3), Problem(steps=3))} if can_rerun else {}
    found = judge(folder.case(right, wrong, facts={"clip_calls": 1}, switches=switches))
    assert codes(found) == ["clip-before-reduce"]


def test_clipping_that_hides_a_wrong_factor_is_switched_off_and_both_are_named(folder: Folder) -> None:
    def wrong() -> Problem:
        return Problem(steps=3, scale=lambda rows, batch, n: 1 / rows)

    switches = {"no-clipping": (Problem(steps=3), wrong())}
    case = folder.case(_clipped_locals(Problem(steps=3)), _clipped_locals(wrong()), facts={"clip_calls": 1}, switches=switches)
    assert codes(judge(case)) == ["clip-before-reduce", "loss-scaling"]


def test_a_difference_that_nothing_explains_is_unexplained(folder: Folder) -> None:
    def combine(gradients: list[Weights]) -> Weights:
        return {n: sum(g[n] for g in gradients) + np.float32(0.01) for n in gradients[0]}  # type: ignore[misc]

    found = judge(folder.case(Problem(steps=3), Problem(steps=3, combine=combine)))
    assert codes(found) == ["unexplained"]
    assert found.causes[0].summary.startswith("From step 0 on the weight of ")


def test_a_reported_loss_that_is_divided_once_too_often_is_loss_report(folder: Folder) -> None:
    found = judge(folder.case(Problem(steps=5), Problem(steps=5, reported=lambda losses, n: float(np.mean(losses)))))
    assert codes(found) == ["loss-report"]
    assert "divided by the number of replicas (4) once too often" in found.causes[0].summary


def test_the_loss_of_the_first_replica_is_named_as_such(folder: Folder) -> None:
    found = judge(folder.case(Problem(steps=5), Problem(steps=5, reported=lambda losses, n: float(losses[0] * n))))
    assert codes(found) == ["loss-report"]
    assert "that of replica 0 alone" in found.causes[0].summary


def test_a_loss_that_is_only_a_consequence_of_its_scale_is_not_reported_again(folder: Folder) -> None:
    scaled = Problem(steps=5, optimizer=Adam, scale=lambda rows, batch, n: 1 / rows)
    assert codes(judge(folder.case(Problem(steps=5, optimizer=Adam), scaled))) == ["loss-scaling"]


# Traces by hand ---------------------------------------------------------------------------------------------------------

ROWS = [f"row-{k}" for k in range(64)]
LOCALS = np.random.default_rng(0).normal(size=(3, 4, 128)).astype("f4")
"""Local gradients: step, replica, element."""


def weights_after(k: int, gradients: Array = LOCALS) -> Array:
    return np.float32(1) - np.float32(0.1) * gradients[: k + 1].sum(axis=(0, 1), dtype="f4")


def right_reference(made: Made, k: int) -> None:
    made.step(k, {"w": LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, rows=ROWS[8 * k : 8 * k + 8], objective=1.0)


def right_topology(made: Made, k: int, **changes: Any) -> None:
    for r in range(4):
        rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
        made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25, **changes)


def hand_made(folder: Folder, topology: Any, **options: Any) -> Case:
    return Case(loop(folder.made(), right_reference), loop(folder.made("1x4"), topology), **options)


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
    return Case(trained("1x1", 1.0), trained(topology, local), rerun=lambda switch: again if switch == "no-clipping" else None)


@pytest.mark.parametrize("topology", ["1x2", "1x3", "1x4"])
def test_a_model_of_one_number_whose_gradient_is_replicas_times_too_large_is_loss_scaling(
    folder: Folder, topology: str
) -> None:
    found = judge(one_number(folder, topology, 1.0))
    assert codes(found) == ["loss-scaling"]
    assert f"{topology[2:]}.0000 times too large" in found.causes[0].summary


def test_equal_gradients_of_equal_rows_are_not_taken_for_sums(folder: Folder) -> None:
    def trained(shape: str) -> Trace:
        def step(made: Made, k: int) -> None:
            for r in range(int(shape[2:])):
                rows = ["the row"] * (4 // int(shape[2:]))
                after = {"w": np.full(9, 1.0 - 0.1 * int(shape[2:]) * (k + 1), "f4")}
                made.step(k, {"w": np.ones(9, "f4")}, after, replica=r, rows=rows, objective=1.0)

        return loop(folder.made(shape), step, weights=9)

    assert codes(judge(Case(trained("1x1"), trained("1x2")))) == ["loss-scaling"]


def test_a_model_of_one_number_with_another_factor_is_unexplained(folder: Folder) -> None:
    assert codes(judge(one_number(folder, "1x2", 0.7))) == ["unexplained"]


def test_a_model_of_one_number_that_every_replica_clips_is_not_taken_for_loss_scaling(folder: Folder) -> None:
    assert codes(judge(one_number(folder, "1x2", 1.0, switched=0.5, clip_calls=1))) == ["clip-before-reduce"]
    assert codes(judge(one_number(folder, "1x2", 1.0, switched=1.0, clip_calls=1))) == ["loss-scaling"]


def test_replicas_that_follow_their_own_gradients_miss_the_all_reduce(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            own = np.float32(1) - np.float32(0.1) * LOCALS[: k + 1, r].sum(axis=0)
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": own}, replica=r, rows=ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2], objective=0.25
            )

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["missing-all-reduce"]
    assert "trains a model of its own" in found.causes[0].summary


def test_replicas_that_all_follow_one_miss_the_all_reduce(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            one = np.float32(1) - np.float32(0.1) * LOCALS[: k + 1, 2].sum(axis=0)
            made.step(
                k, {"w": LOCALS[k, r]}, {"w": one}, replica=r, rows=ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2], objective=0.25
            )

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["missing-all-reduce"]
    assert "apply that of replica 2" in found.causes[0].summary


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
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.replica) == (1, 1)
    assert found.first_divergence.error > 0.1


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

    def rerun(switch: str) -> Rerun | None:
        if switch != "batchnorm-synchronized" or switched is None:
            return None
        return Rerun(loop(folder.made(), right_reference), loop(folder.made("1x4"), switched))

    made = folder.made("1x4")
    made.event({"event": "program", "batchnorm": ["moving_mean"]})
    case = Case(loop(folder.made(), reference), loop(made, unsynchronized), rerun=rerun)
    return judge(case, allow)


def test_batchnorm_is_confirmed_by_synchronizing_it_and_then_may_be_allowed(folder: Folder) -> None:
    found = batchnorm(folder, right_topology, [])
    assert (found.verdict, codes(found), found.causes[0].by_design) == ("divergent", ["batchnorm-local-statistics"], True)
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
    assert "BatchNormalization reaches them" in found.not_compared[0]


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
    assert judge(Case(loop(folder.made(), right_reference), loop(made, topology))).verdict == "equivalent"


def test_a_loop_that_adds_up_means_by_itself_is_loss_scaling(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        after = np.float32(1) + np.float32(4) * (weights_after(k) - np.float32(1))
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": 4 * LOCALS[k, r]}, {"w": after}, replica=r, rows=rows, objective=1.0, tape=True)

    assert codes(judge(hand_made(folder, topology))) == ["loss-scaling"]


def test_the_same_random_numbers_on_all_replicas_are_by_design_and_can_be_allowed(folder: Folder) -> None:
    case = hand_made(folder, lambda made, k: right_topology(made, k, draws=[f"mask-{k}"]))
    found = judge(case)
    assert (found.verdict, codes(found), found.causes[0].by_design) == ("divergent", ["identical-dropout"], True)
    again = hand_made(Folder(case.topology.directory / "again"), lambda made, k: right_topology(made, k, draws=[f"mask-{k}"]))
    allowed = judge(again, allow=["identical-dropout"])
    assert (allowed.verdict, allowed.causes[0].allowed) == ("equivalent", True)


def test_a_strategy_with_fewer_replicas_than_devices_is_missing_some(folder: Folder) -> None:
    reference = loop(folder.made(), right_reference)
    topology = loop(folder.made("1x4"), right_reference, replicas=2)
    found = judge(Case(reference, topology))
    assert codes(found)[0] == "replicas-missing"
    assert "2 of 4 devices train" in found.causes[0].summary


def test_a_strategy_for_one_host_on_two_trains_two_models(folder: Folder) -> None:
    made = folder.made("2x1")
    for host in (0, 1):
        made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": 1, "local": 1}, host)
        made.initial({"w": np.ones(128, "f4")}, host=host)
        made.step(0, {"w": LOCALS[0, 0]}, {"w": weights_after(0)}, host=host, rows=ROWS[:8], objective=1.0)
    found = judge(Case(loop(folder.made(), right_reference), made.trace()))
    assert codes(found) == ["replicas-missing"]
    assert "Each of the 2 hosts trains a model of its own" in found.causes[0].summary


def test_replicas_that_start_apart_are_initial_weights(folder: Folder) -> None:
    made = folder.made("1x4")
    for replica in range(4):
        made.initial({"w": np.full(128, replica, "f4")}, replica=replica)
    for k in range(3):
        right_topology(made, k)
    found = judge(Case(loop(folder.made(), right_reference), made.trace()))
    assert codes(found) == ["initial-weights"]


def test_a_run_that_starts_from_other_weights_is_initial_weights(folder: Folder) -> None:
    made = folder.made("1x4")
    for replica in range(4):
        made.initial({"w": np.full(128, 7, "f4")}, replica=replica)
    for k in range(3):
        right_topology(made, k)
    found = judge(Case(loop(folder.made(), right_reference), made.trace()))
    assert codes(found) == ["initial-weights"]
    assert found.first_divergence is not None
    assert found.first_divergence.kind == "initial-weight"


def test_a_reference_that_does_not_repeat_is_named_before_anything_else(folder: Folder) -> None:
    def other(made: Made, k: int) -> None:
        made.step(k, {"w": LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, rows=ROWS[8 * k + 1 : 8 * k + 9], objective=1.0)

    found = judge(hand_made(folder, right_topology, repeat=loop(folder.made(), other)))
    assert codes(found) == ["unseeded-randomness"]
    assert "the choice or contents of the rows" in found.causes[0].summary


def test_rows_that_every_replica_has_are_repeated(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k : 8 * k + 8]
            made.step(k, {"w": LOCALS[k].sum(axis=0) / 4}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["samples-repeated"]
    assert "Every replica trains on the same rows" in found.causes[0].summary
    assert found.samples.repeated == 72


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


def test_a_number_that_is_lost_on_several_devices_only_is_nan(folder: Folder) -> None:
    def topology(made: Made, k: int) -> None:
        for r in range(4):
            gradient = LOCALS[k, r] * (np.float32(np.nan) if (k, r) == (2, 3) else 1)
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2] if (k, r) != (2, 3) else []
            more = ROWS[22:24] if (k, r) == (2, 0) else []
            made.step(k, {"w": gradient}, {"w": weights_after(k)}, replica=r, rows=[*rows, *more], objective=0.25)

    found = judge(hand_made(folder, topology))
    assert codes(found) == ["nan"]
    assert "A replica without rows divides by zero" in found.causes[0].summary
    assert "on replica 3" in found.causes[0].evidence
    assert found.first_divergence is not None
    assert found.first_divergence.non_finite


def test_nothing_is_called_equivalent_without_its_rows(folder: Folder) -> None:
    def without(made: Made, k: int) -> None:
        made.step(k, {"w": LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, objective=1.0)

    found = judge(Case(loop(folder.made(), without), loop(folder.made("1x1"), without)))
    assert found.verdict == "unverified"
    assert found.not_compared == ("data: the rows of the batches were not seen",)


# Runs that did not end well ---------------------------------------------------------------------------------------------


def ended(folder: Folder, topology: str = "2x1", **outcome: Any) -> Judgement:
    return judge(Case(folder.made().with_nothing(), folder.made(topology).with_nothing(), outcome=Outcome(**outcome)))


@pytest.mark.parametrize("code", ["host-exited", "unequal-steps", "collective-mismatch"])
def test_the_hang_judges_suspicion_is_reported_with_what_hosts_were_doing(folder: Folder, code: str) -> None:
    where = "host 0 waits in all_reduce; host 1 is over"
    found = ended(folder, hung="hang", suspect=code, where=where, hosts={0: "ended", 1: "returned"})
    assert (found.verdict, found.reason, codes(found)) == ("hung", "hang", [code])
    assert where in found.causes[0].evidence


def test_a_host_that_was_killed_is_named_when_a_peer_raises(folder: Folder) -> None:
    hosts, status = {0: "raised", 1: "killed"}, {0: 1, 1: -9}
    found = ended(folder, failure="UnavailableError: Connection reset by peer", hosts=hosts, codes=status)
    assert (found.verdict, codes(found)) == ("failed", ["host-exited"])
    assert "Host 1 left (killed by signal 9)" in found.causes[0].summary


@pytest.mark.parametrize(
    "failure",
    [
        "Collective instance 133 expected type 0 and data_type 9 but got type 0 and data_type 3",
        "Shape mismatch in the collective instance 7. Op at device /job:worker/task:1 expected shape [98]",
    ],
)
def test_tensorflows_own_word_of_a_mismatch_is_quoted(folder: Folder, failure: str) -> None:
    text = f'File "collective_mismatch.py", line 58\nInternalError: aborted by: {failure}\nThe error could be'
    found = ended(folder, failure=text, hosts={0: "raised", 1: "raised"})
    assert codes(found) == ["collective-mismatch"]
    assert found.causes[0].evidence.startswith(f"TensorFlow says: {failure}; host 0: raised after ")


def test_a_program_that_raises_has_no_cause_of_ours(folder: Folder) -> None:
    found = ended(folder, "1x4", failure="Traceback ...\nValueError: wrong", hosts={0: "raised"})
    assert (found.verdict, codes(found)) == ("failed", [])


@pytest.mark.parametrize(
    "failure",
    [
        (
            "RuntimeError: Exception encountered when calling Cond.call().\n"
            "`merge_call` called while defining a new graph or a tf.function."
        ),
        "in _maybe_symbolic_build\nInvalidArgumentError: Inputs to operation AddN must have the same size and shape",
        "conv2d_1/ReluGrad must have the same size and shape.  Input 0: [0,6,6,8] != input 1: [0,8,8,1]",
        "ValueError: Attempt to convert a value (PerReplica:{}) with an unsupported type",
        "InvalidArgumentError: Trying to access resource w located in device /device:CPU:1 from device /device:CPU:0",
        "InvalidArgumentError: You must feed a value for placeholder tensor 'cond/else/_1/cond/Placeholder_2'",
        "InvalidArgumentError: No OpKernel was registered to support Op 'NcclAllReduce' used by {{node}}",
        "UnimplementedError: A deterministic GPU implementation of AdjustContrastv2 is not currently available.",
        "UnimplementedError: Determinism is not yet supported in GPU implementation of Bincount.",
        "ValueError: Cannot create a tensor proto whose content is larger than 2GB.",
        "in _make_rebatch_fn get_static_batch_dim\nIndexError: list index out of range",
        "AttributeError: 'Mean' object has no attribute 'reset_states'",
        "ValueError: destinations can not be empty",
        "TypeError: Binding inputs to tf.function failed due to `'PerReplica' object has no attribute 'dtype'`.",
    ],
)
def test_a_known_fault_of_the_framework_is_named_with_its_way_round(folder: Folder, failure: str) -> None:
    found = ended(folder, "1x4", failure=f"Traceback ...\n{failure}", hosts={0: "raised"})
    assert codes(found) == ["framework-limit"]
    assert found.causes[0].fix in {limit.fix for limit in LIMITS}


# The catalogue ----------------------------------------------------------------------------------------------------------


def test_every_cause_says_what_it_means_what_it_looks_at_and_what_to_do() -> None:
    found = causes.all_causes()
    assert len({cause.code for cause in found}) == len(found)
    for cause in found:
        assert cause.code == cause.code.lower().replace("_", "-")
        for text in (cause.title, cause.meaning, cause.evidence, cause.fix):
            assert len(text) > 10
            assert "  " not in text.replace("\n    ", "\n").replace("  #", " #")


def test_a_cause_that_is_unknown_is_refused_with_the_nearest_one() -> None:
    assert causes.get("loss-scaling").code == "loss-scaling"
    with pytest.raises(WrongUse) as refused:
        causes.get("loss-scalling")
    assert str(refused.value) == (
        "A cause must be one of the catalogue. Received: code='loss-scalling'. "
        "Did you mean 'loss-scaling'? `gpudist causes` lists all."
    )


@pytest.mark.parametrize(
    ("option", "cure"),
    [("clipnorm", "clip_by_norm"), ("clipvalue", "clip_by_value"), ("global_clipnorm", "clip_by_global_norm")],
)
def test_the_cure_of_clipping_clips_in_the_way_of_the_option(option: str, cure: str) -> None:
    assert clipping.cure(option).count(f"tf.{cure}(") == 1


def test_a_loss_that_no_report_shows_is_said_not_to_be_seen(folder: Folder) -> None:
    assert "reports was not seen" in judge(hand_made(folder, right_topology)).notes[-1]
    reported = judge(folder.case(Problem(steps=2), Problem(steps=2)))
    assert reported.notes == ()


def test_weights_that_move_by_one_factor_where_gradients_agree_are_told_with_it(folder: Folder) -> None:
    wrong = Problem(steps=3, optimizer=lambda: Sgd(0.4))
    found = judge(folder.case(Problem(steps=3), wrong))
    assert codes(found) == ["unexplained"]
    assert "the weights change by 4 times" in found.causes[0].summary
    assert "update of the reference = 4.0000" in found.causes[0].evidence
