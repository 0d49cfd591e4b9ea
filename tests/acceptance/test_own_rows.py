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
DETECTION = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
N, BATCH = strategy.num_replicas_in_sync, 12
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 10)).astype("float32")
found = (rng.random((96, 6)) < 0.3).astype("float32")
boxes = rng.normal(size=(96, 6)).astype("float32")
with strategy.scope():
    inputs = keras.Input((10,))
    hidden = keras.layers.Dense(16, "relu")(inputs)
    heads = [keras.layers.Dense(6, name="class_head")(hidden), keras.layers.Dense(6, name="box_head")(hidden)]
    model = keras.Model(inputs, heads)
    optimizer = keras.optimizers.Adam(0.01)

def train(x, found, boxes):
    with tf.GradientTape() as tape:
        classes, places = model(x, training=True)
        loss = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(found, classes)) / BATCH
        off = tf.abs(places - boxes) * found
        loss += {part}
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss

step = tf.function(lambda rows: strategy.reduce("SUM", strategy.run(train, rows), axis=None))
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, found, boxes)).batch(BATCH)):
    print(float(step(batch)))
"""
GROWS = "6 * N"
OF_ALL = "tf.reduce_sum(squares) / (5 * BATCH)"
OF_THE_HARDEST = "tf.reduce_sum(tf.nn.relu(of_rows - tf.reduce_mean(of_rows))) / BATCH"
OF_ITS_OWN_COUNT = "tf.reduce_sum(squares) / tf.reduce_sum(mask) / N"
NOISE = """first = tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), tf.float32)
    gradients = [g + 0.01 * first * tf.random.stateless_normal(g.shape, seed=[1, 2]) for g in gradients]"""
ADDED_UP = """added_up = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
    gradients = [g / N for g in tf.clip_by_global_norm(added_up, 0.05)[0]]"""
CLIP = "gradients, _ = tf.clip_by_global_norm(gradients, 0.01)"


@pytest.fixture
def judged(tmp_path: Path, preload: Preload) -> Callable[..., Run]:
    def verify(
        loss: str,
        *,
        batch: str = "12",
        clip: str = "pass",
        report: str = "SUM",
        allow: tuple[str, ...] = (),
        steps: int | None = 20,
    ) -> Run:
        path = tmp_path / "train.py"
        path.write_text(PROGRAM.format(loss=loss, batch=batch, clip=clip, report=report))
        verdict = emulate.verify(path, "1x2", steps=steps, allow=allow, preload=preload)
        print(render(verdict))
        return verdict.runs[0]

    return verify


def codes(run: Run) -> list[str]:
    return [cause.code for cause in run.causes]


def test_a_count_of_a_replicas_own_rows_is_found_out_in_a_batch_that_grows(judged: Callable[..., Run]) -> None:
    run = judged(OF_ITS_OWN_COUNT, batch=GROWS, steps=3)
    assert (run.verdict, codes(run)) == ("divergent", ["local-normalization"])


@pytest.mark.slow
def test_clipping_on_each_replica_is_found_out_in_a_batch_that_grows(judged: Callable[..., Run]) -> None:
    run = judged(OF_ALL, batch=GROWS, clip=CLIP)
    assert (run.verdict, codes(run)) == ("divergent", ["clip-before-reduce"])


@pytest.mark.slow
def test_in_a_batch_that_grows_what_is_by_design_is_as_on_one_device_and_is_told(judged: Callable[..., Run]) -> None:
    run = judged(OF_THE_HARDEST, batch=GROWS)
    assert (run.verdict, codes(run)) == ("equivalent", ["in-batch-negatives"])
    assert run.causes[0].advice
    assert "in-batch-negatives: each replica does this, and so does one device that has as many examples" in run.notes


@pytest.mark.slow
def test_batch_normalization_in_a_batch_that_grows_is_as_on_one_device_and_is_told(tmp_path: Path, preload: Preload) -> None:
    (tmp_path / "train.py").write_text(FIT)
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload).runs
    assert (run.verdict, codes(run)) == ("equivalent", ["batchnorm-local-statistics"])
    assert run.causes[0].advice
    assert run.not_compared == ()  # the epochs are as long


@pytest.mark.slow
def test_a_mean_over_its_own_rows_is_found_out_where_rows_depend_on_each_other_in_a_batch_that_grows(
    judged: Callable[..., Run],
) -> None:
    run = judged("tf.reduce_mean(tf.nn.relu(of_rows - tf.reduce_mean(of_rows)))", batch=GROWS)
    assert (run.verdict, codes(run)) == ("divergent", ["loss-scaling", "in-batch-negatives"])


@pytest.mark.slow  # test_end_of_epoch.py and others here have the causes
@pytest.mark.parametrize(
    ("loss", "batch", "found"),
    [
        (OF_ITS_OWN_COUNT, "12", "local-normalization"),
        ("tf.reduce_mean(of_rows) / N", "13", "uneven-batch"),
    ],
)
def test_a_count_of_a_replicas_own_rows_is_found_out_behind_gradients_that_the_program_adds_up(
    judged: Callable[..., Run], loss: str, batch: str, found: str
) -> None:
    """All replicas hand the same to the optimizer then; it is not that rows depend on each other."""
    run = judged(loss, batch=batch, clip=ADDED_UP)
    assert run.verdict == "divergent"
    assert codes(run)[0] == found
    assert "in-batch-negatives" not in codes(run)


@pytest.mark.slow
def test_what_is_wrong_in_a_batch_that_grows_is_found_out_in_a_step_that_draws(judged: Callable[..., Run]) -> None:
    run = judged(OF_ITS_OWN_COUNT.replace("squares", "squares * tf.random.uniform(tf.shape(squares))"), batch=GROWS)
    assert (run.verdict, codes(run)) == ("divergent", ["local-normalization"])


def test_what_replicas_do_with_their_own_rows_is_not_hidden_where_one_device_cannot_have_all_of_a_batch_that_grows(
    judged: Callable[..., Run],
) -> None:
    """A weight for each place of a replica's batch: one device that gets all rows at once has no weights for them."""
    of_places = "tf.reduce_sum(tf.nn.relu(of_rows - tf.reduce_mean(of_rows)) * tf.linspace(0.5, 1.5, 6)) / BATCH"
    run = judged(of_places, batch=GROWS, steps=4)
    assert (run.verdict, codes(run)) == ("unverified", [])
    assert any("could not give one device the same examples" in note for note in run.notes)


