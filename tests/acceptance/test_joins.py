"""What must see the whole batch is named with its line, and the fix that is printed for it mends the program."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
draw = np.random.default_rng(37)
x = draw.normal(size=(96, 10)).astype("float32")
y = (x[:, :3] + 0.5 * draw.normal(size=(96, 3)) > 0).astype("float32")
known = (draw.random((96, 3)) < (0.9, 0.5, 0.3)).astype("float32")
known[::3] = 1.0
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y, known)).batch(16{options}))
with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    averaged = tf.Variable(tf.ones(10), trainable=False, aggregation=tf.VariableAggregation.MEAN)
    read = tf.VariableSynchronization.ON_READ
    own = tf.Variable(1.0, trainable=False, synchronization=read, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
def step(x, y, known):
    context, SUM = tf.distribute.get_replica_context(), tf.distribute.ReduceOp.SUM
    with tf.GradientTape() as tape:
        losses = tf.nn.sigmoid_cross_entropy_with_logits(y, model(x, training=True))
{loss}
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
@tf.function
def train(batch):
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
for batch in data:
    print(float(train(batch)))
"""
PER_TASK = """
        counts = {whole}tf.reduce_sum(known, axis=0){end}
        loss = tf.reduce_sum(losses * known / counts){divided}
"""
PLUS_ONE = """
        counts = {whole}tf.reduce_sum(known){end} + 1.0
        loss = tf.reduce_sum(losses * known) / counts{divided}
"""
MEAN_OF_WEIGHTS = """
        average = {whole}tf.reduce_mean(known){end}
        loss = tf.reduce_sum(tf.reduce_mean(losses * known / average, axis=1)) / 16
"""
# TensorFlow writes zeros of less than 1,000 elements in another way: a share's graph is another one here.
WIDE = """
        wide = (tf.repeat(each, 40, axis=1) for each in (y, model(x, training=True)))
        loss = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(*wide)) / 16
        counts = {whole}tf.reduce_sum(known, axis=0){end}
        loss += tf.reduce_sum(losses * known / counts){divided}
"""
LARGEST = """
        largest = tf.reduce_max({whole}tf.reduce_max(losses)[None]{end})
        loss = tf.reduce_sum(losses) / tf.stop_gradient(largest) / 16
"""
OF_SLOPES = """
        with tf.GradientTape() as of_inputs:
            of_inputs.watch(x)
            guess = model(x, training=True)
        slopes = tf.reduce_sum(of_inputs.gradient(guess, x) ** 2, axis=1)
        penalty = {whole}tf.reduce_mean((slopes - 1) ** 2){end}
        loss = tf.reduce_sum(losses) / 16 + penalty
"""
BOTH = """
        first, second = tf.split(model(tf.concat([x, tf.reverse(x, [1])], 0), training=True), 2)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(y, first)
        apart = {whole}tf.reduce_mean(first - second, axis=0){end}
        loss = tf.reduce_sum(losses) / 16 + tf.reduce_sum(apart**2) / strategy.num_replicas_in_sync
"""
CHOSEN = """
        confident = tf.cast(tf.sigmoid(model(x, training=True)) > 0.5, tf.float32)
        chosen = {whole}tf.reduce_sum(confident, axis=0){end}
        loss = tf.reduce_sum(losses * confident / (1 + chosen)){divided}
"""
OVERLAP = """
        guess = tf.sigmoid(model(x, training=True))
        both = {whole}tf.reduce_sum(y * guess){end}
        either = {whole}tf.reduce_sum(y + guess){end}
        loss = (1 - 2 * both / either) / strategy.num_replicas_in_sync
"""
AGAINST = """
        guess = model(x, training=True)
        scores = tf.matmul(guess, {whole}guess{end}, transpose_b=True)
        losses = tf.reduce_logsumexp(scores, axis=1) - tf.reduce_sum(guess * guess, axis=1)
        loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
"""
ALIKE = """
        guess = model(x, training=True)
        scores = tf.matmul(guess, {whole}guess{end}, transpose_b=True)
        alike = tf.matmul(y, {whole}y{end}, transpose_b=True)
        weighted = tf.reduce_sum(scores * alike, axis=1) / (1 + tf.reduce_sum(alike, axis=1))
        losses = tf.reduce_logsumexp(scores, axis=1) - weighted
        loss = tf.reduce_sum(losses) / 16
"""
AVERAGED = """
        squares = {whole}tf.reduce_sum(x**2, axis=0){end}
        averaged.assign(0.9 * averaged + 0.1 * tf.sqrt(squares))
        losses = tf.nn.sigmoid_cross_entropy_with_logits(y, model(x / averaged, training=True))
        loss = tf.reduce_sum(losses) / 16
"""
OWN = """
        size = {whole}tf.reduce_sum(tf.abs(x)){end}
        own.assign(0.9 * own + 0.1 * size)
        loss = tf.reduce_sum(losses) / 16 / own
"""
OF_REPLICA = {"whole": "", "end": "", "divided": " / strategy.num_replicas_in_sync"}
SUMMED = {"whole": "context.all_reduce(SUM, ", "end": ")", "divided": ""}
AVERAGE = {"whole": "context.all_reduce(tf.distribute.ReduceOp.MEAN, ", "end": ")"}
DIVIDED = {"whole": "", "end": " / strategy.num_replicas_in_sync"}
GATHERED = {"whole": "context.all_gather(", "end": ", axis=0)"}
CASES = {
    "a count for each task": (PER_TASK, SUMMED, "local-normalization", "counts"),
    "a count plus one": (PLUS_ONE, SUMMED, "local-normalization", "counts"),
    "a mean of weights": (MEAN_OF_WEIGHTS, AVERAGE, "local-normalization", "average"),
    "a count in a graph that a share has not": (WIDE, SUMMED, "local-normalization", "counts"),
    "a count of what the model chooses": (CHOSEN, SUMMED, "local-normalization", "chosen"),
    "a mean of two inputs in one pass": (BOTH, AVERAGE, "in-batch-negatives", "apart"),
    "a largest loss": (LARGEST, GATHERED, "in-batch-negatives", "largest"),
    "sums over the batch": (OVERLAP, SUMMED, "in-batch-negatives", "either"),  # of the other one the loss is linear
    "a mean in a penalty of gradients": (OF_SLOPES, DIVIDED, "loss-scaling", "penalty"),
    "a mean of rows against rows, divided by the replicas": (AGAINST, GATHERED, "in-batch-negatives", "scores"),
    "rows against rows by their labels": (ALIKE, GATHERED, "in-batch-negatives", "scores"),
    "a variable that averages what replicas assign": (AVERAGED, SUMMED, "variable-aggregation", "squares"),
    "a variable of each replica": (OWN, SUMMED, "variable-aggregation", "size"),
}
OF_ONE_SIZE = ("a count for each task", "a mean of weights", "a count in a graph that a share has not")
FIXED_BATCH = ", drop_remainder=True"


