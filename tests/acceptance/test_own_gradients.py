"""Programs that do more with gradients than to hand them to an optimizer, and steps that take their rows by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

START = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
draws = np.random.default_rng(0)
x = draws.normal(size=(96, 6)).astype("float32")
y = x.sum(1, keepdims=True)
BATCH = 16
with strategy.scope():
    weights = [tf.Variable(draws.normal(size=s).astype("float32"), name=n) for n, s in (("a", (6, 5)), ("b", (5, 1)))]
    momenta = [tf.Variable(tf.zeros(w.shape), trainable=False, name=f"momentum_{w.name[0]}") for w in weights]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)
context = tf.distribute.get_replica_context
def errors(x, y):
    return (tf.tanh(x @ weights[0]) @ weights[1] - y)[:, 0]
"""

LOOP = """
@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).repeat(2).batch(BATCH)):
    train(x, y)
"""

CLIPPED = (
    START
    + """
def step(x, y):
    with tf.GradientTape() as tape:
        error = errors(x, y)
        error = error / (tf.math.reduce_std(error) + 0.1)  # of the replica's own rows
        loss = tf.reduce_sum(error ** 2) / BATCH
    gradients = context().all_reduce("SUM", tape.gradient(loss, weights))
    gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
    number = strategy.num_replicas_in_sync
    optimizer.apply_gradients([(gradient / number, weight) for gradient, weight in zip(gradients, weights)])
    return loss
"""
    + LOOP
)

BY_HAND = (
    START
    + """
def step(x, y):
    with tf.GradientTape() as tape:
        error = errors(x, y)
        loss = tf.reduce_sum(error ** 2) / BATCH
        loss += 0.1 * tf.reduce_mean(error) ** 2 / strategy.num_replicas_in_sync  # of the replica's own rows
    gradients = context().all_reduce("SUM", tape.gradient(loss, weights))
    for weight, momentum, gradient in zip(weights, momenta, gradients):
        momentum.assign(0.9 * momentum + gradient)
        weight.assign_sub(0.01 * momentum)
    return loss
"""
    + LOOP
)

ITS_OWN_ROWS = (
    START
    + """
every_x, every_y = tf.constant(x), tf.constant(y)
def step():
    number = BATCH // strategy.num_replicas_in_sync
    start = tf.cast(optimizer.iterations, tf.int32) * BATCH % 96 + REPLICA * number
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(errors(every_x[start : start + number], every_y[start : start + number]) ** 2) / BATCH
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
@tf.function
def train():
    return strategy.reduce("SUM", strategy.run(step), axis=None)
for _ in range(12):
    train()
"""
)


TIED_TO_ITS_SIZE = (
    START
    + """
def checked(rows):
    assert rows == BATCH // len(strategy.extended.worker_devices), "the rows of a replica"
    return np.float32(1)
def step(x, y):
    with tf.GradientTape() as tape:
        each = errors(x, y) ** 2
        of_step = tf.numpy_function(checked, [tf.shape(x)[0]], tf.float32)
        loss = of_step * tf.reduce_sum(each * tf.reduce_max(each)) / BATCH
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
"""
    + LOOP.replace("batch(BATCH)", "batch(BATCH, drop_remainder=True)")
)


ADAM_OF_ITS_OWN = (
    """
import numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
draws = np.random.default_rng(0)
x = draws.normal(size=(96, 6)).astype("float32")
y = x.sum(1, keepdims=True)
BATCH = 16
def average(value):
    return tf.Variable(value, aggregation=tf.VariableAggregation.MEAN)
with strategy.scope():
    weights = [average(draws.normal(size=shape).astype("float32")) for shape in ((6, 5), (5, 1))]
    momenta, deviations = ([average(tf.zeros(w.shape)) for w in weights] for _ in range(2))
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((tf.tanh(x @ weights[0]) @ weights[1] - y) ** 2) / BATCH
    grads = tape.gradient(loss, weights)
    # put together
    for weight, momentum, deviation, grad in zip(weights, momenta, deviations, grads):
        momentum.assign(0.9 * momentum + 0.1 * grad)
        deviation.assign(0.99 * deviation + 0.01 * grad**2)
        weight.assign_sub(0.01 * momentum / (tf.sqrt(deviation) + 1e-6))
    return loss
"""
    + LOOP
)


