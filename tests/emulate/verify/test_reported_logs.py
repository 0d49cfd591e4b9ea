"""What Keras logs of an epoch that the run is held in, and what the cures of reported numbers speak of."""

from __future__ import annotations

from typing import Any

import pytest

from emulate.verify.causes.cause import names_in_words
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import right_reference, right_topology
from tests.emulate.verify.made_traces import Made

WITHIN = (0.4, 0.4, 0.4), (0.3, 0.35, 0.41)
"""What is logged of each batch: on one device, on four."""


def _judged(folder: Folder, kind: str, name: str, so_far: float | None, **facts: Any) -> Judgement:
    def run(made: Made, step: Any, logged: tuple[float, ...], in_the_end: float | None) -> Any:
        def report(made: Made, k: int) -> None:
            if k == 0 and facts:
                made.event({"event": "program", **facts})
            step(made, k)
            made.report(kind, f"batch/{name}", k, logged[k])
            if k == 2 and in_the_end is not None:
                made.report(kind, f"epoch so far/{name}", 0, in_the_end)

        return loop(made, report)

    alone = run(folder.made(), right_reference, WITHIN[0], None if so_far is None else 0.5)
    return judge(case_of(alone, run(folder.made("1x4"), right_topology, WITHIN[1], so_far)))


@pytest.mark.parametrize(("kind", "name", "code"), [("metric", "auc", "metric-aggregation"), ("loss", "loss", "loss-report")])
@pytest.mark.parametrize(("so_far", "verdict"), [(0.5, "equivalent"), (0.7, "divergent"), (None, "equivalent")])
def test_what_the_epoch_would_log_where_the_run_is_held_decides(
    folder: Folder, kind: str, name: str, code: str, so_far: float | None, verdict: str
) -> None:
    found = _judged(folder, kind, name, so_far)
    assert (found.verdict, codes(found)) == (verdict, [code])
    assert found.causes[0].advice == (verdict == "equivalent")
    assert ("did not see" in found.causes[0].summary) == (so_far is None)


@pytest.mark.parametrize(
    ("own", "cure"), [(True, "Return the loss of all replicas from `train_step`"), (False, "Keras's own `train_step` logs")]
)
def test_the_cure_of_a_logged_loss_speaks_of_a_train_step_where_the_program_has_one(
    folder: Folder, own: bool, cure: str
) -> None:
    assert _judged(folder, "loss", "loss", 0.7, own_train_step=own).causes[0].fix.startswith(cure)


def test_a_metric_that_the_program_itself_gives_a_divided_loss_is_told_how_to_undo_that(
    folder: Folder,
) -> None:
    line = {"file": "train.py", "line": 9, "text": "tracker.update_state(loss)"}
    stages = {
        "update": [line | {"roles": {"apply": 0}}],
        "reported": [line | {"roles": {"update": 0}, "name": "style_loss/total"}],
    }

    def run(made: Made, step: Any, logged: float) -> Any:
        def report(made: Made, k: int) -> None:
            if k == 0:
                made.event({"event": "program", "own_train_step": False})
                made.event({"event": "lines", "function": "step", "stages": stages})
            step(made, k)
            made.report("loss", "batch/style_loss", k, logged)

        return loop(made, report)

    (cause,) = judge(case_of(run(folder.made(), right_reference, 0.4), run(folder.made("1x4"), right_topology, 0.1))).causes
    assert cause.fix.startswith("Every replica updates a `keras.metrics.Mean` once")


@pytest.mark.parametrize(("kind", "name"), [("metric", "auc"), ("loss", "loss")])
def test_the_fix_of_a_log_is_a_newer_keras_if_all_replicas_share_the_variables_of_a_metric(
    folder: Folder, kind: str, name: str
) -> None:
    assert "Install Keras 3.10 or newer" in _judged(folder, kind, name, 0.7, mirrored_metrics=True).causes[0].fix


@pytest.mark.parametrize(
    ("how", "cure"),
    [
        ("mean", "Sum over all replicas, count over all replicas"),
        (None, "Use the reduction that fits the division of the loss"),
    ],
)
def test_a_mean_of_means_is_named_with_its_line_and_is_not_cured_by_a_mean(folder: Folder, how: str | None, cure: str) -> None:
    def run(made: Made, step: Any, values: tuple[float, ...]) -> Any:
        def report(made: Made, k: int) -> None:
            step(made, k)
            event = {"event": "report", "kind": "loss", "name": "evaluate/reduce", "step": k, "value": values[k], "made": k + 1}
            made.event({**event, "line": "train.py:7", **({"how": how} if how else {})})

        return loop(made, report)

    found = judge(case_of(run(folder.made(), right_reference, WITHIN[0]), run(folder.made("1x4"), right_topology, WITHIN[1])))
    assert (found.verdict, codes(found)) == ("divergent", ["loss-report"])
    assert found.causes[0].fix.startswith(cure)
    assert found.causes[0].evidence.endswith(f"reduced at {names_in_words(['train.py:7'])}")


@pytest.mark.parametrize(
    ("logged", "cure"), [(0.1, "Every replica updates a `keras.metrics.Mean` once"), (0.17, "Use the reduction")]
)
def test_the_fix_of_a_metric_that_takes_a_part_of_the_mean_speaks_of_the_metric(
    folder: Folder, logged: float, cure: str
) -> None:
    def run(made: Made, step: Any, value: float) -> Any:
        def report(made: Made, k: int) -> None:
            step(made, k)
            made.report("loss", "metric/train_loss", k, value)

        return loop(made, report)

    found = judge(case_of(run(folder.made(), right_reference, 0.4), run(folder.made("1x4"), right_topology, logged)))
    assert (found.verdict, codes(found)) == ("divergent", ["loss-report"])
    assert found.causes[0].fix.startswith(cure)


def test_all_metrics_that_take_a_divided_loss_are_named_with_their_lines(folder: Folder) -> None:
    def update(line: int, metric: str) -> dict[str, object]:
        return {
            "file": "train.py",
            "line": line,
            "text": "",
            "operations": {"AssignAdd": 1},
            "roles": {"update": 0},
            "name": f"{metric}/total",
            "near": 0,
        }

    stages = {"gradient": [], "reported": [update(7, "recon"), update(8, "kl"), update(9, "norm")]}

    def run(made: Made, step: Any, times: float) -> Any:
        def report(made: Made, k: int) -> None:
            if k == 0:
                made.event({"event": "program", "own_train_step": True})
                made.event({"event": "lines", "function": "step", "stages": stages})
            step(made, k)
            for when in ("batch", "epoch"):
                made.report("loss", f"{when}/recon", k, 0.4 * times)
                made.report("loss", f"{when}/kl", k, 0.8 * times)
                made.report("loss", f"{when}/norm", k, 0.3)

        return loop(made, report)

    (cause,) = judge(case_of(run(folder.made(), right_reference, 1.0), run(folder.made("1x4"), right_topology, 0.25))).causes
    assert sorted(location.line for location in cause.locations) == [7, 8]
    assert "is off by the same factor" in cause.evidence
