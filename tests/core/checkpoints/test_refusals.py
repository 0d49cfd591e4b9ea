"""What cannot be used, written or shared is said; and what a table in slices keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

OnHosts = Callable[..., list[Any]]


def refusals(folder: str) -> dict[str, Any]:
    """Everything that needs one host alone, in one process; the texts by what was done."""
    import errno
    import os
    import warnings
    from unittest import mock

    import keras
    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core.checkpoints import files

    said: dict[str, Any] = {}

    def raised(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    def made(units: int = 2) -> Any:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, kernel_initializer="ones")])

    def damage(name: str, how: Callable[[bytes], bytes | None], step: int = 3) -> str:
        path = Path(folder, f"step-{step:08}", name)
        before = path.read_bytes()
        after = how(before)
        path.unlink() if after is None else path.write_bytes(after)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            other = made()
            restored = gd.Checkpoints(folder, model=other).restore()
        path.write_bytes(before)
        assert restored is not None
        assert (restored.step, float(other.variables[0].numpy()[0, 0])) == (2, 2.0)
        return str(warned[-1].message)

    brain = tf.Variable(tf.constant([1.5, -3.0], tf.bfloat16))
    with gd.Checkpoints(folder + "z", extra={"brain": brain}, signals=()) as checkpoints:
        checkpoints.save(1)
        brain.assign(tf.zeros([2], tf.bfloat16))
        checkpoints.restore()
    said["bfloat16"] = tf.cast(brain, tf.float32).numpy().tolist()

    model = made()
    with gd.Checkpoints(folder, keep=2, model=model, signals=()) as checkpoints:
        assert checkpoints.restore() is None
        raised("none but required", lambda: checkpoints.restore(required=True))
        for step in (1, 2, 3):
            model.variables[0].assign(tf.fill([3, 2], float(step)))
            checkpoints.save(step)
        checkpoints.wait()
        said["kept"] = [path.name for path in checkpoints.saved()]
        no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(files.DataFile, "add", side_effect=no_room):
            raised("disk full", lambda: checkpoints.save(4, synchronous=True))
        said["after a full disk"] = sorted(os.listdir(folder))
    middle = len(Path(folder, "step-00000003", "host-000.bin").read_bytes()) // 4
    said["flipped"] = damage("host-000.bin", lambda data: data[:8] + bytes([data[8] ^ 1]) + data[9:])
    said["cut"] = damage("host-000.bin", lambda data: data[:middle])
    said["missing"] = damage("host-000.bin", lambda data: None)
    said["manifest flipped"] = damage("manifest.json", lambda data: data.replace(b'"step": 3', b'"step": 4'))
    said["manifest cut"] = damage("manifest.json", lambda data: data[:100])
    said["manifest missing"] = damage("manifest.json", lambda data: None)
    raised("another model", lambda: gd.Checkpoints(folder, model=made(5)).restore())
    bigger = keras.Sequential([made(), keras.layers.Dense(1)])
    raised("more layers", lambda: gd.Checkpoints(folder, model=bigger).restore())
    raised("not restored", lambda: gd.Checkpoints(folder, model=made(), signals=()).save(9))
    for step in (-1, "a", 1.0, True):
        raised(f"step {step}", lambda step=step: gd.Checkpoints(folder + "s", model=model, signals=()).save(step))
    raised("keep", lambda: gd.Checkpoints(folder, keep=0))
    raised("folder", lambda: gd.Checkpoints(None))
    raised("every", lambda: gd.Checkpoints(folder, every=0))
    raised("nothing", lambda: gd.Checkpoints(folder).restore())
    raised("unbuilt", lambda: gd.Checkpoints(folder, model=keras.Sequential([keras.layers.Dense(1)], name="m")).restore())
    raised("text", lambda: gd.Checkpoints(folder + "x", extra={"t": tf.Variable("a", name="t")}, signals=()).save(1))
    wrong: dict[str, dict[str, Any]] = {
        "signal": {"signals": ("SIGNONE",)},
        "letters": {"signals": "SIGTERM"},
        "no model": {"model": "mine"},
        "no optimizer": {"optimizer": "adam"},
        "no pipeline": {"pipeline": [1, 2]},
        "a number": {"step": 5},
        "no names": {"extra": [tf.Variable(1.0)]},
        "no time": {"timeout": "60"},
    }
    for name, arguments in wrong.items():
        raised(name, lambda arguments=arguments: gd.Checkpoints(folder + "y", **arguments))
    Path(folder + "file").write_text("")
    raised("a file", lambda: gd.Checkpoints(folder + "file", model=model))
    raised("no place", lambda: gd.Checkpoints("/proc/none", model=model, signals=()).save(1))
    raised("a value", lambda: gd.Checkpoints(folder + "w", model=model, extra={"epoch": 3}, signals=()).save(1))
    return said


def test_each_refusal_says_why(on_hosts: OnHosts, tmp_path: Path) -> None:
    said = on_hosts("1x1", refusals, str(tmp_path / "a"))[0]
    for step in (-1, "a", 1.0, True):
        rule = f"UsageError: step must be an integer >= 0. Received: step={step!r}. Pass the number of steps that were made."
        assert said[f"step {step}"] == rule
    assert said["bfloat16"] == [1.5, -3.0]
    assert said["kept"] == ["step-00000003", "step-00000002"]
    assert "There must be a checkpoint to continue from. Received: folder=" in said["none but required"]
    assert said["disk full"].startswith(
        "SaveFailed: A checkpoint must be written completely. Received: step=4, host 0: No space left"
    )
    assert "training may continue" in said["disk full"]
    assert said["after a full disk"] == [".lock", "step-00000002", "step-00000003"]
    reasons = {
        "flipped": "host-000.bin was changed after it was written, in model/sequential/dense/kernel",
        "cut": "host-000.bin is cut off in",
        "missing": "host-000.bin is missing",
        "manifest flipped": "manifest.json was changed after it was written",
        "manifest cut": "manifest.json is not a manifest",
        "manifest missing": "manifest.json is missing",
    }
    for name, reason in reasons.items():
        assert "Restored step-00000002: newer checkpoints cannot be used. step-00000003: " in said[name]
        assert reason in said[name], said[name]
    assert said["another model"].startswith(
        "CheckpointRefused: A checkpoint must be complete and belong to this model. Received: folder="
    )
    assert "kernel is float32[3, 2] in the checkpoint and float32[3, 5] in this run" in said["another model"]
    assert "only this run has model/" in said["more layers"]
    assert "Call restore() before the first step, or pass another folder." in said["not restored"]
    assert "keep must be a positive integer. Received: keep=0" in said["keep"]
    assert "folder must be a path. Received: folder=None. All hosts must see it." in said["folder"]
    assert "every must be a positive integer. Received: every=0" in said["every"]
    assert "Checkpoints need something to save" in said["nothing"]
    assert "A model must be built before it can be saved or restored. Received: model='m'" in said["unbuilt"]
    assert "Only numeric variables can be saved in a checkpoint. Received: variable='extra/t/t', dtype='string'" in said["text"]
    signals = "Use signals=('SIGTERM',) or ('SIGUSR1',)."
    assert said["signal"].endswith(
        f"signals must be names from Python's signal module. Received: signals=('SIGNONE',). {signals}"
    )
    assert said["letters"].endswith(
        f"signals must be names from Python's signal module. Received: signals='SIGTERM'. {signals}"
    )
    assert "model must be a Keras model, or have variables. Received: model='mine'." in said["no model"]
    assert (
        "optimizer must be a Keras optimizer. Received: optimizer='adam'. Pass an optimizer object, not its name."
        in said["no optimizer"]
    )
    assert "pipeline must be a gpudist_core.Pipeline, or have state() and restore(state). Received:" in said["no pipeline"]
    assert "step must be a gpudist_core.TrainStep. Received: step=5. Pass the number of a step to save()" in said["a number"]
    assert "extra must be a dictionary of names and values. Received: extra=[<tf.Variable" in said["no names"]
    assert "timeout must be a positive number of seconds. Received: timeout='60'. Leave it out" in said["no time"]
    assert "folder must not be a file. Received: folder=" in said["a file"]
    assert "The folder of checkpoints must be writable. Received: folder='/proc/none', error=" in said["no place"]
    assert (
        "A value in extra must be a variable, a metric or a random generator, or have state() and restore(state). Received: "
        "value=3." in (said["a value"])
    )


def table_through(folder: str, save: bool, shared: bool = True) -> Any:
    """Save, or restore, a table in slices, a float16 variable and this process's draws; or give each host its own folder."""
    import os
    import random
    import tempfile

    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core.checkpoints import hosts
    from tests.core.checkpoints.training import strategy_here

    strategy = strategy_here()
    if not shared:
        hosts._SEEN_WITHIN = 2.0
        os.chdir(tempfile.mkdtemp())
        folder = "/proc/self/cwd/own"
    with strategy.scope():
        half = tf.Variable(tf.cast([1.5, -3.0] if save else [0.0, 0.0], tf.float16), name="half")
        table = gd.shard(np.arange(22.0).reshape(11, 2).astype("float32") * (1 if save else 0), strategy, axis=0)
    slices = table.variable
    extra = {"half": half, "table": slices}
    try:
        with gd.Checkpoints(folder, extra=extra, strategy=strategy, signals=(), timeout=20) as checkpoints:
            if save:
                random.seed(7)
                checkpoints.save(1)
                return random.random()
            restored = checkpoints.restore(required=True)
            assert restored is not None
            drawn = random.random()
    except ValueError as error:
        return str(error)
    return (
        drawn,
        half.numpy().astype("float32").tolist(),
        np.asarray(table.as_numpy()).tolist(),
        restored.info["topology"]["hosts"],
    )