def verified(folder: Path, preload: Preload, program: str) -> tuple[emulate.Run, str]:
    (folder / "train.py").write_text(program)
    verdict = emulate.verify(folder / "train.py", "1x2", steps=4, preload=preload)
    return verdict.runs[0], render(verdict)


@pytest.mark.slow  # emulate/verify/test_sequential_replay.py has the cause, on made traces
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(CLIPPED, id="clipped after its own sum"),
        pytest.param(BY_HAND, id="an update by hand"),
    ],
)
def test_rows_that_meet_on_a_replica_are_found_behind_gradients_that_the_program_reduces(
    tmp_path: Path, preload: Preload, program: str
) -> None:
    run, text = verified(tmp_path, preload, program)
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["in-batch-negatives"]), text


@pytest.mark.slow  # test_outside_of_run.py has the cause
def test_updates_that_replicas_make_of_their_own_gradients_and_variables_average_are_gradients_that_are_not_added_up(
    tmp_path: Path, preload: Preload
) -> None:
    run, text = verified(tmp_path, preload, ADAM_OF_ITS_OWN)
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["missing-all-reduce"]), text
    assert "the variables average what the replicas assign" in run.causes[0].summary
    cure = "\n".join(line for line in run.causes[0].fix.splitlines() if line.startswith("    "))
    run, text = verified(tmp_path, preload, ADAM_OF_ITS_OWN.replace("    # put together", cure))
    assert run.verdict == "equivalent", text


@pytest.mark.slow
def test_what_an_update_by_hand_keeps_outside_of_the_scope_is_a_variable_that_every_replica_assigns(
    tmp_path: Path, preload: Preload
) -> None:
    program = ADAM_OF_ITS_OWN.replace("    momenta,", "momenta,").replace(
        "# put together", 'grads = tf.distribute.get_replica_context().all_reduce("SUM", grads)'
    )
    run, text = verified(tmp_path, preload, program)
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["variable-aggregation"]), text
    assert "All replicas of a host share one" in run.causes[0].summary


@pytest.mark.slow  # test_scorecard.py has the cause
def test_replicas_that_take_the_same_rows_by_themselves_are_found_by_their_gradients(tmp_path: Path, preload: Preload) -> None:
    run, text = verified(tmp_path, preload, ITS_OWN_ROWS.replace("REPLICA", "0"))
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["samples-repeated"]), text
    assert "bit for bit" in run.causes[0].evidence


def test_a_step_that_takes_its_rows_by_itself_is_not_called_equivalent_and_the_way_out_is_said(
    tmp_path: Path, preload: Preload
) -> None:
    run, text = verified(tmp_path, preload, ITS_OWN_ROWS.replace("REPLICA", "context().replica_id_in_sync_group"))
    assert (run.verdict, run.causes) == ("unverified", ()), text
    assert "Pass it as an argument" in run.not_compared[0]


@pytest.mark.slow
def test_where_nothing_explains_a_difference_the_runs_that_failed_are_told(tmp_path: Path, preload: Preload) -> None:
    run, text = verified(tmp_path, preload, TIED_TO_ITS_SIZE)
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["unexplained"]), text
    (told,) = (note for note in run.notes if "Further runs failed, which could have shown more. " in note)
    assert told.endswith("AssertionError: the rows of a replica")


OF_TWO = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(5).normal(size=(96, 6)).astype("float32")
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(16))
with strategy.scope():
    critic = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    maker = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
    optimizers = [keras.optimizers.RMSprop(0.05), keras.optimizers.SGD(0.05)]
    for optimizer, model in zip(optimizers, (critic, maker)):
        optimizer.build(model.trainable_variables)
def step(x):
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(critic(x) ** 2) - tf.reduce_mean(critic(maker(x)))
        optimizers[0].apply_gradients(zip(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables))
    with tf.GradientTape() as tape:
        made = tf.reduce_sum(critic(maker(x))) / 16
    optimizers[1].apply_gradients(zip(tape.gradient(made, maker.trainable_variables), maker.trainable_variables))
    return made
train = tf.function(lambda batch: strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None))
for batch in data:
    print(float(train(batch)))
"""


def test_what_follows_an_update_that_only_one_run_has_made_is_not_compared(preload: Preload, tmp_path: Path) -> None:
    """The last call of the step is cut: its second update is beyond the wanted steps, and the third one depends on it."""
    (tmp_path / "train.py").write_text(OF_TWO)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", steps=5, preload=preload)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "loss-scaling", render(verdict)
