"""What fit and its like refuse, each as a call to be made on two replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.core.keras_model.run import Run, digits, hidden, strategy


def said() -> dict[str, str]:
    """What each call raises."""
    texts = {}
    for name, call in {**_of_models(strategy()), **_of_data(strategy())}.items():
        try:
            call()
            texts[name] = "nothing"
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def _of_models(where: Any) -> dict[str, Callable[[], Any]]:
    import keras
    import tensorflow as tf

    from gpudist_core.keras_model import distributed

    run = Run(where)
    x, y = digits(12)

    class Returning(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return tf.constant(1.0)

    class ByRow(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {"by_row": self(data[0])[:, 0]}

    def called_outside(optimizer: str) -> Any:
        with run.scope():
            model = run.ours(keras.Sequential([keras.layers.Dense(10, name="late")]))
            model.compile(optimizer, "sparse_categorical_crossentropy")
        model(x[:2])
        return model

    class Twice(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            for _ in range(2):
                self.optimizer.apply(_gradients(self, data), self.trainable_variables)

    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))

    class Summing(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            gradients = [gradient / 2 for gradient in _gradients(self, data)]
            gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
            self.optimizer.apply(gradients, self.trainable_variables)

    class OfAnotherKeras(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            import tf_keras

            variables = [variable.value for variable in self.trainable_variables]
            tf_keras.optimizers.legacy.SGD(0.1).apply_gradients(zip(_gradients(self, data), variables, strict=True))

    def made(**compiled: Any) -> Any:
        return run.sequential(**compiled)

    def outside() -> Any:
        model = distributed(keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)]))
        model.compile("sgd", "mse")
        return model

    other = tf.distribute.OneDeviceStrategy("CPU:0")
    late, metric = keras.optimizers.SGD(0.1), keras.metrics.SparseCategoricalAccuracy()
    return {
        "no model": lambda: distributed(hidden()),
        "unknown draws": lambda: distributed(made(), draws="column"),
        "XLA": lambda: made(jit_compile=True),
        "optimizer outside": lambda: made(optimizer=lambda: late),
        "metric outside": lambda: made(metrics=lambda: [metric]).fit(x, y, verbose=0),
        "fit after a call outside": lambda: called_outside("sgd").fit(x, y, verbose=0),
        "fit after a call outside, of an optimizer that keeps moments": lambda: called_outside("adam").fit(x, y, verbose=0),
        "a batch after a call outside": lambda: called_outside("sgd").train_on_batch(x, y),
        "evaluate after a call outside": lambda: called_outside("sgd").evaluate(x, y, verbose=0),
        "evaluate after a call outside, with an optimizer that keeps moments": lambda: called_outside("adam").evaluate(
            x, y, verbose=0
        ),
        "predict after a call outside": lambda: called_outside("adam").predict(x, verbose=0),
        "fit in another scope": lambda: _within(other, lambda model: model.fit(x, y, verbose=0), made()),
        "evaluate in another scope": lambda: _within(other, lambda model: model.evaluate(x, y, verbose=0), made()),
        "predict in another scope": lambda: _within(other, lambda model: model.predict(x), made()),
        "fit in a scope of a model of none": lambda: _within(where, lambda model: model.fit(x, y), outside()),
        "compile in a scope of a model of none": lambda: _within(where, lambda model: model.compile("sgd"), outside()),
        "a loss over all rows": lambda: made(loss=keras.losses.Dice()),
        "a loss over all rows by name": lambda: made(loss="tversky"),
        "a loss along the rows": lambda: made(loss=keras.losses.CosineSimilarity(axis=0)),
        "a loss that compares rows": lambda: made(loss=keras.losses.Circle()),
        "a loss that compares rows, by name": lambda: made(loss="circle"),
        "a step that returns a number": lambda: run.sequential(kind=Returning).fit(x, y, verbose=0),
        "a step that logs rows": lambda: run.sequential(kind=ByRow).fit(x[:5], y[:5], verbose=0),
        "an update in a branch": lambda: run.sequential(kind=_branching()).fit(x, y, verbose=0),
        "two updates with a loss scale that may be added up": lambda: run.sequential(kind=Twice, optimizer=scaled).fit(
            x, y, verbose=0
        ),
        "gradients that are summed again": lambda: run.sequential(kind=Summing).fit(x, y, verbose=0),
        "an optimizer of tf_keras": lambda: run.sequential(kind=OfAnotherKeras).fit(x, y, verbose=0),
        "a loss that is one number, with weights": lambda: made(loss=lambda y, p: tf.reduce_mean(p)).fit(
            x, y, sample_weight=np.ones(12), verbose=0
        ),
    }


def accumulating_in_a_branch() -> str:
    """What is said of an accumulation that a branch of the step may leave out."""
    import keras

    x, y = digits(12)
    model = Run(strategy()).sequential(
        kind=_branching(), optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    )
    try:
        model.fit(x, y, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _branching() -> Any:
    import keras
    import tensorflow as tf

    class Branching(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            gradients = _gradients(self, data)

            def apply() -> Any:
                self.optimizer.apply(gradients, self.trainable_variables)
                return 0

            tf.cond(self.optimizer.iterations % 2 == 0, apply, lambda: 0)

    return Branching


def _gradients(model: Any, data: Any) -> Any:
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def _within(where: Any, call: Callable[[Any], Any], model: Any) -> Any:
    with where.scope():
        return call(model)


def _of_data(where: Any) -> dict[str, Callable[[], Any]]:
    import gpudist_core as gd

    run = Run(where)
    x, y = digits(12)
    model = run.sequential()
    data = gd.Pipeline.from_arrays((x, y), global_batch_size=4)
    words = gd.Pipeline.from_arrays((x, y.astype(str).astype(object)), global_batch_size=4)
    weighted = gd.Pipeline.from_arrays((x, y, np.ones(12, "float32")), global_batch_size=4)

    def batches(*parts: Any) -> Any:
        yield parts

    return {
        "fewer rows than replicas": lambda: model.fit(x, y, batch_size=1, verbose=0),
        "an epoch of no batches": lambda: model.fit(x, y, steps_per_epoch=-1, verbose=0),
        "a pipeline and targets": lambda: model.fit(data, y, batch_size=4),
        "a pipeline and a size of its batches": lambda: model.fit(x, y, validation_data=data, validation_batch_size=3),
        "a pipeline that is distributed": lambda: model.fit(data.distribute(where)),
        "no data": lambda: model.fit(None),
        "no targets": lambda: model.fit(x, verbose=0),
        "an evaluation without targets": lambda: model.evaluate(x, verbose=0),
        "a split of a pipeline": lambda: model.fit(data, validation_split=0.5),
        "weights of classes that are not numbered": lambda: model.fit(words, class_weight={1: 2.0}),
        "weights of classes and rows": lambda: model.fit(weighted, class_weight={1: 2.0}),
        "parts of different lengths": lambda: model.fit(batches(x, y[:7]), verbose=0),
    }
