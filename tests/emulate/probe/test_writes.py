"""What runs write where they can meet is known, whichever way it is written; what is a run's own is not told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from emulate.verify.result import RunResult

Run = Callable[..., RunResult]


def test_writes_outside_of_the_runs_folders_are_told_whichever_way_they_are_made(run: Run) -> None:
    elsewhere = Path("/var/tmp") / f"gpudist-test-{os.getpid()}"
    elsewhere.mkdir()
    (elsewhere / "old").mkdir()
    (elsewhere / "read").touch()

    def program() -> None:
        import tempfile

        import h5py
        import tensorflow as tf

        (elsewhere / "plain").write_text("x")
        (elsewhere / "read").read_text()
        os.makedirs(elsewhere / "old", exist_ok=True)
        os.mkdir(elsewhere / "made")
        os.rename(elsewhere / "plain", elsewhere / "renamed")
        with tf.io.gfile.GFile(str(elsewhere / "gfile"), "w") as file:
            file.write("x")
        with h5py.File(elsewhere / "hdf5", "w"):
            pass
        tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(elsewhere / "checkpoint"))
        tf.summary.create_file_writer(str(elsewhere / "summary"))
        with tempfile.NamedTemporaryFile() as own:
            own.write(b"the run's own")
        Path("in-the-working-directory").touch()

    try:
        result = run(program, "1x1")
    finally:
        for file in sorted(elsewhere.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        elsewhere.rmdir()
    assert result.status == "ok", result.failure
    names = {os.path.relpath(path, os.path.realpath(elsewhere)) for path in result.written}
    assert names == {"plain", "made", "renamed", "gfile", "hdf5", "checkpoint", "summary"}


def test_checkpoints_and_models_are_told_with_the_hosts_that_wrote_them(run: Run) -> None:
    def program() -> None:
        import json

        import keras
        import tensorflow as tf

        host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
        checkpoint.write(f"own-{host}/checkpoint")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.save(f"own-{host}/model.keras")
        model.save_weights("everyones.weights.h5" if host else "first.weights.h5")
        while host and not Path("common-is-there").exists():
            pass  # at the same time one would take the other's files away
        checkpoint.write("common")
        Path("common-is-there").touch()
        Path("no-model.txt").touch()

    result = run(program, "2x1")
    assert result.status == "ok", result.failure
    assert {os.path.basename(path): hosts for path, hosts in result.saved.items() if "own" not in path} == {
        "common": {0, 1},
        "everyones.weights.h5": {1},
        "first.weights.h5": {0},
    }
    assert {os.sep.join(path.split(os.sep)[-2:]) for path in result.saved if "own" in path} == {
        f"own-{host}/{name}" for host in (0, 1) for name in ("checkpoint", "model.keras")
    }
