"""Two arms with a runner that starts nothing: which runs are made, and what the verdict is."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from emulate.errors import UsageError
from emulate.recorder import ProbePlan
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.arms import Arms
from emulate.verify.run_spec import Arm
from emulate.verify.runner import Runner
from emulate.verify.verdict import Reference, Run
from tests.emulate.verify.cases import Folder
from tests.emulate.verify.fake_runner import FakeRunner
from tests.emulate.verify.simulation import Adam, Array, Problem, train

FOUR = Topology.parse("1x4")
PROGRAM = Problem(steps=4, shards=lambda rows, number: np.array_split(np.sort(rows), number))
"""Noise runs permute rows within each replica."""
OTHER = Arm("--other", ("--other",))


def judged(folder: Folder, second: Problem | str, first: Problem = PROGRAM) -> tuple[Reference, Run, FakeRunner]:
    """Judge two arms; a text is the traceback of the second one."""

    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace | str:
        problem = second if label.startswith("1x4 second arm") else first
        if isinstance(problem, str):
            return problem
        made = folder.made(str(topology))
        made.event({"event": "program", "follows": plan.follow is not None})
        return train(problem, made, 4, noise=plan.noise_seed if plan.perturb else None).trace()

    runner = FakeRunner(answer)
    reference, run, _ = Arms(cast(Runner, runner), 0, FOUR, OTHER).judge()
    return reference, run, runner


def test_two_arms_that_agree_cost_three_starts(folder: Folder) -> None:
    reference, run, runner = judged(folder, PROGRAM)
    assert (run.verdict, run.against, run.causes) == ("equivalent", "--other", ())
    assert (reference.status, reference.steps, reference.topology, reference.against) == ("ok", 4, "1x4", "--other")
    first, second, noise = runner.made
    assert first == "1x4"
    assert second.startswith("1x4 second arm gradients of")
    assert noise.startswith("1x4 noise 1 gradients of")


def test_the_second_arm_is_the_reference_of_a_difference(folder: Folder) -> None:
    _, run, _ = judged(folder, replace(PROGRAM, scale=lambda rows, whole, replicas: 2.0 / whole))
    difference = run.first_divergence
    assert run.verdict == "divergent"
    assert difference is not None
    assert (difference.kind, difference.step) == ("gradient", 0)
    assert difference.value is not None
    assert difference.reference_value == pytest.approx(2 * difference.value, rel=1e-5)
    (finding,) = run.causes
    assert finding.code == "unexplained"
    assert finding.summary.startswith("The arms differ from step 0 on in the gradient of dense_")


@pytest.mark.parametrize("is_second", [False, True])
def test_a_number_that_one_arm_alone_loses_is_a_difference_whichever_arm_it_is(folder: Folder, is_second: bool) -> None:
    lost = replace(PROGRAM, scale=lambda rows, whole, replicas: float("nan"))
    _, run, _ = judged(folder, *((lost, PROGRAM) if is_second else (PROGRAM, lost)))
    assert run.first_divergence is not None
    assert (run.verdict, run.first_divergence.step, run.first_divergence.non_finite) == ("divergent", 0, True)
    assert np.isnan(run.first_divergence.reference_value if is_second else run.first_divergence.value)


def test_another_optimizer_of_the_second_arm_is_a_difference_of_updates(folder: Folder) -> None:
    _, run, _ = judged(folder, replace(PROGRAM, optimizer=Adam))
    assert run.verdict == "divergent"
    assert run.first_divergence is not None
    assert (run.first_divergence.kind, run.first_divergence.step) == ("weight", 0)


def test_arms_with_other_numbers_of_steps_are_not_verified(folder: Folder) -> None:
    _, run, _ = judged(folder, replace(PROGRAM, steps=3))
    assert run.verdict == "unverified"
    assert "steps-in-one-run" in run.not_compared_codes
    assert "step 3 of sgd (only one arm has it)" in run.not_compared


def test_arms_with_other_examples_say_so(folder: Folder) -> None:
    def backwards(rows: Array, number: int) -> list[Array]:
        return np.array_split(np.sort(479 - rows), number)

    _, run, _ = judged(folder, replace(PROGRAM, shards=backwards))
    assert run.verdict == "divergent"
    assert run.causes[0].evidence.endswith("The arms differ in the choice or contents of the examples (from step 0 on), too.")


def test_a_second_arm_that_fails_is_told_as_the_reference(folder: Folder) -> None:
    reference, run, _ = judged(folder, "Traceback:\nValueError: --other")
    assert (run.verdict, run.reason, reference.status, reference.failure) == (
        "failed",
        "reference",
        "failed",
        "Traceback:\nValueError: --other",
    )


def test_a_program_without_a_step_cannot_be_followed(folder: Folder) -> None:
    _, run, runner = judged(folder, PROGRAM, replace(PROGRAM, steps=0))
    assert (run.verdict, runner.made) == ("unverified", ["1x4"])
    assert run.not_compared_codes == ("arms-not-followed",)


def test_words_with_an_upper_case_name_are_environment_and_others_replace_the_arguments() -> None:
    assert Arm.parse("--xla 'a b' NAME=a=b", ["--epochs"]) == Arm("--xla 'a b' NAME=a=b", ("--xla", "a b"), (("NAME", "a=b"),))
    assert Arm.parse("NAME=1", ["--epochs"]).args == ("--epochs",)
    assert Arm.parse("name=1", []).args == ("name=1",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "--against must say in what the second arm differs. Received: --against '' with the arguments '--xla'."),
        ("--xla", "--against must say in what the second arm differs. Received: --against '--xla' with the arguments '--xla'."),
        ("'--xla", '--against must be words of a shell. Received: --against "\'--xla" (No closing quotation).'),
        ("TF_CONFIG={}", "--against must leave the variables that gpudist sets. Received: TF_CONFIG={}. Leave it out."),
    ],
)
def test_an_arm_that_cannot_be_meant_is_a_usage_error(text: str, error: str) -> None:
    with pytest.raises(UsageError) as raised:
        Arm.parse(text, ["--xla"])
    assert str(raised.value).startswith(error)
