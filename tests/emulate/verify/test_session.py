"""A verification with a runner that starts nothing: which runs are made, in which order, and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from emulate.recorder import ProbePlan
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.lab import Price
from emulate.verify.recorded import CONFIRMING_RUNS, NOISE_RUNS
from emulate.verify.session import Session
from emulate.verify.verdict import Run
from tests.emulate.verify.cases import Folder
from tests.emulate.verify.fake_runner import Answer, FakeRunner, lab_of
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem, train

RIGHT = Problem(steps=4)
WRONG = replace(RIGHT, scale=lambda rows, whole, replicas: 1.0 / rows)
FOUR = Topology.parse("1x4")


class InGraphs(Made):
    """A trace whose steps are in a function that can be evaluated."""

    def event(self, event: Any, host: int = 0) -> None:
        super().event({**event, "function": 0} if event["event"] == "step" else event, host)
        description = self.directory / f"host-{host}" / "functions" / "0" / "function.json"
        if not description.exists():
            description.parent.mkdir(parents=True)
            description.write_text(json.dumps({"captures": [], "records": []}))


def answer_of(
    folder: Folder,
    there: Problem,
    here: Problem = RIGHT,
    *,
    is_eager: bool = False,
    facts: Callable[[ProbePlan], dict[str, Any]] = lambda plan: {},
) -> Answer:
    """Answer as a program does that is `there` on four replicas and `here` on one device."""

    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace:
        replicas, problem = topology.num_replicas, there if topology == FOUR else here
        made = folder.made(str(topology))
        if not is_eager:
            made = InGraphs(made.directory, made.topology)
        made.event({"event": "program", "follows": plan.follow is not None, **facts(plan)})
        noise = plan.noise_seed if plan.perturb else None
        return train(problem, made, replicas, noise=noise).trace()

    return answer


def judged(runner: FakeRunner, allow: Sequence[str] = ()) -> tuple[Run, Price, list[str]]:
    lab = lab_of(runner)
    _, (run,), notes = Session(lab, "train.py", allow).judge([FOUR])
    return run, lab.price, [str(note) for note in notes]


def test_a_program_that_trains_the_same_model_costs_two_starts_and_two_evaluations(folder: Folder) -> None:
    runner = FakeRunner(answer_of(folder, RIGHT))
    run, price, _ = judged(runner)
    assert run.verdict == "equivalent"
    assert price == Price(starts=2, evaluations=2)
    of_run = f"gradients of {runner.traces['1x4'].directory.name}"
    assert runner.made == ["1x4", "reference", f"reference {of_run}", f"noise 1 {of_run}"]


def test_a_wrong_factor_of_the_loss_is_found_without_another_start(folder: Folder) -> None:
    runner = FakeRunner(answer_of(folder, WRONG, is_eager=True))
    run, price, _ = judged(runner)
    assert [cause.code for cause in run.causes] == ["loss-scaling"]
    assert runner.started == ["1x4", "reference", "reference compiled"]
    assert price.evaluations <= NOISE_RUNS + CONFIRMING_RUNS


def test_an_eager_program_is_judged_by_its_compiled_steps_where_they_train_alike(folder: Folder) -> None:
    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace | str:
        return answer_of(folder, RIGHT, is_eager=label in ("1x4", "reference"))(label, topology, plan)

    runner = FakeRunner(answer)
    run, price, _ = judged(runner)
    assert (run.verdict, price.starts) == ("equivalent", 3)
    assert runner.made[:3] == ["1x4", "reference", "reference compiled"]


@pytest.mark.parametrize("compiled", [Problem(seed=7, steps=4), "ValueError: not in a graph"])
def test_an_eager_program_is_never_judged_by_what_it_does_only_when_it_is_compiled(
    folder: Folder, compiled: Problem | str
) -> None:
    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace | str:
        if label != "reference compiled":
            return answer_of(folder, RIGHT, is_eager=True)(label, topology, plan)
        return compiled if isinstance(compiled, str) else answer_of(folder, RIGHT, compiled)(label, topology, plan)

    runner = FakeRunner(answer, evaluates=False)
    run, price, _ = judged(runner)
    assert (run.verdict, run.causes) == ("equivalent", ())
    assert runner.made == ["1x4", "reference", "reference compiled", "noise 1"]
    assert price == Price(starts=4, evaluations=0)


def test_noise_has_the_rows_in_order_where_their_order_matters(folder: Folder) -> None:
    def answer(label: str, topology: Topology, plan: ProbePlan) -> Trace:
        # Rows in another order are another training here; rounding alone changes little.
        other = replace(RIGHT, batch=24) if plan.permute else RIGHT
        return answer_of(folder, RIGHT, other, is_eager=True)(label, topology, plan)

    runner = FakeRunner(answer, evaluates=False)
    run, _, notes = judged(runner)
    assert any("depends on the order of the examples" in note for note in notes)
    assert run.verdict == "equivalent"
    assert runner.made[-1] == "noise 1 in order"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_program_in_16_bits_is_compared_with_its_layers_in_32_first(folder: Folder, wrong: bool) -> None:
    def facts(plan: ProbePlan) -> dict[str, Any]:
        return {"bfloat16": [] if plan.switches else ["dense_0/kernel"]}

    answer = answer_of(folder, WRONG if wrong else RIGHT, is_eager=True, facts=facts)
    runner = FakeRunner(answer, evaluates=False)
    run, _, notes = judged(runner)
    assert any("compares runs with its layers in 32 bits" in note for note in notes)
    assert [cause.code for cause in run.causes] == (["loss-scaling"] if wrong else [])
    assert "1x4 in-32-bits" in runner.made


MINE, THEIRS = "Traceback:\nKeyError: 'mine'", "Traceback:\nValueError: theirs"


@pytest.mark.parametrize(
    ("plain", "note"),
    [
        (MINE, "Without gpudist the program fails too, with the same error as on one device."),
        (THEIRS, "Without gpudist the program fails too, with another error: ValueError: theirs."),
        (None, "Without gpudist, on this machine as it is, the program ends without an error"),
    ],
)
def test_a_program_that_raises_on_one_device_is_also_run_without_gpudist(folder: Folder, plain: str | None, note: str) -> None:
    runner = FakeRunner(lambda label, topology, plan: MINE, plain=plain, folder=folder.made().directory)
    run, _, notes = judged(runner)
    assert run.verdict == "failed"
    assert [text[: len(note)] for text in notes] == [note]
    assert runner.made == ["1x4", "reference", "without gpudist"]
