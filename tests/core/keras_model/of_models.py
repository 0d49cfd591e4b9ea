"""Trainings of models of many kinds: with steps, losses, outputs and optimizers of their own; saved and loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.core.keras_model.run import Run, digits, hidden, weights_of, words


def own_train_step(run: Run) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred) + 0.1 * tf.reduce_mean(tf.square(y_pred))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            for metric in self.metrics:
                metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
            told = {"latest": loss, "outputs": tf.reduce_mean(y_pred, axis=0)}
            return {metric.name: metric.result() for metric in self.metrics} | told

    x, y = digits(76)
    return run.fit(run.sequential(hidden, kind=Own), x, y)


def clipped_by_hand(run: Run) -> dict[str, Any]:
    """In a step of one's own, gradients of a table with repeated rows among them; values by hand come after the norm of all."""
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            before = tf.linalg.global_norm(grads)
            grads, norm = tf.clip_by_global_norm(grads, 0.05)
            grads = [tf.clip_by_value(g, -0.01, 0.01) if k else g for k, g in enumerate(grads)]
            grads[-1] = tf.clip_by_norm(grads[-1], 0.005)
            self.optimizer.apply([g * 1.5 if k else g for k, g in enumerate(grads)], self.trainable_variables)
            return {"before": before, "norm": norm, "loss": loss}

    x = words(75)
    with run.scope():
        layers = [keras.layers.Embedding(27, 6), keras.layers.Flatten(), keras.layers.Dense(5)]
        model = run.ours(Own([keras.Input(x.shape[1:], dtype="int64"), *layers]))
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return run.fit(model, x, x[:, 0] % 5)


def ascending_first(run: Run) -> dict[str, Any]:
    """Sharpness-aware minimisation: the weights go up the gradient by a norm of one's own, and back after the second one."""
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):
        def gradients(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data: Any) -> Any:
            variables, (loss, grads) = self.trainable_variables, self.gradients(*data)
            norm = tf.norm(tf.stack([tf.norm(gradient) for gradient in grads]))
            steps = [gradient * (0.5 / (norm + 1e-12)) for gradient in grads]
            for variable, step in zip(variables, steps, strict=True):
                variable.assign_add(step)
            _, grads = self.gradients(*data)
            for variable, step in zip(variables, steps, strict=True):
                variable.assign_sub(step)
            self.optimizer.apply(grads, variables)
            return {"loss": loss}

    x = words(75)
    with run.scope():
        layers = [keras.layers.Embedding(27, 6), keras.layers.Flatten(), keras.layers.Dense(5)]
        model = run.ours(Own([keras.Input(x.shape[1:], dtype="int64"), *layers]))
        model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return run.fit(model, x, x[:, 0] % 5)


def updated_by_hand(run: Run) -> dict[str, Any]:
    """Steps of one's own that make weights of gradients: as the tape gave them, clipped, averaged, kept; then of weights."""
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            grads = tape.gradient(loss, variables)
            clipped, _ = tf.clip_by_global_norm(grads, 0.1)
            means = tf.distribute.get_replica_context().all_reduce("MEAN", grads)
            for each in zip(variables, grads, clipped, means, strict=True):
                variable, gradient, short, mean = each
                variable.assign(0.99 * variable - 0.1 * gradient)
                variable.assign_sub(0.1 * tf.square(gradient) + short + 0.1 * mean)
                variable.assign(tf.clip_by_value(variable, -0.2, 0.2))
                kept = self.kept[variable.path]
                kept.assign(0.9 * kept + gradient)
                variable.assign_sub(0.01 * kept)
            return {"loss": loss}

        def build(self, *args: Any) -> None:
            super().build(*args)
            self.kept = {v.path: keras.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables}

    return run.fit(run.sequential(hidden, kind=Own, metrics=lambda: None), *digits(76))


