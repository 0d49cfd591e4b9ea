"""Small training programs, each a function, for tests of what the probe sees. They run in hosts."""

from __future__ import annotations

from typing import Any

ROWS = 96
BATCH = 24


def arrays() -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 6)).astype("float32"), rng.integers(0, 3, ROWS)


def custom_loop(
    *,
    optimizer: str = "sgd",
    dropout: bool = False,
    jit: bool = False,
    after: Any = None,
    epochs: int = 2,
    one_device: bool = False,
    reported: Any = lambda strategy, losses: strategy.reduce("SUM", losses, axis=None),
) -> None:
    """The loop of TensorFlow's guide: per-example losses divided by the global batch, SUM over the replicas."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.OneDeviceStrategy("/GPU:0") if one_device else tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH, drop_remainder=True).repeat(epochs)
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="relu"), *([keras.layers.Dropout(0.5)] if dropout else [])]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
        update = keras.optimizers.get(optimizer)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        update.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function(jit_compile=True if jit else None)
    def train(x: Any, y: Any) -> Any:
        return reported(strategy, strategy.run(step, args=(x, y)))

    for x, y in strategy.experimental_distribute_dataset(data):
        train(x, y)
    if after is not None:
        after()


def assigning_loop(*, eager: bool = False, apart: bool = False) -> None:
    """A step that assigns variables of its own beside its model's: with the optimizer, or in a run of their own."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH).repeat(2)
    first, summed = tf.VariableAggregation.ONLY_FIRST_REPLICA, tf.VariableAggregation.SUM
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6, 3]), name="weights")
        frozen = keras.layers.Dense(3, trainable=False, name="teacher")
        frozen.build((None, 6))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])
        average = tf.Variable(weights, trainable=False, aggregation=first, name="average")
        count = tf.Variable(0, trainable=False, aggregation=summed, name="count")
        last = tf.Variable(0.0, trainable=False, aggregation=first, name="last")
        seen = keras.metrics.Mean("seen")

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights)) / BATCH
        optimizer.apply([tape.gradient(loss, weights)], [weights])
        seen.update_state(loss)
        last.assign(loss)
        if not apart:
            assign()

    def assign() -> None:
        average.assign_add(0.5 * (weights - average))
        count.assign_add(tf.constant(1))
        for variable in frozen.variables:
            variable.assign(0.5 * variable)

    def train(x: Any, y: Any) -> None:
        strategy.run(step, args=(x, y))

    def update() -> None:
        strategy.run(assign)

    graph = (lambda function: function) if eager else tf.function
    train, update = graph(train), graph(update)
    for x, y in strategy.experimental_distribute_dataset(data):
        train(x, y)
        if apart:
            update()


def corrupting_loop() -> None:
    """A step that draws whole numbers for its rows: how often each is counted, and which of its features is left out."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH).repeat(2)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([6, 3]), name="weights")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def step(x: Any, y: Any) -> None:
        times = tf.cast(tf.random.uniform([tf.shape(x)[0]], 1, 5, tf.int32), tf.float32)
        hidden = tf.random.categorical(x, 1)[:, 0]
        kept = x * (1 - tf.one_hot(hidden, 6))
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, kept @ weights)
            loss = tf.reduce_sum(times * losses) / BATCH
        optimizer.apply([tape.gradient(loss, weights)], [weights])

    @tf.function
    def train(x: Any, y: Any) -> None:
        strategy.run(step, args=(x, y))

    for x, y in strategy.experimental_distribute_dataset(data):
        train(x, y)


def nested_loop() -> None:
    """A step within the tf.function that calls a function whose loop only autograph can make; it evaluates annotations."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    with strategy.scope():
        weights = tf.Variable(tf.eye(6), name="weights")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def forward(x: Any, times: Any) -> Any:
        for _ in tf.range(times):
            x = tf.tanh(x @ weights)
        return x

    @tf.function
    def train(x: Any) -> Any:
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(forward(x, tf.constant(3)) ** 2) / BATCH
            optimizer.apply([tape.gradient(loss, weights)], [weights])
            return loss

        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    for x, _ in strategy.experimental_distribute_dataset(data):
        train(x)
