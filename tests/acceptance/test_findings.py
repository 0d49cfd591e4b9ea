"""What a script of findings/ shows, in a program of a user: the verdict, the cause, the line and the fix are right."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from emulate.verify.verdict import Run

HEAD = """
import keras, numpy as np, tensorflow as tf
import gpudist_core as gd
strategy = tf.distribute.MirroredStrategy()
draw = np.random.default_rng(0)
x = draw.normal(size=(64, 4)).astype("float32")
y = x[:, :1] * 2
"""
FIT = """
model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
"""
DISTILLER = """
y = draw.integers(0, 3, size=(64,))
def network(units):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3)])
with strategy.scope():
    model = keras.distillation.Distiller(network(16), network(4), keras.distillation.LogitsDistillation())
    model.compile(keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
RANGES = """
class Clip(keras.layers.Layer):
    def build(self, shape):
        self.low, self.high = (self.add_weight(shape=(), initializer="zeros", trainable=False, name=n) for n in ("low", "high"))
    def call(self, x, training=False):
        if training:
            self.low.assign(keras.ops.minimum(self.low, keras.ops.min(x)))
            self.high.assign(keras.ops.maximum(self.high, keras.ops.max(x)))
        return tf.quantization.fake_quant_with_min_max_vars(x, self.low.value, self.high.value)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Clip(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
"""
CODEBOOK = """
class Codes(keras.layers.Layer):
    def build(self, shape):
        read, first = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.ONLY_FIRST_REPLICA
        start = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
        self.book = tf.Variable(start, trainable=False, synchronization=read, aggregation=first, name="book")
    def call(self, x):
        near = tf.argmin(tf.reduce_sum((x[:, None] - self.book) ** 2, -1), 1)
        hot = tf.one_hot(near, 8)
        counts = tf.reduce_sum(hot, 0)[:, None]
        means = tf.matmul(hot, x, transpose_a=True) / tf.maximum(counts, 1)
        self.book.assign(tf.where(counts > 0, 0.9 * self.book + 0.1 * means, self.book))
        return x + tf.stop_gradient(tf.gather(self.book, near) - x)
def network(x):
    return outer(codes(inner(x)))
with strategy.scope():
    inner, codes, outer = keras.layers.Dense(4), Codes(), keras.layers.Dense(1)
    network(x[:2])
    variables = inner.trainable_variables + outer.trainable_variables
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((network(x) - y) ** 2) / 16
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss
@tf.function
def train(batch):
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(16)):
    print(float(train(batch)))
"""
OPTIONS = """
def make(context):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
each = tf.distribute.InputOptions(
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    experimental_place_dataset_on_device=True,
    experimental_fetch_to_device=False,
)
strategy.distribute_datasets_from_function(make, each)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 4
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
@tf.function
def train(batch):
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
for batch in strategy.distribute_datasets_from_function(make):
    print(float(train(batch)))
"""
DENSE = """
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.{optimizer}, "mse"{options})
"""
CORRELATION = DENSE.format(optimizer="SGD(0.01)", options=", metrics=[keras.metrics.PearsonCorrelation(axis=0)]")
LAYER_IN_A_MAP = """
x, y = np.repeat(x, 8, axis=0)[:, :, None, None], np.repeat(y, 8, axis=0)
move = keras.layers.RandomTranslation(0.3, 0.3, seed=1)
data = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda x, y: (move(x), y), num_parallel_calls=8).batch(64)
with strategy.scope():
    model = keras.Sequential([keras.Input((4, 1, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(data, epochs=1, verbose=0)
"""
WRONG = {
    # Findings: keras_distiller_on_replicas, keras_distillation_without_softmax.
    "a term of the loss that Keras does not divide": (DISTILLER + FIT, "loss-scaling", "model.fit("),
    # Finding: tfmot_input_ranges_of_each_replica.
    "ranges of each replica's own inputs": (RANGES + FIT, "variable-aggregation", "self.high.assign("),
    # Finding: sonnet_codebooks_of_each_replica.
    "a codebook of each replica's own codes": (CODEBOOK, "variable-aggregation", "counts = "),
    # Finding: mirrored_strategy_keeps_input_options.
    "the options of an earlier dataset": (OPTIONS, "samples-repeated", "return tf.data.Dataset"),
    # Finding: keras_correlation_metrics_of_one_output.
    "a mean of the correlations of batches": (CORRELATION + FIT, "metric-aggregation", "model.fit("),
    "such a mean with gd.distributed": (
        CORRELATION.replace("model.compile", "model = gd.distributed(model)\n    model.compile") + FIT,
        "metric-aggregation",
        "model.fit(",
    ),
    # Finding: keras_scalar_loss_on_replicas.
    "a loss of one number": (
        DENSE.format(optimizer="SGD(0.01)", options="").replace('"mse"', "lambda y, p: keras.ops.mean((y - p) ** 2)") + FIT,
        "loss-scaling",
        "model.compile(",
    ),
}
FIXES = {
    "a codebook of each replica's own codes": "all_gather",
    "the options of an earlier dataset": "MirroredStrategy keeps this mode for every later dataset",
    "a mean of the correlations of batches": "`PearsonCorrelation` and `ConcordanceCorrelation` are such means",
    "such a mean with gd.distributed": "`keras.metrics.R2Score`",
}


def _verified(path: Path, program: str, preload: Preload, topology: str = "1x2") -> tuple[emulate.Verdict, Run]:
    path.write_text(HEAD + program, encoding="utf-8")
    verdict = emulate.verify(path, topology, preload=preload)
    return verdict, verdict.runs[0]


@pytest.mark.parametrize("name", WRONG)
def test_a_surprise_that_makes_another_model_has_its_one_cause_and_its_line(
    tmp_path: Path, preload: Preload, name: str
) -> None:
    program, code, line = WRONG[name]
    verdict, run = _verified(tmp_path / "train.py", program, preload)
    assert [cause.code for cause in run.causes] == [code], render(verdict)
    assert run.causes[0].locations[0].text.startswith(line), render(verdict)
    assert FIXES.get(name, "") in run.causes[0].fix


# Finding: keras_seeded_layers_race_in_parallel_maps. Whether two runs differ is a race, so either answer is right.
def test_layers_with_a_seed_that_race_in_a_map_get_a_fix_that_helps(tmp_path: Path, preload: Preload) -> None:
    verdict, run = _verified(tmp_path / "train.py", LAYER_IN_A_MAP, preload)
    assert [cause.code for cause in run.causes] in ([], ["unseeded-randomness"]), render(verdict)
    assert all("enable_op_determinism" in cause.fix and "ShardingPolicy.DYNAMIC" in cause.fix for cause in run.causes)


FAR_FROM_ZERO = """
import os, sys
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np, tf_keras
tf_keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x, y = draw.normal(size=(64, 4, 4, 1)).astype("float32") + float(sys.argv[1]), draw.normal(size=(64, 1)).astype("float32")
layers = [tf_keras.Input((4, 4, 1)), tf_keras.layers.BatchNormalization(), tf_keras.layers.Flatten(), tf_keras.layers.Dense(1)]
model = tf_keras.Sequential(layers)
model.compile(tf_keras.optimizers.SGD(0.01), "mse", jit_compile="--xla" in sys.argv)
model.fit(x, y, batch_size=16, epochs=1, verbose=0)
"""


# Finding: xla_loses_the_variance_of_fused_batch_normalization.
@pytest.mark.parametrize(("mean", "verdict"), [("0", "equivalent"), ("288", "divergent")])
def test_two_arms_differ_where_xla_loses_the_variance_of_a_batch(
    tmp_path: Path, preload: Preload, mean: str, verdict: str
) -> None:
    (tmp_path / "train.py").write_text(FAR_FROM_ZERO, encoding="utf-8")
    found = emulate.verify(tmp_path / "train.py", "1x1", args=[mean], against=f"{mean} --xla", preload=preload)
    assert found.runs[0].verdict == verdict, render(found)


SEEDED_MAP = """
keras.utils.set_random_seed(0)
noisy = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda x, y: (x + tf.random.normal([4]), y))
"""
GENERATOR = """
def batches():
    while True:
        for begin in range(0, 64, 16):
            yield x[begin : begin + 16], y[begin : begin + 16]
"""
MASKS = """
x, y, places = np.repeat([[1, 2, 0]], 64, axis=0), y, np.repeat([[0, 1, 2]], 64, axis=0)
with strategy.scope():
    words, positions = keras.Input((3,), dtype="int32"), keras.Input((3,), dtype="int32")
    both = [keras.layers.Embedding(4, 4, mask_zero=True)(words), keras.layers.Embedding(4, 4)(positions)]
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Add()(both))
    model = keras.Model([words, positions], keras.layers.Dense(1)(pooled))
    model.compile("sgd", "mse")
x = [x, places]
"""
ACCUMULATION = DENSE.format(
    optimizer="SGD(keras.optimizers.schedules.PolynomialDecay(0.1, 4), gradient_accumulation_steps=4, use_ema=True)", options=""
).replace("model.compile", "model = gd.distributed(model)\n    model.compile")
ADVICE = {
    # Findings: keras_schedules_count_accumulation_steps, keras_average_counts_accumulation_steps.
    "a schedule and an average of accumulated batches": (
        ACCUMULATION + FIT,
        "framework-limit",
        ("learning rate schedule and its average (use_ema) count small batches",),
    ),
    # Finding: keras_merging_layers_drop_masks.
    "a mask that Add drops": (MASKS + FIT, "framework-limit", ("A merging layer of Keras 3 gives no mask on",)),
    # Finding: tf_data_random_maps_repeat_each_epoch.
    "a map that draws with a seed": (
        SEEDED_MAP + DENSE.format(optimizer="SGD(0.01)", options="") + "model.fit(noisy.batch(16), epochs=2, verbose=0)",
        "cached-randomness",
        ("Every epoch has the same random numbers",),
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_surprise_of_one_device_too_is_advice_and_decides_nothing(tmp_path: Path, preload: Preload, name: str) -> None:
    program, code, words = ADVICE[name]
    verdict, run = _verified(tmp_path / "train.py", program, preload)
    assert run.verdict == "equivalent", render(verdict)
    assert [(cause.code, cause.advice) for cause in run.causes] == [(code, True)], render(verdict)
    assert all(word in run.causes[0].summary for word in words)


# Finding: keras_fit_generator_on_replicas. How many batches Keras loses depends on time, so each run may lose others.
def test_batches_of_a_generator_that_keras_loses_are_named(tmp_path: Path, preload: Preload) -> None:
    fit = "model.fit(batches(), steps_per_epoch=4, epochs=2, verbose=0)"
    program = GENERATOR + DENSE.format(optimizer="SGD(0.01)", options="") + fit
    verdict, run = _verified(tmp_path / "train.py", program, preload)
    (cause,) = run.causes
    assert (cause.code, cause.advice) == ("framework-limit", run.verdict == "equivalent"), render(verdict)
    assert "gd.distributed" in cause.fix


# Finding: keras_lora_is_dead_after_load_weights.
def test_trained_variables_that_no_step_changes_are_named(tmp_path: Path, preload: Preload) -> None:
    lora = 'model.layers[-1].enable_lora(2)\n    model.save_weights("a.weights.h5")\n    model.load_weights("a.weights.h5")'
    dense = DENSE.format(optimizer="SGD(0.01)", options="").replace("model.compile", f"{lora}\n    model.compile")
    program = dense + FIT
    verdict, run = _verified(tmp_path / "train.py", program, preload)
    assert run.verdict == "equivalent", render(verdict)
    (note,) = [note for note in run.notes if note.startswith("No step changes")]
    assert "lora_kernel_a" in note
    assert "bias" not in note


# Finding: keras_backup_repeats_batches.
def test_a_backup_within_an_epoch_that_repeats_batches_gets_a_fix_that_helps(tmp_path: Path, preload: Preload) -> None:
    callbacks = 'callbacks=[keras.callbacks.BackupAndRestore("backup", save_freq=3)]'
    fit = f"model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, {callbacks})"
    (tmp_path / "train.py").write_text(HEAD + DENSE.format(optimizer="Adam()", options="") + fit, encoding="utf-8")
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload, faults=["kill:host=0,step=4"], restarts=1)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "recovered-differently", render(verdict)
    assert 'save_freq="epoch"' in cause.fix
