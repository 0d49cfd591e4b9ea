"""Programs with parameter servers are compared with one worker: steps made in order, on the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from emulate.verify.verdict import Run
from fixtures.manifest import ALSO_ASKED

START = """
import keras, numpy as np, sys, tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
keras.utils.set_random_seed(1)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
WORKERS = len(resolver.cluster_spec().as_dict()["worker"])
x = np.random.default_rng(0).normal(size=(210, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    iterations = optimizer.iterations
def losses_of(x, y):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
"""

EACH_ITS_OWN = (
    START
    + """
BATCH = 32 * (WORKERS if "scaled" in sys.argv else 1)
@tf.function
def step(iterator):
    def replica(batch):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(losses_of(*batch), global_batch_size=BATCH)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss
    return strategy.reduce("SUM", strategy.run(replica, args=(next(iterator),)), axis=None)
def rows(context):
    own = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    return own.repeat().batch(32)
iterator = iter(coordinator.create_per_worker_dataset(tf.function(lambda: strategy.distribute_datasets_from_function(rows))))
for _ in range(8):
    coordinator.schedule(step, args=(iterator,))
    if "waiting" in sys.argv:
        coordinator.join()
coordinator.join()
assert iterations.numpy() == 8
"""
)

GATHERED = (
    START
    + """
IS_RIGHT = "right" in sys.argv
@tf.function(reduce_retracing=True)
def gradients_of(x, y, number):
    with tf.GradientTape() as tape:
        losses = losses_of(x, y)
        loss = tf.reduce_sum(losses) / number if IS_RIGHT else tf.reduce_mean(losses)
    return tape.gradient(loss, model.trainable_variables)
for start in range(0, 210, 35):  # an uneven part for each of two workers
    parts = [(x[start:start + 35], y[start:start + 35])] * WORKERS
    if "twice" not in sys.argv:
        parts = zip(*(np.array_split(rows, WORKERS) for rows in parts[0]))
    sent = [coordinator.schedule(gradients_of, args=(tf.constant(a), tf.constant(b), tf.constant(35.0))) for a, b in parts]
    coordinator.join()
    sums = [sum(gradients) for gradients in zip(*[one.fetch() for one in sent])]
    gradients = [tf.constant(g if IS_RIGHT else g / WORKERS) for g in sums]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""
)

BY_CHANCE = """
import keras, numpy as np
import gpudist_core as gd
strategy = gd.make_strategy()
with strategy.scope():
    model, optimizer = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), keras.optimizers.SGD(0.1)
training = gd.CoordinatedTraining(model, optimizer, "mse", schedule="asynchronous")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
training.train(gd.Pipeline.from_arrays((x, x[:, :1]), global_batch_size=16))
"""

FITTED = """
import keras, numpy as np
import gpudist_core as gd
strategy = gd.make_strategy()
with strategy.scope():
    model = gd.distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.Adam(0.01), "mse")
x = np.random.default_rng(0).normal(size=(70, 4)).astype("float32")
model.fit(gd.Pipeline.from_arrays((x, x[:, :1]), global_batch_size=16, shuffle=True, seed=1), epochs=2, verbose=0)
"""


def judged(program: str, tmp_path: Path, preload: Preload, *args: str, topology: str = "2x1+1ps") -> Run:
    path = tmp_path / "train.py"
    path.write_text(program)
    (run,) = emulate.verify(path, topology, args=args, preload=preload).runs
    return run


@pytest.mark.slow  # test_gradients_that_the_coordinator_asks_for_and_applies_are_compared is the fast one
def test_updates_that_are_not_waited_for_are_compared_in_order_and_never_called_equivalent(
    tmp_path: Path, preload: Preload
) -> None:
    run = judged(EACH_ITS_OWN, tmp_path, preload)
    assert (run.verdict, run.steps, run.causes) == ("unverified", 8, ())
    assert [missing.split(":")[0] for missing in run.not_compared] == ["order", "data"]
    assert "they are those of one worker on the same examples" in run.not_compared[0]


@pytest.mark.slow
def test_a_loss_that_is_divided_by_the_workers_is_found_out_beside_rows_of_their_own(tmp_path: Path, preload: Preload) -> None:
    run = judged(EACH_ITS_OWN, tmp_path, preload, "waiting", "scaled")
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["loss-scaling"])


@pytest.mark.parametrize(
    ("how", "verdict"), [("right", "equivalent"), pytest.param("wrong", "divergent", marks=pytest.mark.slow)]
)
def test_gradients_that_the_coordinator_asks_for_and_applies_are_compared(
    how: str, verdict: str, tmp_path: Path, preload: Preload
) -> None:
    run = judged(GATHERED, tmp_path, preload, how)
    assert run.verdict == verdict, run
    assert (run.samples.seen, run.samples.missing, run.samples.repeated) == (210, 0, 0)


@pytest.mark.slow  # test_scorecard.py has the cause
def test_rows_that_the_coordinator_sends_twice_are_found_out(tmp_path: Path, preload: Preload) -> None:
    run = judged(GATHERED, tmp_path, preload, "twice")
    assert (run.verdict, run.causes[0].code) == ("divergent", "samples-repeated")


@pytest.mark.slow
def test_results_that_are_applied_as_they_arrive_are_not_compared(tmp_path: Path, preload: Preload) -> None:
    run = judged(BY_CHANCE, tmp_path, preload)
    assert run.verdict == "unverified"
    assert [missing.split(":")[0] for missing in run.not_compared] == ["order"]


@pytest.mark.slow
def test_fit_of_a_distributed_model_is_that_of_one_worker_and_on_replicas_that_of_one_device(
    tmp_path: Path, preload: Preload
) -> None:
    path = tmp_path / "train.py"
    path.write_text(FITTED)
    verdict = emulate.verify(path, ["3x1+2ps", "1x2"], preload=preload)
    assert verdict.is_equivalent, render(verdict)
    assert [run.topology for run in verdict.runs] == ["3x1+2ps", "1x2"]
    assert verdict.reference.topology == "1x1"
    assert any("one worker and one server (1x1+1ps)" in note for note in verdict.notes)


@pytest.mark.slow  # test_gradients_that_the_coordinator_asks_for_and_applies_are_compared is the fast one
def test_the_recipe_is_that_of_one_worker(preload: Preload) -> None:
    recipe = next(recipe for recipe in ALSO_ASKED if recipe.name == "parameter_servers")
    verdict = emulate.verify(recipe.path, "2x1+1ps", preload=preload)
    assert verdict.is_equivalent, render(verdict)
    assert verdict.reference.topology == "1x1+1ps"


def test_a_program_that_fails_with_servers_says_where_it_was_compared(tmp_path: Path, preload: Preload) -> None:
    path = tmp_path / "train.py"
    path.write_text(START + "raise ValueError('no')\n")
    verdict = emulate.verify(path, "2x1+1ps", preload=preload)
    assert (verdict.exit_code, verdict.runs[0].verdict) == (3, "failed")
    assert "On one worker with one server (1x1+1ps, the reference) the program fails too." in render(verdict)