@pytest.mark.slow
def test_a_count_of_a_replicas_own_rows_is_found_out_beside_batch_normalization(tmp_path: Path, preload: Preload) -> None:
    program = PROGRAM.replace(
        'Dense(8, "tanh")', 'Dense(8), keras.layers.BatchNormalization(), keras.layers.Activation("tanh")'
    )
    (tmp_path / "train.py").write_text(program.format(loss=OF_ITS_OWN_COUNT, batch="12", clip="pass", report="SUM"))
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload).runs
    assert codes(run) == ["local-normalization", "batchnorm-local-statistics"]


@pytest.mark.slow
def test_clipping_on_each_replica_is_found_out_behind_what_is_allowed(judged: Callable[..., Run]) -> None:
    run = judged(OF_THE_HARDEST, clip=CLIP, allow=("in-batch-negatives",))
    assert (run.verdict, codes(run)) == ("divergent", ["clip-before-reduce", "in-batch-negatives"])
    assert "the gradient of each replica has the same norm as that of one device, 0.01" in run.causes[0].evidence


@pytest.mark.slow
def test_what_the_replicas_hide_behind_what_is_allowed_is_told(judged: Callable[..., Run]) -> None:
    run = judged(OF_THE_HARDEST, allow=("in-batch-negatives",))
    assert (run.verdict, codes(run)) == ("equivalent", ["in-batch-negatives"])
    assert any(what.startswith("code that does not depend on the examples") for what in run.not_compared)


@pytest.mark.slow
def test_a_root_of_a_replicas_own_loss_is_told_from_a_count(judged: Callable[..., Run]) -> None:
    run = judged(f"tf.sqrt({OF_ALL})")
    assert codes(run) == ["local-normalization"]
    assert "has its own factor, and no count explains it" in run.causes[0].summary


