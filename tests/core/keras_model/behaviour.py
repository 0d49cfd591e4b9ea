"""What fit does beside the numbers, each seen on two replicas."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tests.core.keras_model import of_models
from tests.core.keras_model.run import Run, digits, hidden, strategy


def seen_all(folder: str) -> dict[str, Any]:
    """What each of the functions below sees."""
    import keras

    run, seen = Run(strategy()), {}
    for act in (masks, damaged, drawn_bar, logs_kept, ended_by_error, resumed, warned, pickled, cloned, frozen):
        keras.utils.set_random_seed(2)
        seen[act.__name__] = act(run, f"{folder}/{act.__name__}")
    return seen


def pickled(run: Run, folder: str) -> dict[str, Any]:
    """What pickle and copy make of a model is a plain one."""
    import copy
    import pickle

    model = run.sequential(hidden)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    kinds = [type(one).__mro__[0].__module__ for one in copies] + [type(one.optimizer).__name__ for one in copies]
    same = [all(np.array_equal(a, b) for a, b in zip(model.get_weights(), one.get_weights(), strict=True)) for one in copies]
    return {"kinds": kinds, "same": same, "distributed": [hasattr(one, "_gpudist_draws") for one in copies]}


def cloned(run: Run, folder: str) -> list[Any]:
    """How clones draw, and what model they are of: of one that draws by row, then of the same that does no more."""
    import keras

    seen: list[Any] = []
    with run.scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        for draws in ("row", "replica"):
            clone = keras.models.clone_model(run.ours(model, draws=draws))
            clone.compile("sgd", "mse")
            clone.fit(np.ones((3, 4)), np.ones(3), verbose=0)  # one row more on a replica, which Keras alone cannot take
            seen += [clone._gpudist_draws, type(clone).__name__]
    return seen


def frozen(run: Run, folder: str) -> dict[str, Any]:
    """By how much a layer moves that was frozen after a fit, in batches of its shapes and of others; what is said."""
    import warnings

    x, y = digits(20)
    model = run.sequential(hidden)
    model.fit(x, y, batch_size=10, verbose=0)
    model.layers[0].trainable = False
    before = model.layers[0].get_weights()[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=10, verbose=0)
        model.fit(x, y, batch_size=8, verbose=0)
    said = [str(one.message) for one in caught if one.category is UserWarning]
    return {"moved": float(np.abs(model.layers[0].get_weights()[0] - before).max()), "said": said}


def masks(run: Run, folder: str) -> list[Any]:
    """What each replica's dropout leaves of ones."""
    import keras

    left: list[Any] = []

    class Seeing(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            left.append(self.layers[0](data[0], training=True).numpy())
            return {}

    model = run.sequential(lambda: keras.layers.Dropout(0.5, seed=1), kind=Seeing, run_eagerly=True)
    model.fit(np.ones((2, 64), "float32"), np.zeros(2), batch_size=2, verbose=0)
    return left


def damaged(run: Run, folder: str) -> dict[str, Any]:
    """A row that is no number is on one replica: all copies are the same, and Keras's callback ends the training."""
    import keras

    x, y = digits(20)
    x[9] = np.nan
    model = run.sequential()
    history = model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    copies = [[part.numpy() for part in run.where.experimental_local_results(v.value)] for v in model.trainable_variables]
    return {"copies": copies, "losses": history.history["loss"]}


def drawn_bar(run: Run, folder: str) -> tuple[str, list[float]]:
    """What the progress bar shows."""
    import io

    x, y = digits(20)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        history = run.sequential(hidden).fit(x, y, batch_size=5, epochs=2)
    return text.getvalue(), history.history["loss"]


def logs_kept(run: Run, folder: str) -> dict[str, Any]:
    """Logs that a callback keeps, changes or copies, as a dict."""
    import copy
    import pickle

    import keras

    x, y = digits(15)
    every: list[Any] = []
    found: dict[str, Any] = {}

    class Keeping(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            every.append(logs)
            if batch == 2:
                found["copies"] = [dict(logs), {**logs}, logs.copy(), copy.copy(logs), pickle.loads(pickle.dumps(logs))]
                found["equal"] = all(dict(one) == logs for one in found["copies"])
                found["kinds"] = {type(value).__name__ for value in logs.values()}
                found["taken"] = [logs.pop("accuracy"), logs.setdefault("more", 3.0), logs | {"x": 1.0}, sorted(logs)]

    run.sequential(hidden).fit(x, y, batch_size=5, verbose=0, callbacks=[Keeping()])
    return found | {"losses": [float(logs["loss"]) for logs in every]}


def ended_by_error(run: Run, folder: str) -> dict[str, Any]:
    """A callback raises in the second epoch, and the process goes on: with another fit of the model, and another run."""
    import os
    import signal

    import keras

    import gpudist_core as gd

    x, y = digits(20)
    before = signal.getsignal(signal.SIGTERM)

    class Ending(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyError("the disk of the log is full")

    def fit(model: Any, *callbacks: Any) -> int:
        return len(model.fit(x, y, batch_size=5, epochs=4, verbose=0, callbacks=list(callbacks)).history["loss"])

    model = run.sequential(hidden)
    try:
        fit(model, gd.Checkpoints(folder), Ending())
        raised = "nothing"
    except KeyError as error:
        raised = str(error)
    found = {"raised": raised, "files": sorted(os.listdir(folder)), "signal": signal.getsignal(signal.SIGTERM) == before}
    # A run that goes on makes its second epoch again, and its model's next fit with the first one again.
    again = run.sequential(hidden)
    found["rest"] = fit(again, gd.Checkpoints(folder))
    return found | {"next": fit(again), "next of the other": fit(model)}


def resumed(run: Run, folder: str) -> dict[str, Any]:
    """Arrays in an order that nobody gave a seed for, left in the middle of the second epoch."""
    import keras

    import gpudist_core as gd
    from gpudist_core.upstream import trainer

    class Rows(keras.metrics.Metric):
        """How often each row was there."""

        def __init__(self) -> None:
            super().__init__(name="rows")
            self.counts = self.add_weight(name="counts", shape=(20,), initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(keras.ops.cast(y[:, 0], "int32"), 20), axis=0))

        def result(self) -> Any:
            return self.counts + 0.0

    class Ending(keras.callbacks.Callback):
        calls = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.calls += 1
            if self.calls == 6:
                raise KeyError

    def fit(*callbacks: Any) -> Any:
        model = run.sequential(loss="mse", metrics=lambda: [Rows()])
        y = np.repeat(np.arange(20.0, dtype="float32")[:, None], 10, 1)
        return model.fit(digits(20)[0], y, batch_size=5, epochs=3, verbose=0, callbacks=list(callbacks)).history

    told, trainer.seed = trainer.seed, lambda: None
    try:
        with contextlib.suppress(KeyError):
            fit(gd.Checkpoints(folder, every=1), Ending())
        return {"counts": fit(gd.Checkpoints(folder, every=1))["rows"]}
    finally:
        trainer.seed = told


def shuffled_by_each_host(run: Run) -> dict[str, Any]:
    """The rows that this host trains on, epoch by epoch, where nobody has told all hosts one seed."""
    import json
    import os
    import random

    import keras
    import tensorflow as tf

    host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    random.seed(host)
    np.random.seed(host)
    numbers = np.arange(20, dtype="float32")[:, None]

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, place: int) -> Any:
            return numbers[2 * place : 2 * place + 2], numbers[2 * place : 2 * place + 2]

    def trained(data: Any, **options: Any) -> list[Any]:
        rows: list[float] = []

        class Seeing(keras.Model):
            def train_step(self, data: Any) -> Any:
                rows.extend(data[1][:, 0].numpy())
                return {}

            def call(self, x: Any) -> Any:
                return x

        with run.scope():
            model = run.ours(Seeing())
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.fit(data, **options, epochs=2, shuffle=True, verbose=0)
        return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]

    try:
        trained(tf.data.Dataset.from_tensor_slices((numbers, numbers)).shuffle(20).batch(4))
        refused = "nothing"
    except ValueError as error:
        refused = str(error)
    judged = trained(Batches(), validation_data=Batches())
    found = {"refused": refused, "batches": trained(Batches()), "judged in between": judged}
    tf.random.set_seed(host)
    return {**found, "not dense": trained(tf.sparse.from_dense(numbers + 1), y=numbers, batch_size=4)}