def of_pairs(run: Run) -> dict[str, Any]:
    """A batch is two views, and the model, which nobody has built, takes both."""
    import keras
    import tensorflow as tf

    class Pairs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = keras.layers.Dense(4), keras.layers.Dense(4)

        def call(self, views: Any) -> Any:
            return self.one(views[0]), self.other(views[1])

        def train_step(self, views: Any) -> Any:
            with tf.GradientTape() as tape:
                one, other = self(views, training=True)
                loss = tf.reduce_mean(tf.reduce_sum(tf.square(one - other), -1))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    x, _ = digits(76)
    with run.scope():
        model = run.ours(Pairs())
        model.compile(keras.optimizers.SGD(0.01))
    return run.fit(model, tf.data.Dataset.from_tensor_slices((x, x + 0.1)).batch(25), batch_size=None)


def own_compute_loss(run: Run) -> dict[str, Any]:
    import keras

    class Own(keras.Sequential):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
            each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
            return keras.ops.mean(each) + 0.01 * keras.ops.mean(keras.ops.square(y_pred))

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            seen = super().compute_metrics(x, y, y_pred, sample_weight)
            return seen | {"half": seen["accuracy"]}

    x, y = digits(76)
    model = run.sequential(hidden, kind=Own)
    return {**run.fit(model, x, y, epochs=1), "evaluate": model.evaluate(x[:30], y[:30], verbose=0, return_dict=True)}


def several_outputs(run: Run) -> dict[str, Any]:
    """Inputs in a dict, two losses with weights and a target for each."""
    import keras

    x, y = digits(75)
    with run.scope():
        left, right = keras.Input((32,), name="left"), keras.Input((32,), name="right")
        joined = keras.layers.Dense(16, activation="tanh")(keras.layers.Concatenate()([left, right]))
        outputs = {
            "label": keras.layers.Dense(10, name="label")(joined),
            "parity": keras.layers.Dense(1, name="parity")(joined),
        }
        model = run.ours(keras.Model({"left": left, "right": right}, outputs))
        losses = {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "parity": "mse"}
        model.compile(
            "sgd", losses, loss_weights={"label": 1.0, "parity": 0.5}, metrics={"label": ["accuracy"], "parity": ["mae"]}
        )
    inputs = {"left": x[:, :32], "right": x[:, 32:]}
    seen = run.fit(model, inputs, {"label": y, "parity": (y % 2).astype("float32")[:, None]})
    return {**seen, "predict": model.predict({name: part[:7] for name, part in inputs.items()}, verbose=0)}


def subclassed(run: Run) -> dict[str, Any]:
    """Built by its first batch, that behaves differently in training; compiled again with a layer that is frozen."""
    import keras

    class Classifier(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = hidden(), keras.layers.Dense(10)

        def call(self, x: Any, training: bool = False) -> Any:
            inner = self.first(x)
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(inner)))
            return self.last(inner * 0.9 if training else inner)

    x, y = digits(76)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum_over_batch_size")
    with run.scope():
        model = run.ours(Classifier())
    model.compile("sgd", loss, metrics=["accuracy"])
    first = run.fit(model, x, y, epochs=1)
    model.first.trainable = False
    model.compile("rmsprop", loss)
    return {"first": first, **run.fit(model, x, y, epochs=1), "predict": model.predict(x[:4], verbose=0)}


def two_optimizers(run: Run) -> dict[str, Any]:
    """As a GAN has them, made by the first step."""
    import keras

    return _with_two(run, lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1))


def two_accumulating_optimizers(run: Run) -> dict[str, Any]:
    """Their sums are made by the first step, too; a loss scale has those of the optimizer within."""
    import keras

    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), initial_scale=1.0)

    return _with_two(run, lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), scaled)


def _with_two(run: Run, one: Any, other: Any) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.down = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4)])
            self.up = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])
            self.tracker = keras.metrics.Mean(name="error")

        def compile(self, one: Any, other: Any) -> None:
            super().compile()
            self.one, self.other = one, other

        @property
        def metrics(self) -> Any:
            return [self.tracker]

        def train_step(self, x: Any) -> Any:
            for optimizer, part in ((self.one, self.down), (self.other, self.up)):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(x - self.up(self.down(x))))
                optimizer.apply_gradients(zip(tape.gradient(loss, part.trainable_weights), part.trainable_weights, strict=True))
            self.tracker.update_state(loss)
            return {"error": self.tracker.result()}

    x, _ = digits(75)
    with run.scope():
        model = run.ours(Pair())
        model.compile(one(), other())
    return run.fit(model, x)