def _verdict(path: Path, loss: str, preload: Preload, **options: str) -> emulate.Verdict:
    path.write_text(PROGRAM.format(loss=loss.strip("\n"), options=options.get("options", "")))
    return emulate.verify(path, "1x2", steps=4, preload=preload)


@pytest.mark.parametrize(("name", "options"), [*((name, "") for name in CASES), *((name, FIXED_BATCH) for name in OF_ONE_SIZE)])
def test_what_must_see_the_whole_batch_is_named_with_its_line(
    name: str, options: str, preload: Preload, tmp_path: Path
) -> None:
    loss, _, code, variable = CASES[name]
    verdict = _verdict(tmp_path / "train.py", loss.format(**OF_REPLICA), preload, options=options)
    (cause,) = verdict.runs[0].causes
    assert cause.code == code, render(verdict)
    assert cause.locations[0].text.startswith(f"{variable} = "), render(verdict)
    assert "of the whole batch" in cause.evidence


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_fix_for_what_must_see_the_whole_batch_mends_the_program(name: str, preload: Preload, tmp_path: Path) -> None:
    loss, fix, *_ = CASES[name]
    verdict = _verdict(tmp_path / "train.py", loss.format(**fix), preload)
    assert verdict.runs[0].verdict == "equivalent", render(verdict)


def test_a_term_in_a_list_of_terms_that_counts_once_for_each_replica_is_named(preload: Preload, tmp_path: Path) -> None:
    loss = """
        penalty = 0.01 * tf.reduce_sum(model.trainable_variables[0] ** 4)
        loss = tf.reduce_sum([tf.reduce_sum(losses) / 16, penalty])
"""
    verdict = _verdict(tmp_path / "train.py", loss, preload)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "regularization-per-replica", render(verdict)
    assert cause.locations[0].text.startswith("penalty = "), render(verdict)


