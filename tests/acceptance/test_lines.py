"""A wrong program's finding points at the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from benchmarks.scorecard.corpus import read
from emulate.cluster import Preload
from fixtures.corpus.index import FOLDER
from tests.few import few

PROGRAMS = {
    "wrong_clip_in_step": "given",
    "wrong_clipnorm_fit": "given",
    "wrong_layer_state": "loss",
    "wrong_mean_eager_adam": "loss",
    "wrong_tokens_per_replica": "loss",
}


# test_scorecard.py has lines of other stages.
@pytest.mark.parametrize("name", few(PROGRAMS, ("wrong_clip_in_step",)))
def test_a_finding_points_at_the_wrong_line(name: str, preload: Preload) -> None:
    (entry,) = read(FOLDER / f"{name}.py")
    run = emulate.verify(str(entry.path), topology="1x2", steps=4, preload=preload).runs[0]
    first = run.causes[0]
    assert (first.code, first.stage) == (entry.answer.causes[0], PROGRAMS[name])
    assert first.location is not None
    assert first.location.line in entry.answer.lines
    assert "# BUG" in first.location.text


BY_ONE_HOST = """
import json
import os

import tensorflow as tf

is_first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
strategy = tf.distribute.MultiWorkerMirroredStrategy()
data = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal((32, 4), (1, 2))).batch(8)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2)])
    model.set_weights([tf.ones((4, 2)), tf.zeros(2)])
    optimizer = tf.keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
if {loads} and not is_first:
    model.set_weights([tf.eye(4, 2), tf.zeros(2)])  # BUG: start


@tf.function
def train(x):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x))) / 8
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    strategy.run(step, args=(x,))


for number, x in enumerate(strategy.experimental_distribute_dataset(data)):
    if {lowers}:
        optimizer.learning_rate = optimizer.learning_rate / 4  # BUG: update
    train(x)
"""


@pytest.mark.parametrize(
    ("loads", "lowers", "code", "stage"),
    [
        (True, "False", "initial-weights", "start"),
        (False, "number == 2 and not is_first", "replicas-disagree", "update"),
        (False, "number == 2 + is_first", "replicas-disagree", "update"),
    ],
    ids=["weights", "rate", "rate in other steps"],
)
def test_a_finding_points_at_the_line_that_one_host_alone_runs_or_in_other_steps(
    loads: bool, lowers: str, code: str, stage: str, preload: Preload, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_ONE_HOST.format(loads=loads, lowers=lowers))
    first = emulate.verify(str(script), topology="2x1", preload=preload).runs[0].causes[0]
    assert (first.code, first.stage) == (code, stage)
    assert first.location is not None
    assert first.location.text.endswith(f"# BUG: {stage}")


RAW_LOSS = """
import keras, numpy as np, tensorflow as tf
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}
keras.utils.set_random_seed(1)
x = np.random.default_rng(3).normal(size=(64, 8)).astype("float32")
with tf.distribute.MirroredStrategy().scope():
    model = Own()
    model.compile("sgd", "mse")
model.fit(x, x[:, :2], batch_size=16, verbose=0)
"""


def test_a_loss_that_a_train_step_returns_as_each_replica_has_it_is_found_at_the_return(
    tmp_path: Path, preload: Preload
) -> None:
    (tmp_path / "train.py").write_text(RAW_LOSS)
    (run,) = emulate.verify(tmp_path / "train.py", topology="1x2", preload=preload).runs
    assert [(cause.code, cause.stage) for cause in run.causes] == [("loss-report", "reported")]
    assert [location.text for location in run.causes[0].locations] == ['return {"loss": loss}']