def test_what_a_step_without_a_name_reports_is_compared(judged: Callable[..., Run]) -> None:
    run = judged(OF_ALL, report="MEAN", steps=4)
    assert (run.verdict, codes(run)) == ("divergent", ["loss-report"])


@pytest.mark.slow
def test_noise_that_is_drawn_for_a_weight_belongs_to_no_row_though_it_has_as_many(judged: Callable[..., Run]) -> None:
    run = judged(OF_ALL, batch="16", clip=NOISE)  # 8 rows on each of two replicas, and weights of 8 rows
    assert (run.verdict, codes(run)) == ("equivalent", [])


@pytest.mark.slow  # emulate/probe/test_replays.py has draws of rows
def test_noise_that_is_drawn_for_rows_belongs_to_them_though_a_weight_has_as_many(judged: Callable[..., Run]) -> None:
    drawn = "tf.reduce_sum(squares * (1 + 0.1 * tf.random.normal((tf.shape(x)[0], 1)))) / (5 * BATCH)"
    run = judged(drawn, batch="16", steps=4)  # 8 rows on each of two replicas, and a weight of shape (8, 1)
    assert (run.verdict, codes(run)) == ("equivalent", [])


def test_a_mean_over_what_is_masked_is_told_from_clipping_where_all_losses_are_alike(judged: Callable[..., Run]) -> None:
    """At the start each token of a language model has the same loss, whatever it is divided by."""
    run = judged("tf.reduce_sum(squares - tf.stop_gradient(squares - mask)) / tf.reduce_sum(mask) / N", steps=4)
    assert (run.verdict, codes(run)[0]) == ("divergent", "local-normalization")


