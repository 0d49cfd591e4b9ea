"""A verdict says whether the step depends on the number of replicas: by the graphs of one device and of each replica."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from emulate.verify import Run

PROGRAM = """
import tensorflow as tf

BATCH = 32
strategy = tf.distribute.MirroredStrategy()
rows = tf.random.stateless_normal((64, 4), (1, 2))
data = tf.data.Dataset.from_tensor_slices((rows, tf.ones((64, 1)))).batch(BATCH)
with strategy.scope():
    weight = tf.Variable(tf.ones((4, 1)))
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.build([weight])


def step(x, y):
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    with tf.GradientTape() as tape:
        errors = tf.square(x @ weight - y)
        if tf.reduce_sum(x) > -1e9:  # a graph of its own
            errors = errors * 1.0
        loss = LOSS
    gradient = tape.gradient(loss, weight)
    optimizer.apply_gradients([(gradient, weight)])
    return loss


@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)


for x, y in strategy.experimental_distribute_dataset(data):
    train(x, y)
"""
OF_BATCH = "tf.reduce_sum(errors) / BATCH"
OF_REPLICA = "tf.reduce_mean(errors) / strategy.num_replicas_in_sync"
WITH_NUMBER = "tf.reduce_sum(errors) / BATCH + 0.0 * tf.cast(number, tf.float32)"
BY_PYTHON = "tf.reduce_sum(errors if tf.get_static_value(number) == 0 else tf.abs(errors)) / BATCH"
IN_A_FUNCTION = "tf.function(tf.reduce_sum)(errors) / BATCH"
LINE = 1 + next(number for number, line in enumerate(PROGRAM.splitlines()) if "LOSS" in line)
SAME = "The step does not depend on the number of replicas"
EXCEPT = "The graph of the step is the same on one device and on {} replicas, except in"


def _step(loss: str, topology: str, folder: Path, preload: Preload) -> tuple[Run, str]:
    program = folder / "train.py"
    program.write_text(PROGRAM.replace("LOSS", loss))
    verdict = emulate.verify(program, topology, steps=2, virtual=topology == "1x16", preload=preload)
    (run,) = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert run.step_graph is not None
    assert " ".join(run.step_graph.text.split()) in " ".join(render(verdict).split())
    return run, run.step_graph.text.replace(f"{program}:", "line ")


@pytest.mark.parametrize(
    ("loss", "topology", "text", "lines"),
    [
        (OF_BATCH, "1x2", f"{SAME}: its graph is the same on one device and on each of 2 replicas, apart from", []),
        (IN_A_FUNCTION, "1x2", f"{SAME}: its graph is the same on one device and on each of 2 replicas, apart from", []),
        (OF_BATCH, "1x16", f"{SAME}: its graph is the same on one device and on each of 16 replicas, apart from", []),
        (WITH_NUMBER, "1x2", f"and the number of the replica in line {LINE}.", [LINE]),
        (WITH_NUMBER, "1x16", f"and the number of the replica in line {LINE}.", [LINE]),
        (OF_REPLICA, "1x2", f"{EXCEPT.format(2)} line {LINE} (RealDiv: 2 on 2 replicas, 1 on one device).", [LINE]),
        (OF_REPLICA, "1x16", f"{EXCEPT.format(16)} line {LINE} (RealDiv: 16 on 16 replicas, 1 on one device).", [LINE]),
        (
            BY_PYTHON,
            "1x2",
            f"not the same on all replicas: replica 1 differs from replica 0 in line {LINE} (Abs only on replica 1",
            [LINE],
        ),
    ],
)
def test_the_verdict_names_the_lines_in_which_the_step_depends_on_the_number_of_replicas(
    loss: str, topology: str, text: str, lines: list[int], tmp_path: Path, preload: Preload
) -> None:
    run, told = _step(loss, topology, tmp_path, preload)
    assert text in told
    assert run.step_graph is not None
    assert [location.line for location in run.step_graph.locations] == lines
    assert run.step_graph.same_on_replicas is (loss != BY_PYTHON)
    assert run.step_graph.depends_on_number is (None if loss == BY_PYTHON else loss == OF_REPLICA)
