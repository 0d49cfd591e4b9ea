"""Keras's fit with a PyDataset: its workers fetch batches before the first epoch, more of them for more replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
draws = np.random.default_rng(0)
x = draws.normal(size=(128, 4)).astype("float32")
y = x.sum(1, keepdims=True)
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16]
with tf.distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(Batches(workers=WORKERS), epochs=3, verbose=0)
"""


def verified(folder: Path, preload: Preload, workers: int) -> emulate.Verdict:
    (folder / "train.py").write_text(PROGRAM.replace("WORKERS", str(workers)))
    return emulate.verify(folder / "train.py", "1x4", preload=preload)


@pytest.mark.slow
def test_batches_that_workers_fetched_before_the_training_are_told_with_the_number_of_workers_that_cures_it(
    tmp_path: Path, preload: Preload
) -> None:
    verdict = verified(tmp_path, preload, 3)
    (run,) = verdict.runs
    assert (run.verdict, run.causes[0].code) == ("divergent", "samples-reordered"), render(verdict)
    assert "later" in run.causes[0].summary, render(verdict)
    assert "workers=1, use_multiprocessing=False" in run.causes[0].fix


def test_with_one_worker_it_is_equivalent(tmp_path: Path, preload: Preload) -> None:
    verdict = verified(tmp_path, preload, 1)
    assert [run.verdict for run in verdict.runs] == ["equivalent"], render(verdict)