@pytest.mark.parametrize(
    ("part", "found", "member"),
    [
        pytest.param(
            "tf.reduce_sum(off) / tf.reduce_sum(found) / N",
            ["local-normalization"],
            "the sum (Sum, ",
            id="a count of its own",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "tf.reduce_sum(tf.nn.relu(classes - tf.reduce_mean(classes, 0))) / BATCH + tf.reduce_mean(off)",
            ["loss-scaling", "in-batch-negatives"],
            "the number of examples (",
            id="a mean",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_with_a_part_of_the_loss_is_found_in_that_part_alone(
    part: str, found: list[str], member: str, tmp_path: Path, preload: Preload
) -> None:
    """No example depends on others where the part has a count of its own: nothing else is named there, allowed or not."""
    (tmp_path / "train.py").write_text(DETECTION.format(part=part))
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload, allow=("in-batch-negatives",)).runs
    assert (run.verdict, codes(run)) == ("divergent", found)
    wrong = run.causes[0]
    assert member in wrong.evidence
    assert wrong.location is not None
    assert wrong.location.text == f"loss += {part}"


TUTORIAL = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
N = strategy.num_replicas_in_sync
BATCH = 8 * N
x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
with strategy.scope():
    l2 = keras.regularizers.L2(0.01)
    layers = [keras.layers.Dense(12, kernel_regularizer=l2), {norm}keras.layers.ReLU(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = keras.optimizers.SGD(0.1 * N)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

def train(x, y):
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(loss_of(y, model(x, training=True)), global_batch_size=BATCH)
        loss += {regularization}
    context = tf.distribute.get_replica_context()
    gradients = context.all_reduce("SUM", tape.gradient(loss, model.trainable_variables))
    gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
    optimizer.apply_gradients((g / {share}, v) for g, v in zip(gradients, model.trainable_variables))
    return loss

step = tf.function(lambda rows: strategy.reduce("SUM", strategy.run(train, rows), axis=None))
rows = tf.data.Dataset.from_tensor_slices((x, x[:, :3].argmax(1))).batch(BATCH, drop_remainder=True)
for batch in strategy.experimental_distribute_dataset(rows):
    print(float(step(batch)))
"""
SCALED = "tf.nn.scale_regularization_loss(tf.add_n(model.losses))"


@pytest.mark.parametrize(
    ("norm", "regularization", "share", "verdict", "found"),
    [
        # test_correct_programs.py has scales_batch_with_replicas.
        pytest.param("", SCALED, "N", "equivalent", [], id="right", marks=pytest.mark.slow),
        pytest.param(
            "keras.layers.BatchNormalization(), ",
            SCALED,
            "N",
            "equivalent",
            ["batchnorm-local-statistics"],
            id="right, normalized",
            marks=pytest.mark.slow,
        ),
        pytest.param("", SCALED, "1", "divergent", ["double-all-reduce"], id="added up twice", marks=pytest.mark.slow),
        pytest.param(
            "",
            "tf.add_n(model.losses)",
            "N",
            "divergent",
            ["regularization-per-replica"],
            id="once for each replica",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_in_a_batch_that_grows_the_number_of_replicas_may_make_the_batch_and_divide_what_is_added_up(
    norm: str, regularization: str, share: str, verdict: str, found: list[str], tmp_path: Path, preload: Preload
) -> None:
    (tmp_path / "train.py").write_text(TUTORIAL.format(norm=norm, regularization=regularization, share=share))
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload).runs
    assert (run.verdict, [code for code in codes(run) if code != "update-scaling"]) == (verdict, found)
    assert [cause.evidence for cause in run.causes if cause.code == "update-scaling" and cause.advice] == [
        "the learning rate is 0.2, 0.1 on one device; this depends on the number of replicas or workers"
    ]


@pytest.mark.slow
def test_what_else_is_wrong_is_found_behind_batch_normalization_of_each_replica(tmp_path: Path, preload: Preload) -> None:
    program = TUTORIAL.replace("BATCH = 8 * N", "BATCH = 16").replace('context.all_reduce("SUM", ', "(").replace("{share}", "1")
    program = program.format(norm="keras.layers.BatchNormalization(), ", regularization=SCALED)
    (tmp_path / "train.py").write_text(program.replace("0.1 * N", "0.1"))
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload).runs
    assert codes(run) == ["clip-before-reduce", "batchnorm-local-statistics"]


CONTRASTIVE = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
with strategy.scope():
    layers = [keras.layers.Dense(12), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dense(6)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = keras.optimizers.SGD(0.1)
def train(x):
    with tf.GradientTape() as tape:
        one, other = (tf.math.l2_normalize(model(view, training=True), -1) for view in (x, x + 0.1))
        labels = tf.range(tf.shape(x)[0])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.matmul(one, other, transpose_b=True) / 0.2)
        loss = tf.reduce_sum(loss) / 16
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
step = tf.function(lambda rows: strategy.reduce("SUM", strategy.run(train, (rows,)), axis=None))
for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(16)):
    step(batch)
"""


@pytest.mark.slow
def test_a_loss_that_compares_rows_is_found_behind_batch_normalization_of_each_replica(
    tmp_path: Path, preload: Preload
) -> None:
    (tmp_path / "train.py").write_text(CONTRASTIVE)
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload).runs
    assert codes(run) == ["batchnorm-local-statistics", "in-batch-negatives"]


FITTED = """
import keras, numpy as np, sys, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
keras.utils.set_random_seed(1)
draws = np.random.default_rng(0)
number = strategy.num_replicas_in_sync
class Grows(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)
    def call(self, x):
        return self.outer(self.inner(x))
class Meets(keras.Model):
    def __init__(self):
        super().__init__()
        self.users, self.films = keras.layers.Embedding(10, 4), keras.layers.Embedding(12, 4)
    def call(self, x):
        users, films = self.users(x[:, 0]), self.films(x[:, 1])
        together = keras.ops.tensordot(users, films, 2)  # over the rows too: one number for the whole batch
        return keras.ops.sigmoid(together + keras.ops.sum(users, 1, keepdims=True))
if "grows" in sys.argv:
    x, model, optimizer, batch = draws.normal(size=(96, 4)), Grows, "sgd", 8 * number
else:
    x, model, optimizer, batch = draws.integers(0, 10, (96, 2)), Meets, "adam", 16
y = draws.uniform(size=(96, 1))
with strategy.scope():
    model = model()
    model.compile(optimizer, "mse")
model.fit(x[:64], y[:64], batch_size=batch, epochs=2, verbose=0, validation_data=(x[64:], y[64:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "codes"), [("grows", []), ("meets", ["in-batch-negatives"])])
def test_what_is_evaluated_between_epochs_is_no_step_of_a_replay(
    how: str, codes: list[str], tmp_path: Path, preload: Preload
) -> None:
    path = tmp_path / "train.py"
    path.write_text(FITTED)
    verdict = emulate.verify(path, "1x2", args=[how], preload=preload)
    assert [cause.code for cause in verdict.runs[0].causes if not cause.advice] == codes, render(verdict)
    assert verdict.is_equivalent == (not codes), render(verdict)


@pytest.mark.slow
def test_a_part_with_a_count_of_its_own_is_found_beside_one_with_the_count_of_all(tmp_path: Path, preload: Preload) -> None:
    of_all = 'tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(found))'
    part = f"tf.reduce_sum(off) / tf.reduce_sum(found) / N + tf.reduce_sum(classes ** 2 * found) / {of_all}"
    (tmp_path / "train.py").write_text(DETECTION.format(part=part))
    (run,) = emulate.verify(tmp_path / "train.py", "1x2", preload=preload).runs
    assert (run.verdict, codes(run)) == ("divergent", ["local-normalization"])
    assert "the sum (Sum" in run.causes[0].evidence


PARTS = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
rows = tf.data.Dataset.from_tensor_slices(x).batch(12, drop_remainder={known})
with strategy.scope():
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model, optimizer = keras.Sequential([keras.Input((6,)), *layers]), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
def step(real):
    both = tf.concat([tf.random.normal(tf.shape(real)), real], 0)
    labels = tf.concat([tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))], 0)
    labels += 0.5 * tf.random.uniform(tf.shape(labels))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(both, training=True) - labels) ** 2) / 24
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
@tf.function
def train(rows):
    return strategy.reduce("SUM", strategy.run(step, args=(next(rows),)), axis=None)
rows = iter(strategy.experimental_distribute_dataset(rows))
for _ in range(4):
    train(rows)
"""


@pytest.mark.parametrize("known", [True, False])
def test_each_part_of_a_joined_batch_has_draws_of_its_own_examples(preload: Preload, tmp_path: Path, known: bool) -> None:
    program = tmp_path / "parts.py"
    program.write_text(PARTS.format(known=known))
    verdict = emulate.verify(program, "1x2", preload=preload)
    assert verdict.runs[0].verdict in ("equivalent", "by-design"), render(verdict)
    assert {cause.code for cause in verdict.runs[0].causes} <= {"identical-dropout"}
    assert not any(note.startswith("Each replica makes its own random draw") for note in verdict.runs[0].notes)


TWICE = """
import keras, numpy as np, sys, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
with strategy.scope():
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.5, seed=2), keras.layers.Dense(1)]
    model, optimizer = keras.Sequential([keras.Input((6,)), *layers]), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
def step(x):
    half = x.shape[0] // 2
    batches = [tf.concat([x, x], 0)] if sys.argv[1] == "joined" else [x[:half], x[half:]]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(model(batch, training=True) ** 2) for batch in batches]) / 24
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss
train = tf.function(lambda rows: strategy.reduce("SUM", strategy.run(step, args=(rows,)), axis=None))
for rows in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(12, drop_remainder=True)):
    train(rows)
"""


@pytest.mark.parametrize("how", ["joined", "split"])
def test_equal_masks_of_replicas_are_found_in_parts_of_a_batch_and_in_a_batch_that_is_there_twice(
    how: str, tmp_path: Path, preload: Preload
) -> None:
    program = tmp_path / "twice.py"
    program.write_text(TWICE)
    (run,) = emulate.verify(program, "1x2", args=[how], preload=preload).runs
    assert (run.verdict, codes(run)) == ("by-design", ["identical-dropout"])
    assert not any(note.startswith("Each replica makes its own random draw") for note in run.notes)