def made_in_build(run: Run) -> dict[str, Any]:
    """A block that makes its BatchNormalization in `build`, as Keras's guide has it; optimizers in a list."""
    import keras
    import tensorflow as tf

    class Block(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.dense, self.norm = keras.layers.Dense(8, use_bias=False), keras.layers.BatchNormalization()
            self.dense.build(shape)
            self.norm.build((None, 8))

        def call(self, x: Any, training: bool = False) -> Any:
            return self.norm(self.dense(x), training=training)

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), keras.layers.Dense(10)

        def compile(self, *optimizers: Any) -> None:
            super().compile(loss="sparse_categorical_crossentropy")
            self.optimizers = list(optimizers)

        def call(self, x: Any, training: bool = False) -> Any:
            return keras.ops.softmax(self.head(self.block(x, training=training)))

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            for optimizer, part in zip(self.optimizers, (self.block, self.head), strict=True):
                variables = part.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    x, y = digits(75)
    with run.scope():
        model = run.ours(Net())
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), keras.optimizers.SGD(0.1, clipnorm=0.1))
    return run.fit(model, x, y)


def saved(run: Run) -> dict[str, Any]:
    """The file is one of plain Keras, which goes on from it; so does what was loaded and is distributed."""
    return _saved(run)


def saved_between_updates(run: Run) -> dict[str, Any]:
    """What was added up since the last update is saved too, among the optimizer's variables, which are numbered in a file."""
    return _saved(run, gradient_accumulation_steps=3, use_ema=True)


def _saved(run: Run, **options: Any) -> dict[str, Any]:
    import tempfile
    from pathlib import Path

    import keras

    x, y = digits(50)
    model = run.sequential(
        hidden,
        keras.layers.BatchNormalization,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1, **options),
    )
    run.fit(model, x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        plain = keras.saving.load_model(path)
        with run.scope():
            again = run.ours(keras.saving.load_model(path))
    assert type(plain) is keras.Sequential
    assert type(plain.optimizer) is keras.optimizers.SGD
    np.testing.assert_allclose(plain.predict(x[:7], verbose=0), model.predict(x[:7], verbose=0), rtol=1e-6, atol=1e-6)
    seen = run.fit(again, x[:14], y[:14], batch_size=7)
    history = plain.fit(x[:14], y[:14], batch_size=7, epochs=2, verbose=0, shuffle=False).history
    return {**seen, "plain": history, "plain weights": weights_of(plain)}


def by_row(run: Run) -> dict[str, Any]:
    """A step of one's own that differentiates the losses by row, and one compiled with a loss that is not reduced."""
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                each = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            self.optimizer.apply(tape.gradient(each, self.trainable_variables), self.trainable_variables)
            return {"loss": tf.reduce_mean(each)}

    x, y = digits(76)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    slow = {"optimizer": lambda: keras.optimizers.SGD(0.01)}
    own, unreduced = run.sequential(hidden, kind=Own, metrics=lambda: None, **slow), run.sequential(hidden, loss=loss, **slow)
    weights = {"own": run.fit(own, x, y)["weights"]}
    return {**weights, **run.fit(unreduced, x, y)}


def predicted_first(run: Run) -> dict[str, Any]:
    """A model whose variables are made when it is first asked to predict."""
    import keras

    class Late(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = keras.layers.Dense(8, "relu"), keras.layers.Dense(10)

        def call(self, x: Any) -> Any:
            return self.last(self.first(x))

    x, y = digits(26)
    with run.scope():
        model = run.ours(Late())
        model.compile(keras.optimizers.SGD(0.2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    predicted = model.predict(x, batch_size=25, verbose=0)
    return {"predicted": predicted, **run.fit(model, x, y)}


def positions(run: Run) -> dict[str, Any]:
    """A table that is looked up once on one device and once on each replica, by an optimizer that squares what it is told."""
    import keras

    class Positions(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(8, 8)

        def call(self, x: Any) -> Any:
            return x + self.table(keras.ops.arange(8))

    x, y = digits(76)
    layers = (lambda: keras.layers.Reshape((8, 8)), Positions, keras.layers.Flatten)
    return run.fit(run.sequential(*layers, optimizer=lambda: keras.optimizers.Adam(0.01)), x, y)
