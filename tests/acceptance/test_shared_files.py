"""Programs that keep files at a place that all runs share: what runs take from each other is not held against the program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

Write = Callable[..., Path]

LOOP = """
import json, os
import keras, numpy as np, tensorflow as tf
folder = {folder!r}
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
y = np.arange(96) % 3
{before}
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    made = tf.Variable(0, dtype=tf.int64)
{built}
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(24).repeat(2).skip(int(made.numpy()))

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loss_of(y, model(x))) / {divisor}
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

for x, y in strategy.experimental_distribute_dataset(rows):
    train(x, y)
    made.assign_add(1)
{each}
"""
RESTORES = """
task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, made=made)
manager = tf.train.CheckpointManager(checkpoint, folder if task == 0 else f"{folder}-{task}", 2)
if latest := tf.train.latest_checkpoint(folder):
    checkpoint.restore(latest)
"""
SAVES = """
    if int(made.numpy()) % 3 == 0:
        manager.save()
"""
FIT = """
import os
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
with tf.distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
path = {path!r}
if os.path.exists(path):
    model.load_weights(path)
keeps = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
model.fit(x, x.sum(axis=1), batch_size=24, epochs=2, verbose=0, shuffle=False, callbacks=[keeps])
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder that is no run's own."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder.resolve()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """write(folder, ...) -> the script, in a folder of its own that is the working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def make(folder: Path | str, before: str = "", built: str = "", each: str = "", divisor: str = "24") -> Path:
        path = work / "train.py"
        path.write_text(LOOP.format(folder=str(folder), before=before, built=built, each=each, divisor=divisor))
        return path

    return make


def test_a_program_that_restores_what_another_run_saved_is_unverified_and_its_twin_is_equivalent(
    write: Write, elsewhere: Path, preload: Preload
) -> None:
    verdict = emulate.verify(write(elsewhere / "ckpts", built=RESTORES, each=SAVES), "2x1", preload=preload)
    [run] = verdict.runs
    # At the same time one may have moved a file that the other is about to move, which TensorFlow refuses.
    assert (run.verdict, verdict.exit_code) in (("unverified", 1), ("failed", 3)), render(verdict)
    [cause] = run.causes
    assert cause.code == "shared-files"
    assert str(elsewhere / "ckpts") in cause.summary
    assert ("see shared-files" in render(verdict)) == (not verdict.reference.repeatable)  # two runs may have met alike
    assert "unseeded" not in render(verdict)
    twin = emulate.verify(write("ckpts", built=RESTORES, each=SAVES), "2x1", preload=preload)
    assert twin.is_equivalent, render(twin)


@pytest.mark.slow
def test_with_a_fault_nothing_is_said_of_how_such_a_program_recovers(write: Write, elsewhere: Path, preload: Preload) -> None:
    script = write(elsewhere / "ckpts", built=RESTORES, each=SAVES)
    [run] = emulate.verify(script, "2x1", faults="kill:host=1,step=8", preload=preload).runs
    assert (run.verdict, [cause.code for cause in run.causes]) == ("unverified", ["shared-files"])
    assert [fault.result for fault in run.faults] == [None]


@pytest.mark.slow  # test_a_program_that_restores_what_another_run_saved... has the verdict
def test_weights_that_fit_finds_and_leaves_elsewhere_are_told_and_what_was_there_is_said_to_be_lost(
    write: Write, elsewhere: Path, preload: Preload
) -> None:
    path, script = elsewhere / "x.weights.h5", write(elsewhere)
    script.write_text(FIT.format(path=str(path)))
    subprocess.run([sys.executable, script], capture_output=True, check=True)
    verdict = emulate.verify(script, "1x2", preload=preload)
    [run] = verdict.runs
    # At the same time one may find the other's file open, which HDF5 refuses.
    assert run.verdict in ("unverified", "failed"), render(verdict)
    assert [cause.code for cause in run.causes] == ["shared-files"], render(verdict)
    (note,) = [note for note in verdict.notes if "that were there before, and they stay so" in note]
    assert note.endswith(f": {path}.")


@pytest.mark.slow
def test_a_program_without_a_seed_that_writes_and_reads_its_log_elsewhere_is_still_unseeded(
    write: Write, elsewhere: Path, preload: Preload
) -> None:
    logs = "log = os.path.join(folder, 'log.txt'); open(log, 'a').write('begun'); open(log).read()"
    unseeded = "model.layers[-1].kernel.assign(np.random.default_rng().normal(size=(4, 3)))"
    verdict = emulate.verify(write(elsewhere, before=logs, built=unseeded), "1x2", steps=4, preload=preload)
    [run] = verdict.runs
    assert (run.verdict, run.causes[0].code) == ("divergent", "unseeded-randomness"), render(verdict)


@pytest.mark.parametrize(
    ("divisor", "code"),
    [pytest.param("24", None, marks=pytest.mark.slow), ("tf.cast(tf.shape(x)[0], tf.float32)", "loss-scaling")],
)
def test_rows_that_the_first_run_leaves_for_the_others_hide_nothing(
    write: Write, elsewhere: Path, preload: Preload, divisor: str, code: str | None
) -> None:
    cached = """
rows = os.path.join(folder, "rows.npy")
if os.path.exists(rows):
    x = np.load(rows)
else:
    with open(f"{rows}.{os.getpid()}", "wb") as file:
        np.save(file, x)
    os.replace(file.name, rows)
"""
    verdict = emulate.verify(write(elsewhere, before=cached, divisor=divisor), "1x2", steps=4, preload=preload)
    [run] = verdict.runs
    assert [cause.code for cause in run.causes] == ([] if code is None else [code]), render(verdict)
    assert run.verdict == ("equivalent" if code is None else "divergent")