def warned(run: Run, folder: str) -> dict[str, list[str]]:
    """What is said of a layer that assigns in a branch, and of models that are made outside every scope."""
    import warnings

    import keras
    import tensorflow as tf

    import gpudist_core as gd

    class Counting(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            steps = self.optimizer.iterations
            return super().train_step(data) | {"rows": tf.shape(data[0])[0], "steps": steps, "next": steps + 1}

    class Branching(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            mean = keras.ops.mean(x)
            keras.ops.cond(mean > 0, lambda: self.mean.assign(mean), lambda: mean)
            return x

    def outside() -> Any:
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)], name="outside")

    x, y = digits(20)
    strategy = gd.make_strategy()
    calls = {
        "count": lambda: run.sequential(kind=Counting).fit(x, y, verbose=0),
        "branch": lambda: run.sequential(Branching).fit(x, y, verbose=0),
        "distributed": lambda: gd.distributed(outside()),
        "step": lambda: gd.TrainStep(outside(), keras.optimizers.SGD(0.1), "mse"),
        "within": lambda: run.ours(_made_within(strategy, outside)),
        "one device": lambda: run.ours(_made_within(gd.make_strategy("one-device", devices="CPU:0"), outside)),
    }
    said = {}
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        said[name] = sorted({str(one.message) for one in caught if one.category is UserWarning})  # not what NumPy deprecates
    return said


def _made_within(strategy: Any, make: Any) -> Any:
    with strategy.scope():
        return make()


def saved_between_updates() -> tuple[list[str], dict[str, Any]]:
    """What is said where a model is saved between two updates, and how the loaded one and Keras alone go on."""
    import warnings

    import keras

    keras.utils.set_random_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = of_models.saved_between_updates(Run(strategy()))
    return [str(one.message) for one in caught if one.category is UserWarning], seen
