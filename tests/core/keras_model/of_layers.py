"""Trainings of layers that keep something of the rows they see, hide others, draw for their weights; of own optimizers."""

from __future__ import annotations

from typing import Any

from tests.core.keras_model.run import Run, digits, hidden


def keeping(run: Run) -> dict[str, Any]:
    """Running means, a counter, the vector of a spectral norm; a BatchNormalization that only a function knows."""
    import keras

    class Centred(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)
            self.square = self.add_weight(shape=shape[-1:], initializer="ones", trainable=False, aggregation="mean")
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
                self.square.assign(0.9 * self.square + 0.1 * keras.ops.mean(x * x, axis=0))
                self.calls.assign_add(1)
            return (x - self.mean) / keras.ops.sqrt(self.square + 1.0)

    class Hiding(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            kept = keras.layers.BatchNormalization()
            kept.build(shape)
            self.function = lambda x, training: kept(x, training=training)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.function(x, training)

    def normed() -> Any:
        return keras.layers.SpectralNormalization(keras.layers.Dense(12, use_bias=False))

    x, y = digits(76)
    return run.fit(run.sequential(hidden, Centred, normed, Hiding), x, y)


def drawing_for_weights(run: Run) -> dict[str, Any]:
    """Noise for weights is one draw for all rows, also where there are as many rows as weights."""
    import keras

    class Noisy(keras.layers.Layer):
        def __init__(self, shape: Any) -> None:
            super().__init__()
            self.seeds, self.form = keras.random.SeedGenerator(5), shape

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 16))

        def call(self, x: Any, training: bool = False) -> Any:
            noise = keras.random.normal(self.form(self.kernel), seed=self.seeds) if training else 0.0
            return keras.ops.matmul(x, self.kernel + 0.1 * noise)

    x, y = digits(48)
    model = run.sequential(
        lambda: Noisy(lambda v: v.shape),
        lambda: Noisy(lambda v: tuple(v.shape)),
        lambda: Noisy(keras.ops.shape),
        lambda: keras.layers.Dropout(0.3, seed=1),
        options={"draws": "row"},
    )
    return run.fit(model, x, y, batch_size=48)  # 16 rows on each of three replicas


def first_called_in_a_step(run: Run) -> dict[str, Any]:
    """Weights that are made in a step start as they do anywhere."""
    import keras
    import tensorflow as tf

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = keras.layers.Dense(4), keras.layers.Dense(64)

        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x - self.up(self.down(x))))
            variables = self.down.trainable_variables + self.up.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    x, _ = digits(75)
    with run.scope():
        model = run.ours(Pair())
        model.compile(keras.optimizers.SGD(0.1))
    return run.fit(model, x)


def own_optimizers(run: Run) -> dict[str, Any]:
    """What looks at gradients in methods of its own looks at those of all replicas."""
    import keras
    from keras import ops

    def normed(grads: Any) -> list[Any]:
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in grads))
        return [gradient / (norm + 1e-6) for gradient in grads]

    class Applies(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply(normed(grads), trainable_variables)

    class AppliesPairs(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            grads, variables = zip(*grads_and_vars, strict=True)
            return super().apply_gradients(zip(normed(grads), variables, strict=True))

    class Clips(keras.optimizers.SGD):
        def _clip_gradients(self, grads: Any) -> Any:
            return [ops.clip(gradient, -0.01, 0.01) for gradient in super()._clip_gradients(grads)]

    x, y = digits(76)
    kinds = {
        "apply": lambda: Applies(0.1),
        "apply_gradients": lambda: AppliesPairs(0.1, gradient_accumulation_steps=2),
        "_clip_gradients": lambda: Clips(0.1, global_clipnorm=0.5),
    }
    return {name: run.fit(run.sequential(hidden, optimizer=kind), x, y, epochs=1) for name, kind in kinds.items()}


def keeping_in_16_bits(run: Run) -> dict[str, Any]:
    """A layer's call sees its variables cast to 16 bits; what they keep has 32."""
    import keras

    class Scaled(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(keras.ops.mean(keras.ops.cast(x, "float32")))
            return x

    x, y = digits(76)
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = run.sequential(Scaled)
    finally:
        keras.config.set_dtype_policy(policy)
    run.fit(model, x, y, epochs=1)
    return {"mean": float(model.layers[0].mean.numpy())}


def own_aggregations(run: Run) -> dict[str, Any]:
    """Metrics whose variables are no sums over the replicas."""
    import keras

    class Batches(keras.metrics.Metric):
        def __init__(self, aggregation: str) -> None:
            super().__init__(name=aggregation)
            self.count = self.add_variable((), "zeros", aggregation=aggregation)

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.count.assign(self.count + 1.0)

        def result(self) -> Any:
            return self.count + 0.0

    x, y = digits(75)
    model = run.sequential(hidden, metrics=lambda: [Batches("mean"), Batches("only_first_replica"), "accuracy"])
    return {**run.fit(model, x, y), "evaluate": model.evaluate(x, y, batch_size=25, verbose=0, return_dict=True)}
