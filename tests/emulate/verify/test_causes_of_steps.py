"""Causes in the numbers of a step: each is named when it is planted in a simulated training, and not on a correct one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate.verify import causes
from emulate.verify.judge import _UNEVEN_TOO, judge
from tests.emulate.verify.cases import Folder, case_of, codes
from tests.emulate.verify.simulation import Adam, Array, Problem, Sgd, Weights, clipped

UNEVEN: dict[str, Any] = {"num_rows": 166, "steps": 4}


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
    assert f"{replicas}x too large" in found.causes[0].summary
    assert ("hardly show" in found.causes[0].evidence) == (optimizer is Adam)


def test_a_loss_divided_twice_is_loss_scaling(folder: Folder) -> None:
    found = judge(folder.case(Problem(steps=3), Problem(steps=3, scale=lambda rows, batch, n: 1 / batch / n)))
    assert codes(found) == ["loss-scaling"]
    assert "4x too small" in found.causes[0].summary


def test_in_a_step_that_gpudist_core_distributes_the_cure_is_a_mean(folder: Folder) -> None:
    wrong = Problem(steps=3, scale=lambda rows, batch, n: 1 / batch / n)
    found = judge(folder.case(Problem(steps=3), wrong, facts={"distributed": ["model"]}))
    assert codes(found) == ["loss-scaling"]
    assert "loss = tf.reduce_mean(per_example_loss)" in found.causes[0].fix


@pytest.mark.parametrize("times", [1.01, 0.5, 17.0])
def test_a_factor_that_means_nothing_is_loss_scaling_where_many_elements_have_it(folder: Folder, times: float) -> None:
    wrong = Problem(steps=3, scale=lambda rows, batch, n: times / batch)
    found = judge(folder.case(Problem(steps=3), wrong))
    assert codes(found) == ["loss-scaling"]
    assert f"{times:.4g}x the gradient of one device" in found.causes[0].summary


def test_a_right_regularization_beside_a_loss_that_is_scaled_wrong_is_not_blamed(folder: Folder) -> None:
    right = Problem(l2=1e-2, steps=3)
    found = judge(folder.case(right, Problem(l2=1e-2, steps=3, scale=lambda rows, batch, n: 1 / rows)))
    assert codes(found) == ["loss-scaling"]
    assert "regularization term of dense_0/kernel, dense_1/kernel and 1 more is not scaled" in found.causes[0].evidence


@pytest.mark.parametrize(("part", "said"), [(1, "4x too large"), (1 / 16, "twice, in the program and")])
def test_gradients_summed_by_the_program_and_the_optimizer_are_double_all_reduce(
    folder: Folder, part: float, said: str
) -> None:
    right = Problem(steps=3)
    case = folder.case(right, right)
    made = folder.made("1x4")
    made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": 4, "local": 4})
    for k, step in enumerate(case.topology.steps("sgd")):
        whole = {
            name: np.float32(part) * np.sum([one.gradients[name].read() for one in step.values()], axis=0)
            for name in step[0].gradients
        }
        weights = {
            name: variable.array.read() - 0.3 * whole[name] for name, variable in step[0].weights.items() if variable.array
        }
        for replica, one in step.items():
            made.step(k, whole, weights, replica=replica, rows=one.rows, objective=one.objective)
    found = judge(case_of(case.reference, made.trace(), folder.noise(right)))
    assert codes(found) == ["double-all-reduce"]
    assert said in found.causes[0].summary


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_a_mean_of_means_over_uneven_shards_is_uneven_batch(folder: Folder, optimizer: type) -> None:
    right = Problem(optimizer=optimizer, **UNEVEN)
    found = judge(folder.case(right, Problem(optimizer=optimizer, scale=lambda rows, batch, n: 1 / (rows * n), **UNEVEN)))
    assert codes(found) == ["uneven-batch"]
    assert "in step 3 the replicas have 6, 6, 5 and 5 examples" in found.causes[0].summary
    assert found.first_divergence is not None
    assert found.first_divergence.step == 3


def test_uneven_shards_and_a_wrong_factor_in_one_step_are_both_named(folder: Folder) -> None:
    def one_row_more(rows: Array, n: int) -> list[Array]:
        return [rows[: len(rows) // n + 1], *np.array_split(rows[len(rows) // n + 1 :], n - 1)]

    wrong = Problem(steps=2, shards=one_row_more, scale=lambda rows, batch, n: 1 / rows)
    found = judge(folder.case(Problem(steps=2), wrong))
    assert codes(found) == ["loss-scaling", "uneven-batch"]


@pytest.mark.parametrize(("off", "told"), [(1.0, "by its own count"), (1.008, "no count explains it")])
def test_a_count_of_the_replica_under_even_shards_is_local_normalization(folder: Folder, off: float, told: str) -> None:
    # The sum of rows that count is even-handed on one device; on several each replica divides by its own share.
    counts = {0: 10, 1: 14, 2: 9, 3: 15}
    calls = iter(range(10_000))

    def scale(rows: int, batch: int, n: int) -> float:
        return 1 / batch if n == 1 else off / (n * counts[next(calls) % 4])

    found = judge(folder.case(Problem(steps=2), Problem(steps=2, scale=scale)))
    assert codes(found) == ["local-normalization"]
    assert told in found.causes[0].summary  # weights of a count add up to the number of replicas, those of a root do not


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_regularization_in_full_on_every_replica_is_named_with_its_coefficient(folder: Folder, optimizer: type) -> None:
    right = Problem(l2=1e-4, optimizer=optimizer, steps=4)
    found = judge(folder.case(right, Problem(l2=1e-4, optimizer=optimizer, steps=4, reg_times=lambda n: 1.0)))
    assert codes(found) == ["regularization-per-replica"]
    assert "coefficient of 0.0001, added 4 times instead of once" in found.causes[0].evidence


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


@pytest.mark.parametrize(("option", "heading"), [("global_clipnorm", ""), ("clipnorm", "clipnorm")])
def test_a_finding_names_the_fixes_of_its_text_by_their_headings(folder: Folder, option: str, heading: str) -> None:
    right, wrong = Problem(clip=0.5, steps=4), Problem(clip=0.5, clip_first=True, steps=4)
    (cause,) = judge(folder.case(right, wrong, facts={"optimizers": {"sgd": {option: 0.5}}})).causes
    assert (cause.code, cause.fixes) == ("clip-before-reduce", (heading,))
    assert cause.fixes[0] in causes.get(cause.code).text.fixes


@pytest.mark.parametrize("weighted", [False, True])
def test_clipping_that_may_hide_an_uneven_batch_is_told_beside_it(folder: Folder, weighted: bool) -> None:
    right, wrong = Problem(clip=0.5, **UNEVEN), Problem(clip=0.5, clip_first=True, **UNEVEN)
    facts = {"optimizers": {"sgd": {"global_clipnorm": 0.5}}, "train_steps": weighted}
    found = judge(folder.case(right, wrong, facts=facts))
    assert codes(found) == ["clip-before-reduce"]
    assert [note for note in found.notes if "uneven-batch" in note] == (
        [] if weighted else [_UNEVEN_TOO.format(step=UNEVEN["steps"] - 1)]
    )


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
    found = judge(folder.case(right, wrong, facts={"clipped_by": ["clip_by_global_norm"]}, switches=switches))
    assert codes(found) == ["clip-before-reduce"]
    of_gpudist_core = {"clipped_by": ["clip_by_global_norm"], "distributed": ["model"]}
    found = judge(folder.case(right, wrong, facts=of_gpudist_core, switches=switches))
    assert "Let the optimizer clip" in found.causes[0].fix
    of_each = judge(folder.case(right, wrong, facts={"clipped_by": ["clip_by_norm"]}, switches=switches))
    assert "grads = [tf.clip_by_norm(g, LIMIT) for g in grads]" in of_each.causes[0].fix


def test_clipping_that_hides_a_wrong_factor_is_switched_off_and_both_are_named(folder: Folder) -> None:
    def wrong() -> Problem:
        return Problem(steps=3, scale=lambda rows, batch, n: 1 / rows)

    switches = {"no-clipping": (Problem(steps=3), wrong())}
    case = folder.case(
        _clipped_locals(Problem(steps=3)),
        _clipped_locals(wrong()),
        facts={"clipped_by": ["clip_by_global_norm"]},
        switches=switches,
    )
    assert codes(judge(case)) == ["clip-before-reduce", "loss-scaling"]


def test_clipping_is_found_beside_what_nothing_explains_by_the_norms_alone(folder: Folder) -> None:
    def wrong() -> Problem:
        problem = Problem(steps=3)
        inner = problem.gradient

        def gradient(weights: Weights, rows: Array, scale: float, reg: float) -> tuple[Weights, float]:
            found, loss = inner(weights, rows, scale, reg)
            return {name: g + np.square(g) for name, g in found.items()}, loss

        problem.gradient = gradient  # type: ignore[method-assign]
        return problem

    switches = {"no-clipping": (Problem(steps=3), wrong())}
    case = folder.case(
        _clipped_locals(Problem(steps=3)),
        _clipped_locals(wrong()),
        facts={"clipped_by": ["clip_by_global_norm"]},
        switches=switches,
    )
    found = judge(case)
    assert codes(found) == ["clip-before-reduce", "unexplained"]
    assert "each has the same norm as that of one device, 0.25" in found.causes[0].evidence


def test_a_difference_that_nothing_explains_is_unexplained(folder: Folder) -> None:
    def combine(gradients: list[Weights]) -> Weights:
        return {n: sum(g[n] for g in gradients) + np.float32(0.01) for n in gradients[0]}  # type: ignore[misc]

    found = judge(folder.case(Problem(steps=3), Problem(steps=3, combine=combine)))
    assert codes(found) == ["unexplained"]
    assert found.causes[0].summary.startswith("From step 0 on the weight of ")
    assert found.causes[0].fix.startswith("Look at what the gradient of the first differing")
    gathers = judge(folder.case(Problem(steps=3), Problem(steps=3, combine=combine), facts={"gathers": True}))
    assert "labels = offset + tf.range(" in gathers.causes[0].fix


def test_a_reported_loss_that_is_divided_once_too_often_is_loss_report(folder: Folder) -> None:
    found = judge(folder.case(Problem(steps=5), Problem(steps=5, reported=lambda losses, n: float(np.mean(losses)))))
    assert codes(found) == ["loss-report"]
    assert found.causes[0].summary.endswith("divided by the number of replicas (4) once too often, so it is 4x too small.")


def test_the_loss_of_the_first_replica_is_named_as_such(folder: Folder) -> None:
    found = judge(folder.case(Problem(steps=5), Problem(steps=5, reported=lambda losses, n: float(losses[0] * n))))
    assert codes(found) == ["loss-report"]
    assert "the loss of replica 0 only" in found.causes[0].summary


def test_a_loss_that_is_only_a_consequence_of_its_scale_is_not_reported_again(folder: Folder) -> None:
    scaled = Problem(steps=5, optimizer=Adam, scale=lambda rows, batch, n: 1 / rows)
    assert codes(judge(folder.case(Problem(steps=5, optimizer=Adam), scaled))) == ["loss-scaling"]
