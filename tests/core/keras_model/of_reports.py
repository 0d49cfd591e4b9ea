"""Trainings whose reports could be those of one replica: metrics, logs, what callbacks decide by them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.core.keras_model.run import Run, digits, hidden


def metrics(run: Run) -> dict[str, Any]:
    import keras

    class Largest(keras.metrics.Metric):
        """How many rows have a large output."""

        def __init__(self) -> None:
            super().__init__(name="large")
            self.rows = self.add_weight(name="rows", initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.rows.assign_add(keras.ops.sum(keras.ops.cast(keras.ops.max(y_pred, -1) > 0.2, "float32")))

        def result(self) -> Any:
            return self.rows

    def one_number(y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y - y_pred))

    x, labels = digits(75)
    y = np.eye(10, dtype="float32")[labels]
    # Keras alone gives each batch the same weight in the mean of a metric that is one number for the batch.
    model = run.sequential(
        hidden,
        lambda: keras.layers.Dense(10, activation="softmax"),
        metrics=lambda: [keras.metrics.AUC(num_thresholds=20), keras.metrics.F1Score(), Largest(), one_number, "mse"],
        loss="mse",
    )
    seen = run.fit(model, x, y, batch_size=25)
    return {**seen, "evaluate": model.evaluate(x[:30], y[:30], batch_size=10, verbose=0)}


def callbacks(run: Run) -> dict[str, Any]:
    """What callbacks are told in each step."""
    import keras

    x, y = digits(75)
    told: list[Any] = []
    kept: list[Any] = []

    class Listener(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kept.append(logs)
            told.append((batch, self.params["steps"], sorted(logs)))

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            told.append((batch, dict(logs)))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            told.append((epoch, {**logs}))
            self.model.stop_training = epoch == 3

    model = run.sequential(hidden)
    options = {"initial_epoch": 2, "epochs": 7, "callbacks": [Listener()]}
    seen = run.fit(model, x, y, **options, validation_data=(x[:11], y[:11]), validation_batch_size=5, validation_steps=2)
    return {**seen, "told": told, "kept": [dict(logs) for logs in kept]}


def decisions(run: Run) -> dict[str, Any]:
    """Callbacks of Keras's own that act on what they are told."""
    import tempfile
    from pathlib import Path

    import keras

    x, y = digits(50)
    model = run.sequential(hidden, optimizer=lambda: keras.optimizers.SGD(0.4))
    with tempfile.TemporaryDirectory() as folder:
        acting = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (4.0 if epoch == 2 else 1.0)),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.25, min_delta=0.2),
            keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras", monitor="val_loss", save_best_only=True),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            keras.callbacks.TerminateOnNaN(),
        ]
        seen = run.fit(model, x, y, epochs=8, callbacks=acting, validation_data=(x[:20], y[-20:]))
        files = sorted(path.name for path in Path(folder).iterdir())
        best = keras.saving.load_model(f"{folder}/{files[-2]}").predict(x[:5], verbose=0)
        lines = len(Path(f"{folder}/log.csv").read_text().splitlines())
    return {**seen, "files": files, "best": best, "lines": lines, "rate": float(model.optimizer.learning_rate.numpy())}
