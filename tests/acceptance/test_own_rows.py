"""What a replica does with its own rows alone is found out in a batch that grows too, and behind what the user allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from emulate.verify.verdict import Run

PROGRAM = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
N = strategy.num_replicas_in_sync
BATCH = {batch}
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 5, 4)).astype("float32")
y = rng.normal(size=(96, 5)).astype("float32")
mask = (np.arange(5)[None] < rng.integers(1, 6, 96)[:, None]).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((5, 4)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)

def train(x, y, mask):
    with tf.GradientTape() as tape:
        squares = (model(x, training=True)[..., 0] - y) ** 2 * mask
        of_rows = tf.reduce_sum(squares, 1)
        loss = {loss}
    gradients = tape.gradient(loss, model.trainable_variables)
    {clip}
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

step = tf.function(lambda rows: strategy.reduce("{report}", strategy.run(train, rows), axis=None))
rows = tf.data.Dataset.from_tensor_slices((x, y, mask)).batch(BATCH, drop_remainder=True)
for batch in strategy.experimental_distribute_dataset(rows):
    print(float(step(batch)))
"""
FIT = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
with strategy.scope():
    layers = [keras.layers.Dense(12), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, x[:, :3].argmax(1), batch_size=8 * strategy.num_replicas_in_sync, shuffle=False, verbose=0)
"""
GROWS = "6 * N"
OF_ALL = "tf.reduce_sum(squares) / (5 * BATCH)"
OF_THE_HARDEST = "tf.reduce_sum(tf.nn.relu(of_rows - tf.reduce_mean(of_rows))) / BATCH"
OF_ITS_OWN_COUNT = "tf.reduce_sum(squares) / tf.reduce_sum(mask) / N"
NOISE = """first = tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), tf.float32)
    gradients = [g + 0.01 * first * tf.random.stateless_normal(g.shape, seed=[1, 2]) for g in gradients]"""
CLIP = "gradients, _ = tf.clip_by_global_norm(gradients, 0.01)"


@pytest.fixture
def judged(tmp_path: Path, preload: Preload) -> Callable[..., Run]:
    def verify(loss: str, *, batch: str = "12", clip: str = "pass", report: str = "SUM", allow: tuple[str, ...] = ()) -> Run:
        path = tmp_path / "train.py"
        path.write_text(PROGRAM.format(loss=loss, batch=batch, clip=clip, report=report))
        verdict = emulate.verify(path, "1x2", allow=allow, preload=preload)
        print(render(verdict))
        return verdict.runs[0]

    return verify


def codes(run: Run) -> list[str]:
    return [cause.code for cause in run.causes]


def test_a_count_of_a_replicas_own_rows_is_found_out_in_a_batch_that_grows(judged: Callable[..., Run]) -> None:
    run = judged(OF_ITS_OWN_COUNT, batch=GROWS)
    assert (run.verdict, codes(run)) == ("divergent", ["local-normalization"])


@pytest.mark.slow
def test_clipping_on_each_replica_is_found_out_in_a_batch_that_grows(judged: Callable[..., Run]) -> None:
    run = judged(OF_ALL, batch=GROWS, clip=CLIP)
    assert (run.verdict, codes(run)) == ("divergent", ["clip-before-reduce"])


def test_in_a_batch_that_grows_what_is_by_design_is_as_on_one_device_and_is_told(judged: Callable[..., Run]) -> None:
    run = judged(OF_THE_HARDEST, batch=GROWS)
    assert (run.verdict, codes(run)) == ("equivalent", ["in-batch-negatives"])
    assert run.causes[0].advice
    assert "in-batch-negatives: each replica does it with as many rows as one device that is alone has" in run.notes


def test_batch_normalization_in_a_batch_that_grows_is_as_on_one_device_and_is_told(tmp_path: Path, preload: Preload) -> None:
    (tmp_path / "train.py").write_text(FIT)
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload).runs
    assert (run.verdict, codes(run)) == ("equivalent", ["batchnorm-local-statistics"])
    assert run.causes[0].advice
    assert "epoch/loss (of all steps before it, of which the runs have made different numbers)" in run.not_compared


def test_clipping_on_each_replica_is_found_out_behind_what_is_allowed(judged: Callable[..., Run]) -> None:
    run = judged(OF_THE_HARDEST, clip=CLIP, allow=("in-batch-negatives",))
    assert (run.verdict, codes(run)) == ("divergent", ["clip-before-reduce", "in-batch-negatives"])
    assert "the loss is the same with clipping switched off" in run.causes[0].evidence


@pytest.mark.slow
def test_what_the_replicas_hide_behind_what_is_allowed_is_told(judged: Callable[..., Run]) -> None:
    run = judged(OF_THE_HARDEST, allow=("in-batch-negatives",))
    assert (run.verdict, codes(run)) == ("equivalent", ["in-batch-negatives"])
    assert any(what.startswith("what each replica does once beside it") for what in run.not_compared)


@pytest.mark.slow
def test_a_root_of_a_replicas_own_loss_is_told_from_a_count(judged: Callable[..., Run]) -> None:
    run = judged(f"tf.sqrt({OF_ALL})")
    assert codes(run) == ["local-normalization"]
    assert "a factor of its own that no count gives" in run.causes[0].summary


def test_what_a_step_without_a_name_reports_is_compared(judged: Callable[..., Run]) -> None:
    run = judged(OF_ALL, report="MEAN")
    assert (run.verdict, codes(run)) == ("divergent", ["loss-report"])


def test_noise_that_is_drawn_for_a_weight_belongs_to_no_row_though_it_has_as_many(judged: Callable[..., Run]) -> None:
    run = judged(OF_ALL, batch="16", clip=NOISE)  # 8 rows on each of two replicas, and weights of 8 rows
    assert (run.verdict, codes(run)) == ("equivalent", [])
