"""What runs write and read where they can meet is known, whichever way it is done; what is a run's own is not told."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emulate.verify.result import RunResult

Run = Callable[..., RunResult]


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder that is no run's own."""
    folder = Path("/var/tmp") / f"gpudist-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_writes_outside_of_the_runs_folders_are_told_whichever_way_they_are_made(run: Run, elsewhere: Path) -> None:
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

    result = run(program, "1x1")
    assert result.status == "ok", result.failure
    names = {os.path.relpath(path, os.path.realpath(elsewhere)) for path in result.written}
    assert names == {"plain", "made", "renamed", "gfile", "hdf5", "checkpoint", "summary"}


def test_a_path_in_an_open_folder_is_told_as_that_of_the_file(run: Run, elsewhere: Path) -> None:
    (elsewhere / "old").mkdir()
    for name in ("removed", "moved", "linked"):
        (elsewhere / "old" / name).touch()

    def program() -> None:
        folder = os.open(elsewhere / "old", os.O_RDONLY)
        other = os.open(elsewhere, os.O_RDONLY)
        os.unlink("removed", dir_fd=folder)
        os.rename("moved", "here", src_dir_fd=folder, dst_dir_fd=other)
        os.link("linked", "link", src_dir_fd=folder, dst_dir_fd=other)
        os.symlink("linked", "symbolic", dir_fd=folder)
        os.mkdir("made", dir_fd=folder)
        Path("made-below").mkdir()
        os.mkdir("below", dir_fd=os.open("made-below", os.O_RDONLY))

    result = run(program, "1x1")
    assert result.status == "ok", result.failure
    names = {os.path.relpath(path, os.path.realpath(elsewhere)) for path in result.written}
    assert names == {"old/removed", "old/moved", "here", "link", "old/symbolic", "old/made"}


def test_a_model_in_a_temporary_folder_of_each_host_is_written_by_that_host_alone(run: Run) -> None:
    def program() -> None:
        import tempfile

        import keras

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        with tempfile.TemporaryDirectory() as folder:
            model.save_weights(Path(folder) / "model.weights.h5")

    result = run(program, "2x1")
    assert result.status == "ok", result.failure
    assert sorted(map(sorted, result.saved.values())) == [[0], [1]]


def test_what_others_have_written_meanwhile_is_told_when_it_is_read_whichever_way(run: Run, elsewhere: Path) -> None:
    (elsewhere / "from-before").write_text("x")

    def program() -> None:
        import subprocess

        import h5py
        import tensorflow as tf

        def by_another(name: str) -> str:
            subprocess.run(["cp", "-r", f"made/{name}", elsewhere], check=True)
            return str(elsewhere / name)

        os.mkdir("made")
        for name in ("plain", "gfile", "both", "replaced", "lock"):
            Path("made", name).write_text("x")
        with h5py.File("made/hdf5", "w") as file:
            file["x"] = 1
        checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
        tf.train.CheckpointManager(checkpoint, "made/checkpoints", 1).save()

        (elsewhere / "from-before").read_text()
        os.close(os.open(by_another("lock"), os.O_RDWR | os.O_CREAT))
        Path(by_another("plain")).read_text()
        Path(by_another("replaced")).write_text("y")
        with tf.io.gfile.GFile(by_another("gfile")) as file:
            file.read()
        with h5py.File(by_another("hdf5"), "r+"):
            pass
        with open(by_another("both"), "r+"):
            pass
        checkpoint.restore(tf.train.latest_checkpoint(by_another("checkpoints")))
        checkpoint.read(str(elsewhere / "checkpoints" / "ckpt-1"))
        Path("own").write_text("x")
        Path("own").read_text()
        (elsewhere / "read-back").write_text("x")
        (elsewhere / "read-back").read_text()

    result = run(program, "1x1")
    assert result.status == "ok", result.failure
    found = {os.path.relpath(path, os.path.realpath(elsewhere)): is_own for path, is_own in result.read.items()}
    others = ("plain", "gfile", "hdf5", "both", "checkpoints/checkpoint", "checkpoints/ckpt-1")
    assert found == {**dict.fromkeys(others, False), "read-back": True}


def test_what_a_run_writes_over_that_was_there_before_is_known(run: Run, elsewhere: Path) -> None:
    import tensorflow as tf

    for name in ("written", "removed", "left"):
        (elsewhere / name).write_text("x")
    tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(elsewhere / "checkpoint"))

    def program() -> None:
        import tensorflow as tf

        for name in ("written", "new"):
            (elsewhere / name).write_text("y")
            (elsewhere / name).write_text("z")
        (elsewhere / "removed").unlink()
        tf.train.Checkpoint(v=tf.Variable(1.0)).write(str(elsewhere / "checkpoint"))

    result = run(program, "1x1")
    assert result.status == "ok", result.failure
    found = {os.path.relpath(path, os.path.realpath(elsewhere)): was_there for path, was_there in result.written.items()}
    assert found == {"written": True, "new": False, "removed": True, "checkpoint": True}


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
