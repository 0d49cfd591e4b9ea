"""Keras's `fit` with checkpoints: what is killed or told to leave in the middle of an epoch goes on there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.errors import ProgramFailed

OnHosts = Callable[..., list[Any]]


def fit(folder: str, end: str = "", calls: int = 0, every: int | None = 4, together: int = 1, pipeline: bool = True) -> Any:
    """Fit three epochs of ten batches; after some calls host 0 is killed, or the last host told to leave."""
    import os
    import signal

    import keras
    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core.replicas import replicas_of
    from tests.core.checkpoints.training import strategy_here, values_of

    keras.utils.set_random_seed(3)
    strategy, rng = strategy_here(), np.random.default_rng(0)
    rows, labels = rng.normal(size=(93, 4)).astype("float32"), rng.integers(0, 3, 93)
    data: Any = gd.Pipeline.from_arrays((rows, labels), global_batch_size=10, shuffle=True, seed=4)
    if not pipeline:
        data = tf.data.Dataset.from_tensor_slices((rows, labels)).batch(10)
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        model = gd.distributed(keras.Sequential(layers), draws="row")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], steps_per_execution=together)
    checkpoints = gd.Checkpoints(folder, keep=2, every=every)
    replicas = replicas_of(strategy)

    class Ending(keras.callbacks.Callback):
        calls = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.calls += 1
            if self.calls == calls and end == "kill" and replicas.host == 0:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.calls == calls and end == "tell" and replicas.host == replicas.num_hosts - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        history = model.fit(data, epochs=3, callbacks=[Ending(), checkpoints], verbose=0).history
    except gd.Preempted as error:
        return error.step, error.path is not None, str(error)
    except ValueError as error:
        return str(error)
    names = sorted(path.name for path in checkpoints.saved())
    return history, values_of(strategy, [*model.variables, *model.optimizer.variables]), names


@pytest.mark.parametrize(("after", "together"), [pytest.param("1x2", 1, marks=pytest.mark.slow), ("2x1", 3)])
def test_fit_goes_on_in_the_middle_of_an_epoch(on_hosts: OnHosts, tmp_path: Path, after: str, together: int) -> None:
    whole, weights, names = on_hosts("1x2", fit, str(tmp_path / "whole"))[0]
    assert names == ["step-00000028", "step-00000030"]
    with pytest.raises(ProgramFailed, match="signal 9"):
        on_hosts("1x2", fit, str(tmp_path / "killed"), "kill", 15)
    left = on_hosts(after, fit, str(tmp_path / "killed"), "tell", 1, 4, together)
    assert len({step for step, _, _ in left}) == 1
    rest, others, _ = on_hosts(after, fit, str(tmp_path / "killed"))[0]
    # The epoch that was cut has the metrics of all its batches.
    left_over = len(rest["loss"])
    np.testing.assert_allclose(rest["accuracy"], whole["accuracy"][-left_over:])
    np.testing.assert_allclose(rest["loss"], whole["loss"][-left_over:], rtol=1e-5)
    for name, value in weights.items():
        np.testing.assert_allclose(others[name], value, rtol=0, atol=0 if after == "1x2" else 1e-6)


def test_without_a_position_in_the_data_epochs_are_what_is_kept(on_hosts: OnHosts, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert "needs data with a position. Received: every=4" in on_hosts("1x2", fit, folder, "", 0, 4, 1, False)[0]
    step, has_earlier, text = on_hosts("1x2", fit, folder, "tell", 13, None, 1, False)[0]
    assert (step, has_earlier) == (13, True)
    assert text.endswith("step-00000010.")
    history, _, names = on_hosts("1x2", fit, folder, "", 0, None, 1, False)[0]
    assert len(history["loss"]) == 2
    assert names == ["step-00000020", "step-00000030"]


def ending_apart(folder: str) -> list[str]:
    """Four steps, the last one saved; the last host looks at the end of the training when that is written, the first before."""
    import time

    import keras

    import gpudist_core as gd
    from gpudist_core.checkpoints import saving
    from gpudist_core.replicas import replicas_of
    from tests.core.checkpoints.training import strategy_here

    keras.utils.set_random_seed(3)
    strategy, write = strategy_here(), saving.write
    host = replicas_of(strategy).host

    def slowly(*args: Any) -> Any:
        time.sleep(1.0)
        return write(*args)

    saving.write = slowly
    with strategy.scope():
        model = gd.distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = gd.Pipeline.from_arrays((np.ones((16, 4), "float32"), np.zeros(16, "int64")), global_batch_size=4)
    later = keras.callbacks.LambdaCallback(on_train_end=lambda _: time.sleep(3.0 * host))
    model.fit(data, verbose=0, callbacks=[later, gd.Checkpoints(folder, every=4, timeout=10.0)])
    return sorted(path.name for path in gd.Checkpoints(folder, every=4).saved())


def test_hosts_that_end_apart_save_the_same_checkpoints(on_hosts: OnHosts, tmp_path: Path) -> None:
    assert on_hosts("2x1", ending_apart, str(tmp_path / "run")) == [["step-00000004"]] * 2


def interrupted(folder: str) -> dict[str, Any]:
    """Fits that raise after some batches and go on: how many updates were made, and how far off the weights are."""
    import keras

    import gpudist_core as gd
    from tests.core.checkpoints.training import strategy_here

    strategy, rng = strategy_here(), np.random.default_rng(0)
    rows, labels = rng.normal(size=(45, 4)).astype("float32"), rng.integers(0, 3, 45)

    def run(where: str | None, every: int = 0, stop: int = 0, **fitted: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = gd.distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]))
            model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        seen: list[int] = []

        def stopping(batch: int, logs: Any) -> None:
            seen.append(batch)
            if len(seen) == stop:
                raise RuntimeError("stop")

        callbacks = [gd.Checkpoints(where, every=every)] if where else []
        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=stopping))
        data = gd.Pipeline.from_arrays((rows, labels), global_batch_size=8, shuffle=True, seed=1)
        model.fit(data, epochs=3, verbose=0, callbacks=callbacks, **fitted)
        return int(model.optimizer.iterations.numpy()), model.get_weights()

    right = {steps: run(None, steps_per_epoch=steps) for steps in (None, 4)}
    found = {}
    for name, every, stop, fitted in (
        ("saved after the last batch of an epoch", 3, 8, {}),
        ("saved in the middle of one", 4, 7, {}),
        ("an epoch of fewer batches than the data", 5, 7, {"steps_per_epoch": 4}),
        ("saved after the last of them", 4, 6, {"steps_per_epoch": 4}),
    ):
        where = f"{folder}/{name}"
        with pytest.raises(RuntimeError, match="stop"):
            run(where, every, stop, **fitted)
        steps, weights = run(where, every, **fitted)
        expected, wanted = right[fitted.get("steps_per_epoch")]
        found[name] = steps - expected, all(np.array_equal(a, b) for a, b in zip(weights, wanted, strict=True))
    return found


@pytest.mark.slow
def test_fit_that_goes_on_makes_as_many_updates_and_the_same_weights(on_hosts: OnHosts, tmp_path: Path) -> None:
    [found] = on_hosts("1x2", interrupted, str(tmp_path))
    assert found == dict.fromkeys(found, (0, True))
    assert len(found) == 4


def with_two_optimizers(folder: str, epochs: int, built: bool) -> Any:
    """Fit a model whose own step has two optimizers, from where the folder's checkpoint is."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd
    from tests.core.checkpoints.training import strategy_here

    keras.utils.set_random_seed(3)
    rows = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.down = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            self.up = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])

        def compile(self, *optimizers: Any) -> None:
            super().compile()
            self.optimizers = list(optimizers)

        def call(self, x: Any) -> Any:
            return self.up(self.down(x))

        def train_step(self, x: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(x - self(x)))
            for optimizer, part in zip(self.optimizers, (self.down, self.up), strict=True):
                variables = part.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    with strategy_here().scope():
        model = gd.distributed(Pair())
        model.compile(keras.optimizers.Adam(0.05), keras.optimizers.SGD(0.1, momentum=0.9))
        for optimizer, part in zip(model.optimizers, (model.down, model.up), strict=True):
            if built:
                optimizer.build(part.trainable_variables)
    try:
        model.fit(rows, batch_size=12, epochs=epochs, verbose=0, shuffle=False, callbacks=[gd.Checkpoints(folder)])
    except gd.UsageError as error:
        return str(error)
    return [model.get_weights(), [int(one.iterations.numpy()) for one in model.optimizers]]


