"""Trainings whose data could go wrong on several replicas: how much of it there is, where it comes from, what it weighs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.core.keras_model.run import Run, digits, hidden, weights_of, words


def all_of_it(run: Run) -> dict[str, Any]:
    """An empty replica in the last batch; validation, evaluation and prediction of rows that do not divide."""
    x, y = digits(76)
    model = run.sequential(hidden)
    seen = run.fit(model, x, y, validation_data=(x[:31], y[:31]), validation_batch_size=10)
    judged = model.evaluate(x[:26], y[:26], batch_size=10, verbose=0)
    return {**seen, "evaluate": judged, "predict": model.predict(x[:35], verbose=0)}


def first_batch(run: Run) -> dict[str, Any]:
    """It does not divide, and neither do the five batches of an epoch by the three of a call."""
    x, y = digits(139)
    model = run.sequential(hidden, steps_per_execution=3)
    return run.fit(model, x, y, batch_size=25, validation_split=0.2, validation_freq=2)


def weighted(run: Run) -> dict[str, Any]:
    """By rows, then in a second fit by classes."""
    x, y = digits(76)
    weights = np.linspace(0.1, 2, 76).astype("float32")
    model = run.sequential(hidden, weighted_metrics=["accuracy"])
    first = run.fit(model, x, y, sample_weight=weights, epochs=1)
    again = run.fit(model, x, y, class_weight={0: 2.0, 3: 0.5}, epochs=1)
    return {**again, "first": first, "evaluate": model.evaluate(x, y, 25, sample_weight=weights, verbose=0)}


def masked(run: Run) -> dict[str, Any]:
    """Words, letter by letter; the model is built by its first batch. Then each letter has a weight besides."""
    import keras

    x = words(49)
    with run.scope():
        layers = [keras.layers.Embedding(27, 6, mask_zero=True), keras.layers.Dense(8, activation="relu")]
        model = run.ours(keras.Sequential([*layers, keras.layers.Dense(27)]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=["accuracy"])
    seen = run.fit(model, x, x, batch_size=16)
    weights = np.linspace(0, 1, x.size).reshape(x.shape).astype("float32")
    return {**seen, "weighted": run.fit(model, x, x, batch_size=16, sample_weight=weights, epochs=1)}


def of_steps(run: Run) -> dict[str, Any]:
    """Epochs of some of the batches of other kinds of data."""
    import keras
    import tensorflow as tf

    x, y = digits(97)

    class Slices(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, place: int) -> Any:
            return x[place * 22 :][:22], y[place * 22 :][:22]

    def generator() -> Any:
        while True:
            yield from (Slices()[place] for place in range(5))

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(22).repeat()
    model = run.sequential(hidden)
    each = [run.fit(model, data, batch_size=None, steps_per_epoch=3) for data in (dataset, generator())]
    return {"each": each, **run.fit(model, Slices(), batch_size=None, shuffle=False)}


def pipelines(run: Run) -> dict[str, Any]:
    """Of gpudist_core; the rows of a stream are not counted, nor those of a generator of Keras's."""
    from gpudist_core.pipelines import Pipeline

    x, y = digits(76)
    model = run.sequential(hidden)

    def rows(count: int, size: int = 25) -> Any:
        if run.where is None:
            return (x[:count], y[:count])
        return Pipeline.from_arrays((x[:count], y[:count]), global_batch_size=size)

    def stream() -> Any:
        return Pipeline.from_generator(lambda: zip(x, y, strict=True), global_batch_size=25)

    # The classes that have weights are those of the targets that a map has made.
    if run.where is None:
        seen = run.fit(model, *rows(76), validation_data=rows(31), class_weight={1: 0.5})
        again = run.fit(model, x, 9 - y, class_weight={1: 0.5, 3: 4.0})
    else:
        seen = run.fit(model, rows(76), batch_size=None, validation_data=rows(31, 10), class_weight={1: 0.5})
        again = run.fit(model, stream().map(lambda x, y: (x, 9 - y)), batch_size=None, class_weight={1: 0.5, 3: 4.0})
    beside = run.fit(model, x, y, validation_data=rows(31, 10), epochs=1)  # whose batch_size is that of the arrays alone
    whole = rows(31, 10)
    judged = model.evaluate(*whole, verbose=0) if run.where is None else model.evaluate(whole, verbose=0)
    told = model.predict(whole[0] if run.where is None else whole, verbose=0)
    return {**again, "first": seen, "beside": beside, "evaluate": judged, "predict": told}


