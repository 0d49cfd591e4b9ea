"""A certificate of a verified run lets the same training pass elsewhere, and stops any other in the step that leaves it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emulate
from emulate.cli.app import app
from emulate.cluster import Preload
from emulate.errors import UsageError
from emulate.report.files import check_writable
from gpudist_core.certificates import Certificate

LOOP = """
import sys
import keras
import numpy as np
import tensorflow as tf
import gpudist_core as gd

seed, loss_of, data_seed, dropout, check, *functions = sys.argv[1:]
strategy = gd.make_strategy()
keras.utils.set_random_seed(int(seed))
rng = np.random.default_rng(int(data_seed))
x = rng.normal(size=(8 * 24, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(24))
with strategy.scope():
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(float(dropout)), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = gd.check(check or None).optimizer(keras.optimizers.Adam(0.01))
    optimizer.build(model.trainable_variables)


def step(x, y):
    with tf.GradientTape() as tape:
        of_each = (model(x, training=True) - y) ** 2
        loss = tf.reduce_sum(of_each) / 24 if loss_of == "right" else tf.reduce_mean(of_each)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


def distributed(batch, step=step):
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)


outside = tf.function(step)
train = (lambda batch: distributed(batch, outside)) if functions else tf.function(distributed)
for batch in data:
    train(batch)
print("checked no more" if "apply" not in vars(optimizer) else "still checked")
"""
FIT = """
import sys
import keras
import numpy as np
import tensorflow as tf
import gpudist_core as gd

seed, check = sys.argv[1:]
keras.utils.set_random_seed(int(seed))
x = np.random.default_rng(1).normal(size=(8 * 24, 6)).astype("float32")
with tf.distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x.sum(axis=1), batch_size=24, shuffle=False, verbose=0, callbacks=[gd.check(check or None)])
print("checked no more" if "apply" not in vars(model.optimizer) else "still checked")
"""
BATCHNORM = """
import sys
import keras
import numpy as np
import tensorflow as tf
import gpudist_core as gd

