"""What is not compared is listed by name; what a program reports is compared, also at the end of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

COUNTER = Path(__file__).parents[2] / "fixtures" / "everyday_cases" / "restored_counter.py"


def test_variables_that_training_changes_and_no_step_shows_are_listed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: Preload
) -> None:
    """Metrics, the learning rate and what a step reads show in what is compared."""
    monkeypatch.chdir(tmp_path)
    verdict = emulate.verify(COUNTER, "1x2", preload=preload)
    (run,) = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert run.not_compared == (
        "variable seen (each replica keeps its own value, line 37)",
        "variable rounds (assigned outside of Strategy.run)",
    )


FIT = """
import gpudist_core as gd, keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
x = np.random.default_rng(3).normal(size=(96, 8)).astype("float32")
with tf.distribute.MirroredStrategy().scope():
    model = gd.distributed(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, (x.sum(1) > 0).astype("int32"), batch_size=16, epochs=2, verbose=0)
"""


def test_what_a_distributed_fit_reports_is_compared_where_its_epoch_ends_with_the_last_step(
    tmp_path: Path, preload: Preload
) -> None:
    """The program is stopped before the end of the epoch."""
    (tmp_path / "train.py").write_text(FIT)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", steps=6, preload=preload)
    (run,) = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert {"loss", "metric"} <= {farthest.kind for farthest in run.course}