def test_slices_of_a_table_are_cut_anew_on_another_topology(on_hosts: OnHosts, tmp_path: Path) -> None:
    draws = on_hosts("2x2", table_through, str(tmp_path), True)
    table = [[2.0 * row, 2.0 * row + 1] for row in range(11)]
    for topology in ("1x3", "2x1"):
        for result in on_hosts(topology, table_through, str(tmp_path), False):
            assert result == (draws[0], [1.5, -3.0], table, 2)


def test_a_folder_that_hosts_do_not_share_is_refused_on_all(on_hosts: OnHosts, tmp_path: Path) -> None:
    for text in on_hosts("2x1", table_through, "", True, False):
        assert text.startswith("Several hosts need a shared folder, for example on a network file system. Received: ")
        assert "hosts_without_it=[1]" in text


def read_only(folder: str, hidden_from: int | None = None) -> list[Any]:
    """Save on all hosts, make another with the folder read-only and restore; then save: what is restored, or said."""
    import errno

    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core.checkpoints import hosts
    from tests.core.checkpoints.training import strategy_here

    strategy = strategy_here()
    with strategy.scope():
        count = tf.Variable(7)
    with gd.Checkpoints(folder, extra={"count": count}, strategy=strategy, signals=(), timeout=20) as first:
        first.save(1)
    count.assign(0)

    def refused(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    hosts._touch = refused  # type: ignore[assignment]
    second = gd.Checkpoints(folder, extra={"count": count}, strategy=strategy, signals=(), timeout=20)
    if strategy.cluster_resolver.task_id == hidden_from:
        second._folder.steps = list  # type: ignore[method-assign]
    try:
        second.restore(required=True)
    except ValueError as error:
        return [str(error)]
    return [int(count.numpy())]


def test_hosts_restore_from_a_folder_that_they_may_only_read(on_hosts: OnHosts, tmp_path: Path) -> None:
    assert on_hosts("2x1", read_only, str(tmp_path / "run")) == [[7], [7]]
    for (text,) in on_hosts("2x1", read_only, str(tmp_path / "other"), 1):
        assert text.startswith("Several hosts need a shared folder")
        assert "hosts_without_it=[1]" in text