policy, check = sys.argv[1:]
keras.utils.set_random_seed(0)
keras.mixed_precision.set_global_policy(policy)
x = np.random.default_rng(1).normal(size=(6 * 64, 6)).astype("float32")
with tf.distribute.MirroredStrategy().scope():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Activation("tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("sgd", "mse")
model.fit(x, x.sum(axis=1), batch_size=64, shuffle=False, verbose=0, callbacks=[gd.check(check or None)])
"""
CORE = """
import sys
import keras
import numpy as np
import gpudist_core as gd

kind, file = sys.argv[1:]
keras.utils.set_random_seed(1)
x = np.random.default_rng(1).normal(size=(8 * 24, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
strategy, check = gd.make_strategy(), gd.check(file or None)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    if kind == "fit":
        model = gd.distributed(model)
        model.compile("sgd", "mse")
    else:
        optimizer = check.optimizer(keras.optimizers.SGD(0.01))
if kind == "fit":
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0, callbacks=[check])
else:
    step = gd.TrainStep(model, optimizer, "mse")
    for batch in gd.Pipeline.from_arrays((x, y), global_batch_size=24).distribute(strategy):
        step(batch)
    print("is watched" if hasattr(optimizer, "_gpudist_losses") else "checked no more")
"""
RIGHT = ("1", "right", "3", "0.0")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certificates")
    (place / "loop.py").write_text(LOOP)
    (place / "fit.py").write_text(FIT)
    (place / "batchnorm.py").write_text(BATCHNORM)
    (place / "core.py").write_text(CORE)
    return place


def certified(folder: Path, preload: Preload, program: str, topology: str, *args: str) -> Path:
    """The file of a certificate, after a look at what the verdict says of it."""
    path = folder / f"{program}-{'-'.join(args)}.npz"
    if not path.exists():
        verdict = emulate.verify(folder / program, topology, args=args, preload=preload, certificate=path)
        check_writable(path, "--certificate")  # an earlier certificate may be written over
        assert any(f"Certificate of 5 steps written to {path}." in note for note in verdict.notes), verdict
    return path


@pytest.fixture
def run(folder: Path, preload: Preload, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(topology, program, *args)`: exit code, output and errors of `gpudist run`."""

    def parent(*, imports: bool, **options: Any) -> contextlib.AbstractContextManager[Preload]:
        return contextlib.nullcontext(preload) if imports else Preload(imports=imports, **options)

    monkeypatch.setattr("emulate.cluster.Preload", parent)

    def run(topology: str, program: str, *args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            app(args=["run", str(folder / program), "--topology", topology, "--", *args], prog_name="gpudist")
        output, errors = capfd.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, output, errors

    return run


@pytest.mark.parametrize(("topology", "how"), [("2x2", ()), ("1x4", ()), ("2x2", ("functions",))])
def test_a_right_loop_passes_and_is_left_alone_after_the_certified_steps(
    run: Run, folder: Path, preload: Preload, topology: str, how: tuple[str, ...]
) -> None:
    certificate = certified(folder, preload, "loop.py", "2x2", *RIGHT, "")
    code, output, errors = run(topology, "loop.py", *RIGHT, str(certificate), *how)
    assert code == 0, errors
    assert output.count("checked no more") == int(topology[0])


@pytest.mark.parametrize(
    ("args", "stage"),
    [
        (("2", "right", "3", "0.0"), "stage='start', tensor='sequential/dense/kernel'"),
        (("1", "mean", "3", "0.0"), "stage='gradient', tensor='sequential/dense"),
        pytest.param(("1", "right", "4", "0.0"), "stage='examples', tensor='global batch'", marks=pytest.mark.slow),
    ],
    ids=["another seed", "a loss of each replica's own mean", "other data"],
)
def test_another_training_stops_in_its_first_step(
    run: Run, folder: Path, preload: Preload, args: tuple[str, ...], stage: str
) -> None:
    certificate = certified(folder, preload, "loop.py", "2x2", *RIGHT, "")
    code, output, errors = run("2x2", "loop.py", *args, str(certificate))
    assert code == 3
    assert "checked" not in output
    assert f"CertificateMismatch: Step 0 differs from the certificate. Received: {stage}" in errors
    assert ("The gradient is 4x the certified one." in errors) == ("gradient" in stage)


def test_fit_passes_with_its_loss_and_stops_with_another_seed(run: Run, folder: Path, preload: Preload) -> None:
    certificate = certified(folder, preload, "fit.py", "1x2", "1", "")
    losses = Certificate.read(certificate).losses
    assert (losses > 0).all()
    code, output, errors = run("1x2", "fit.py", "1", str(certificate))
    assert code == 0, errors
    assert "checked no more" in output
    code, _, errors = run("1x2", "fit.py", "2", str(certificate))
    assert code == 3
    assert errors.count("CertificateMismatch: Step 0 differs from the certificate. Received: stage='start'") == 1
    assert len(errors.splitlines()) <= 40, errors


@pytest.mark.parametrize("kind", ["fit", "step"])
def test_the_loss_that_gpudist_core_reports_is_certified(run: Run, folder: Path, preload: Preload, kind: str) -> None:
    path = certified(folder, preload, "core.py", "1x2", kind, "")
    certificate = Certificate.read(path)
    assert (certificate.losses > 0).all()
    code, output, errors = run("1x2", "core.py", kind, str(path))
    assert code == 0, errors
    assert "is watched" not in output
    replace(certificate, losses=certificate.losses * [1.01, 1.0]).write(folder / "other.npz")
    code, _, errors = run("1x2", "core.py", kind, str(folder / "other.npz"))
    assert code == 3
    assert "Step 0 differs from the certificate. Received: stage='loss', tensor='loss'" in errors


@pytest.mark.parametrize("policy", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_batchnorm_by_design_passes_with_a_bias_that_is_rounding_alone(
    run: Run, folder: Path, preload: Preload, policy: str
) -> None:
    certificate = certified(folder, preload, "batchnorm.py", "1x2", policy, "")
    read = Certificate.read(certificate)
    is_compared = dict(zip([tensor.name for tensor in read.tensors], ~np.isnan(read.projections).any(axis=2).T, strict=True))
    assert is_compared["sequential/dense/kernel"].all()
    assert not is_compared["sequential/dense/bias"].any()
    code, _, errors = run("1x2", "batchnorm.py", policy, str(certificate))
    assert code == 0, errors
    assert "gpudist_core: the gradients of 5 certified steps agree" in errors


def test_random_numbers_are_those_of_the_program_itself(run: Run, folder: Path, preload: Preload) -> None:
    certificate = certified(folder, preload, "loop.py", "1x2", "1", "right", "3", "0.5", "")
    code, output, errors = run("1x2", "loop.py", "1", "right", "3", "0.5", str(certificate))
    assert code == 0, errors
    assert "checked no more" in output


def test_a_program_that_trains_another_model_gets_no_certificate(folder: Path, preload: Preload) -> None:
    path = folder / "none.npz"
    args = ("1", "mean", "3", "0.0", "")
    verdict = emulate.verify(folder / "loop.py", "1x2", args=args, preload=preload, steps=3, certificate=path)
    assert "No certificate was written: the verdict is divergent." in verdict.notes
    assert not path.exists()


@pytest.mark.parametrize("wrong", [{"topology": ["1x2", "2x1"]}, {"precision": "float64"}, {"topology": "1x2+1ps"}])
def test_a_certificate_is_of_one_topology_of_workers_in_float32(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"of one topology of workers, in float32\. Received: topology="):
        emulate.verify(folder / "loop.py", certificate=folder / "none.npz", **{"topology": "1x2", **wrong})