def test_every_optimizer_of_a_models_own_step_is_kept(on_hosts: OnHosts, tmp_path: Path) -> None:
    [straight] = on_hosts("1x2", with_two_optimizers, str(tmp_path / "a"), 4, True)
    on_hosts("1x3", with_two_optimizers, str(tmp_path / "b"), 2, True)
    [gone_on] = on_hosts("1x2", with_two_optimizers, str(tmp_path / "b"), 4, True)
    assert gone_on[1] == straight[1] == [16, 16]
    for ours, theirs in zip(gone_on[0], straight[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_optimizer_without_variables_is_refused_before_its_state_is_lost(on_hosts: OnHosts, tmp_path: Path) -> None:
    [said] = on_hosts("1x1", with_two_optimizers, str(tmp_path), 1, False)
    assert said == (
        "An optimizer that a model keeps for a custom step must be built before it is saved. Received: optimizer='adam'. "
        "Build it after compile, in the strategy's scope: optimizer.build(part.trainable_variables)."
    )


def with_a_decay_after_it(folder: str, epochs: int) -> Any:
    """`fit` whose last callback lowers the learning rate at the end of each epoch."""
    import keras

    import gpudist_core as gd
    from tests.core.checkpoints.training import strategy_here

    class Decay(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate.numpy() * 0.1

    keras.utils.set_random_seed(1)
    rows = np.arange(24, dtype="float32").reshape(12, 2) / 24
    with strategy_here().scope():
        model = gd.distributed(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [gd.Checkpoints(folder), Decay()]
    model.fit(rows, rows[:, :1], batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
    return [model.get_weights(), float(model.optimizer.learning_rate.numpy())]


def test_what_callbacks_after_it_do_at_the_end_of_an_epoch_is_kept(on_hosts: OnHosts, tmp_path: Path) -> None:
    [straight] = on_hosts("1x2", with_a_decay_after_it, str(tmp_path / "a"), 3)
    on_hosts("1x2", with_a_decay_after_it, str(tmp_path / "b"), 2)
    [gone_on] = on_hosts("1x2", with_a_decay_after_it, str(tmp_path / "b"), 3)
    assert gone_on[1] == straight[1] == pytest.approx(1e-4)
    for ours, theirs in zip(gone_on[0], straight[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