def test_a_mean_over_own_rows_is_named_beside_rows_that_meet_though_its_size_is_that_of_what_meets(
    preload: Preload, tmp_path: Path
) -> None:
    loss = """
        others = tf.reverse(y, [0])
        losses = tf.nn.sigmoid_cross_entropy_with_logits(others, model(x, training=True))
        loss = tf.reduce_mean(losses)
"""
    verdict = _verdict(tmp_path / "train.py", loss, preload)
    places = {cause.code: cause.locations[0].text for cause in verdict.runs[0].causes}
    assert places.keys() == {"loss-scaling", "in-batch-negatives"}, render(verdict)
    assert places["loss-scaling"] == "loss = tf.reduce_mean(losses)"
    assert places["in-batch-negatives"] == "others = tf.reverse(y, [0])"


def test_rows_that_meet_are_named_where_they_first_do_though_one_join_after_it_is_enough(
    preload: Preload, tmp_path: Path
) -> None:
    loss = """
        codes = model(x, training=True)
        scores = tf.matmul(codes, codes, transpose_b=True)
        often = tf.math.log(1.0 + tf.reduce_sum(known, axis=1))
        rarely = scores - often
        right = tf.range(tf.shape(x)[0])
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=right, logits=rarely)) / 16
"""
    verdict = _verdict(tmp_path / "train.py", loss, preload)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "in-batch-negatives", render(verdict)
    assert cause.locations[0].text == "scores = tf.matmul(codes, codes, transpose_b=True)", render(verdict)


def test_a_count_of_rows_that_come_in_larger_batches_is_named(preload: Preload, tmp_path: Path) -> None:
    loss = """
        guess = tf.sigmoid(model(tf.concat([x, known], 0), training=True)[tf.shape(x)[0] :])
        chosen = tf.reduce_sum(tf.cast(guess > 0.5, tf.float32), axis=0)
        loss = tf.reduce_sum(losses) / 16 + tf.reduce_sum(guess / (1 + chosen)) / strategy.num_replicas_in_sync
"""
    slices = "tf.data.Dataset.from_tensor_slices((x, y, known)).batch(16)"
    larger = "tf.data.Dataset.from_tensor_slices(np.tile(x, (2, 1)) ** 2).batch(32)"
    (tmp_path / "train.py").write_text(
        PROGRAM.format(loss=loss.strip("\n"), options="").replace(
            slices, f"tf.data.Dataset.zip({slices}, {larger}).map(lambda some, more: (*some[:2], more))"
        )
    )
    verdict = emulate.verify(tmp_path / "train.py", "1x2", steps=4, preload=preload)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "local-normalization", render(verdict)
    assert cause.locations[0].text.startswith("chosen = "), render(verdict)


def test_a_choice_among_a_replicas_own_losses_is_no_loss_that_is_too_large(preload: Preload, tmp_path: Path) -> None:
    loss = """
        hard, _ = tf.math.top_k(tf.reduce_mean(losses, axis=1), 8 // strategy.num_replicas_in_sync)
        loss = tf.reduce_sum(hard) / 8
"""
    verdict = _verdict(tmp_path / "train.py", loss, preload, options=FIXED_BATCH)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "in-batch-negatives", render(verdict)
    assert cause.locations[0].text.startswith("hard, _ = "), render(verdict)


def test_rows_that_meet_their_replicas_alone_are_named_beside_what_the_step_gathers(preload: Preload, tmp_path: Path) -> None:
    loss = """
        guess = model(x, training=True)[:, 0]
        at_risk = tf.cast(y[None, :, 1] >= y[:, None, 1], tf.float32)
        log_sum = tf.reduce_logsumexp(guess[None, :] + tf.math.log(at_risk + 1e-9), axis=1)
        number = tf.reduce_sum(context.all_gather(known[:, 0], axis=0))
        loss = tf.reduce_sum((log_sum - guess) * known[:, 0]) / number
"""
    verdict = _verdict(tmp_path / "train.py", loss, preload)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "in-batch-negatives", render(verdict)
    assert cause.locations[0].text.startswith(("at_risk = ", "log_sum = ")), render(verdict)
