from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emulate.cli.app import app
from emulate.cluster import Preload
from emulate.verify import api

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    keras.layers.Conv2D(4, 3, use_bias=False),
    keras.layers.Flatten(),
    keras.layers.Dense(10, use_bias=False),
])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
images = np.ones((64, 8, 8, 1), "float32")
model.fit(images, np.zeros(64, "int64"), batch_size=16, verbose=0)
"""
# Per example: 6 x 6 x 4 results of 9 products each and 10 of 144, forward and for the filters; for the dense layer's input too.
FLOPS = 16 * 2 * (2 * 6 * 6 * 4 * 9 + 3 * 144 * 10)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--on must name a machine. Received: none."),
        (["--on", "dgx-a10"], "Received: --on 'dgx-a10'. Did you mean 'dgx-a100'?"),
        (["--on", "mine.toml"], "--on must name a machine or an existing file. Received: --on 'mine.toml'."),
        (["--on", "dgx-a100", "--measured", "195"], "Received: --measured '195'."),
        (["--on", "dgx-a100", "--gpus", "8,x"], "--gpus must be a positive whole number. Received: --gpus 'x'."),
        (["--on", "dgx-a100", "--examples", "0"], "--examples must be a positive whole number. Received: --examples '0'."),
        (["--on", "dgx-a100", "--batch", "-1"], "--batch must be a positive whole number. Received: --batch '-1'."),
        (["--on", "dgx-a100", "--input-rate", "9"], "Received: --input-rate '9'."),
        (["--on", "dgx-a100", "--memory", "24"], "Received: --memory '24'. Example: --memory 24GB."),
        (["--on", "dgx-a100", "--html", "missing/plan.html"], "--html must name a file that can be written."),
        (["--on", "dgx-a100", "--html", "p", "--json", "p"], "--json and --html must be files of their own."),
        (["--on", "dgx-a100", "--timeout", "0"], "--timeout must be a positive number of seconds. Received: --timeout '0'."),
    ],
)
def test_wrong_use_ends_with_2_before_the_program_runs(
    program: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parent)
    result = CliRunner().invoke(app, ["plan", str(program), *arguments], prog_name="gpudist")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def plan(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "emulate", "plan", *map(str, arguments)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_program_is_recorded_and_planned(program: Path) -> None:
    result = plan(
        program, "--on", "p3.16xlarge", "--gpus", "1,8", "--json", "plan.json", "--html", "plan.html", cwd=program.parent
    )
    assert result.returncode == 0, result.stderr
    assert "NOT measured" in result.stdout
    assert "train.py on p3.16xlarge</h1>" in (program.parent / "plan.html").read_text(encoding="utf-8")
    content = json.loads((program.parent / "plan.json").read_text())
    assert content["batch_per_gpu"] == 16
    assert content["parameters"] == 36 + 1440
    assert content["flops_per_step"] == FLOPS
    assert content["collectives"] == [{"kind": "all-reduce", "bytes": 4 * (36 + 1440), "gradients": 2}]
    assert [row["num_gpus"] for row in content["rows"]] == [1, 8]
    assert content["input_per_second"] > 0
    assert "examples/s for each host, measured on this machine" in " ".join(result.stdout.split())
    memory = content["memory"]
    assert memory["parts"]["weights"] == 4 * (36 + 1440)
    # Of each example at the peak: 8 x 8 pixels in two batches of the input, and the results of the layers.
    assert memory["parts"]["activations"] >= 16 * 4 * 6 * 6 * 4
    assert memory["room"] == 16e9
    assert memory["fits"]
    assert memory["largest_batch"] > 16


def test_a_program_that_raises_ends_with_3_and_its_traceback(
    tmp_path: Path, preload: Preload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "Runner", partial(api.Runner, preload=preload))
    (tmp_path / "train.py").write_text("raise KeyError('no data')\n")
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "train.py"), "--on", "dgx-a100"], prog_name="gpudist")
    assert result.exit_code == 3
    assert "KeyError: 'no data'" in result.stderr


WITH_SERVERS = """
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
with strategy.scope():
    weight = tf.Variable(1.0)
    optimizer = tf.keras.optimizers.SGD(0.1)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
@tf.function
def step():
    def replica():
        with tf.GradientTape() as tape:
            loss = weight * weight
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
    strategy.run(replica)
for _ in range(3):
    coordinator.schedule(step)
coordinator.join()
"""


def test_a_program_with_parameter_servers_is_refused_in_one_sentence(
    tmp_path: Path, preload: Preload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "Runner", partial(api.Runner, preload=preload))
    (tmp_path / "train.py").write_text(WITH_SERVERS)
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "train.py"), "--on", "dgx-a100"], prog_name="gpudist")
    assert result.exit_code == 2, result.stderr
    text = " ".join(result.stderr.split())
    assert "must sum its gradients by all-reduce, as MirroredStrategy does. Received: program=" in text
    assert "with ParameterServerStrategy. Plan it with another strategy" in text
    assert "Traceback" not in text