def not_dense(run: Run) -> dict[str, Any]:
    """Letters of words that are not equally long, and pixels of which most are zero."""
    import keras
    import tensorflow as tf

    class Letters(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = self.add_weight(shape=(27, 8), initializer="glorot_uniform", name="table")
            self.top = keras.layers.Dense(10)

        def call(self, x: Any) -> Any:
            if not isinstance(x, tf.RaggedTensor):  # what Keras builds a model with is dense
                return self.top(tf.zeros((1, 8)))
            return self.top(tf.reduce_mean(tf.ragged.map_flat_values(lambda letter: tf.gather(self.table, letter), x), axis=1))

    class Pixels(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = self.add_weight(shape=(64, 10), initializer="glorot_uniform", name="table")

        def call(self, x: Any) -> Any:
            return tf.sparse.sparse_dense_matmul(x, self.table) if isinstance(x, tf.SparseTensor) else x @ self.table

    images, y = digits(58)
    letters = [row[row > 0] for row in words(58)]
    found = {}
    for kind, x in (
        (Letters, tf.ragged.constant([row.tolist() for row in letters])),
        (Pixels, tf.sparse.from_dense(images)),
    ):
        with run.scope():
            model = run.ours(kind())
            model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(25)
        seen = run.fit(model, data, batch_size=None)
        found[kind.__name__] = {**seen, "evaluate": model.evaluate(data, verbose=0), "predict": model.predict(data, verbose=0)}
    return found


def few_rows(run: Run) -> dict[str, Any]:
    """Validation, evaluation and prediction in batches of fewer rows than there are replicas, of which some are asked for.

    The mean over the rows that count, in each batch by itself, tells other batches from these.
    """
    import keras

    x, y = digits(27)
    told: list[Any] = []
    listener = keras.callbacks.LambdaCallback(on_test_batch_end=lambda batch, logs: told.append((batch, dict(logs))))
    model = run.sequential(hidden, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1))
    judging = {"validation_data": (x[:7], y[:7]), "validation_batch_size": 2, "callbacks": [listener]}
    seen = run.fit(model, x, y, **judging, epochs=1)
    some = run.fit(model, x, y, **judging, epochs=1, validation_steps=2)
    return {
        **seen,
        "some": some,
        "told": told,
        "evaluate": [model.evaluate(x[:7], y[:7], batch_size=2, steps=steps, verbose=0) for steps in (None, 2)],
        "predict": [model.predict(x[:7], batch_size=1, steps=steps, verbose=0) for steps in (None, 2)],
    }


def few_rows_of_pipelines(run: Run) -> dict[str, Any]:
    """The same rows and batches where a pipeline says them."""
    from gpudist_core.pipelines import Pipeline

    x, _ = digits(27)
    model = run.sequential(hidden, loss="mse", metrics=lambda: ["mae"])
    if run.where is None:
        seen = run.fit(model, x, x[:, :10], validation_data=(x[:7], x[:7, :10]), validation_batch_size=2)
        return {**seen, "predict": model.predict(x[:7], verbose=0)}
    few = Pipeline.from_arrays((x[:7], x[:7, :10]), global_batch_size=2)
    seen = run.fit(model, x, x[:, :10], validation_data=few)
    return {**seen, "predict": model.predict(few, verbose=0)}


def on_batch(run: Run) -> dict[str, Any]:
    x, y = digits(97)
    model = run.sequential(hidden)
    trained = [model.train_on_batch(x[:n], y[:n], return_dict=True) for n in (22, 23, 2)]
    weight = model.train_on_batch(x[:5], y[:5], class_weight={0: 3.0})
    tested = model.test_on_batch(x[:9], y[:9])
    return {"logs": [trained, weight, tested, model.predict_on_batch(x[:5])], **weights_of(model)}


def eagerly(run: Run) -> dict[str, Any]:
    x, y = digits(30)
    model = run.sequential(hidden, run_eagerly=True)
    return {**run.fit(model, x, y, epochs=1, batch_size=14), "predict": model.predict(x[:5], verbose=0)}
