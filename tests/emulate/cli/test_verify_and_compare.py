"""A program in, a verdict out; what was recorded says the same again; the user's files are as they were."""

import json
import os
import subprocess
import sys

from typer.testing import CliRunner

from emulate.cli.app import app

PROGRAM = """
import sys
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    weight, bias = tf.Variable(tf.ones((3, 1)), name="weight"), tf.Variable([0.5], name="bias")
    optimizer = tf.keras.optimizers.SGD(float(sys.argv[1]))
    optimizer.build([weight, bias])
rows = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(12))

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ weight + bias - 1.0) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, [weight, bias]), [weight, bias]))

for batch in data:
    strategy.run(step, args=(batch,))
open("left-behind.txt", "w").close()
"""


def gpudist(folder, *args):
    command = [sys.executable, "-m", "emulate", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def test_a_wrong_program_is_named_and_its_traces_say_so_again(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("--topology", "1x2", "--json", "v.json", "--html", "v.html", "--sarif", "v.sarif", "--traces", "kept")
    done = gpudist(tmp_path, "verify", "train.py", *options, "--steps", "all", "--", "0.1")
    assert done.returncode == 1, done.stderr
    assert "1. loss-scaling" in done.stdout
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert verdict["runs"][0]["causes"][0]["code"] == "loss-scaling"
    assert verdict["runs"][0]["causes"][0]["location"]["file"] == "train.py"
    assert json.loads((tmp_path / "v.sarif").read_text())["runs"][0]["results"][0]["ruleId"] == "loss-scaling"
    assert verdict["runs"][0]["steps"] == 2
    assert {point["kind"] for point in verdict["runs"][0]["course"]} == {"initial-weight", "gradient", "weight"}
    assert verdict["runs"][0]["rows"] == [[6, 6], [6, 6]]
    page = (tmp_path / "v.html").read_text()
    assert "1. loss-scaling" in page
    assert page.count("<img src=") == 2
    assert sorted(os.listdir(tmp_path)) == ["kept", "train.py", "v.html", "v.json", "v.sarif"]

    monkeypatch.chdir(tmp_path)
    again, itself = (CliRunner().invoke(app, ["compare", f"kept/{one}", "kept/1x2"]) for one in ("reference", "1x2"))
    assert again.exit_code == 1, again.stderr
    assert "1. loss-scaling" in again.stdout
    assert itself.exit_code == 0, itself.stdout
