"""Where the system refuses namespaces, as Docker does by default, runs work on copies of folders. Nothing else may differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.emulate.cluster.helpers import start_python
from tests.emulate.cluster.test_cluster_isolation import REFUSED

PROGRAM = """
import keras, numpy as np, tensorflow as tf
import gpudist_core as gd
from losses import loss_of
keras.utils.set_random_seed(1)
draw = np.random.default_rng(1)
x, y = draw.normal(size=(48, 4)).astype("float32"), draw.integers(0, 3, 48)
strategy = gd.make_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
@tf.function
def train(batch):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    strategy.run(step, args=batch)
for batch in gd.Pipeline.from_arrays((x, y), global_batch_size=16).distribute(strategy):
    train(batch)
"""
LOSSES = """
import tensorflow as tf
def loss_of(y, outputs):
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)
    return {}
"""
WRONG, RIGHT = "tf.reduce_mean(each)", "tf.reduce_sum(each) / 16"
COMMAND = "import sys; from emulate.cli import main; sys.exit(main(sys.argv[1:]))"


def start(folder: Path, loss: str, *, refused: bool) -> Any:
    (folder / "train.py").write_text(PROGRAM)
    (folder / "losses.py").write_text(LOSSES.format(loss))
    place = folder.with_name(f"{folder.name}-{refused}")
    files = [f"--json={place}.json", f"--sarif={place}.sarif"]
    arguments = ["verify", str(folder / "train.py"), "--topology", "1x2", "--topology", "2x1", *files]
    code, options = (REFUSED, [COMMAND]) if refused else (COMMAND, [])
    return place, start_python(code, *options, *arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def ended(started: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return what a verification printed, and its JSON and SARIF."""
    place, process = started
    printed = process.communicate(timeout=300)[0].decode()
    assert process.returncode in (0, 1), printed
    return printed, *(json.loads(Path(f"{place}.{kind}").read_text()) for kind in ("json", "sarif"))


def are_copies(verdict: dict[str, Any]) -> bool:
    return any(note.startswith("Each run works on a copy of ") for note in verdict["notes"])


def without_what_may_differ(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a verdict without how long it took, and without what it says of the machine."""
    of_machine = ("seconds", "notes", "note_codes")
    runs = [{name: value for name, value in run.items() if name not in of_machine} for run in verdict["runs"]]
    return {**verdict, "runs": runs, "notes": [], "note_codes": []}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has namespaces")
def test_verdicts_causes_and_lines_are_the_same_without_namespaces(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("wrong", "right")]
    for folder in folders:
        folder.mkdir()
    both = [start(folders[0], WRONG, refused=refused) for refused in (True, False)]
    (printed, verdict, sarif), (_, as_usual, sarif_as_usual) = map(ended, both)
    if not are_copies(verdict):
        pytest.skip("this system gives root namespaces whatever a test does, so that views cannot be refused")
    assert without_what_may_differ(verdict) == without_what_may_differ(as_usual)
    assert sarif == sarif_as_usual
    for run in verdict["runs"]:
        (cause,) = run["causes"]
        assert cause["code"] == "loss-scaling"
        assert [location["text"] for location in cause["locations"]] == [f"return {WRONG}"]
        assert cause["location"]["file"] == "losses.py"
    printed_right, right, _ = ended(start(folders[1], RIGHT, refused=True))
    assert [run["verdict"] for run in right["runs"]] == ["equivalent", "equivalent"], printed_right
    for run in (*verdict["runs"], *right["runs"]):
        assert run["step_graph"]["depends_on_number"] is False
    assert "/views/" not in printed + printed_right
