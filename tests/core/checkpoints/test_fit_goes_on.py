"""What a `fit` that goes on has of the data that it read and of the callbacks beside it: as if it had not been interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

OnHosts = Callable[..., list[Any]]


def through_datasets(folder: str) -> dict[str, Any]:
    """By kind of data: how far weights are off when `fit` goes on after its second epoch, and what is warned of."""
    import warnings

    import keras
    import tensorflow as tf

    import gpudist_core as gd
    from tests.core.checkpoints.training import strategy_here

    strategy, rng = strategy_here(), np.random.default_rng(0)
    rows = rng.normal(size=(37, 5)).astype("float32")
    labels = (rows @ rng.normal(size=(5, 3))).argmax(1).astype("int32")
    sets = tf.data.Dataset

    def drawn() -> Any:
        generator = np.random.default_rng(5)

        def rows_of_an_epoch() -> Any:
            for row in generator.permutation(37):
                yield rows[row], labels[row]

        spec = (tf.TensorSpec((5,), tf.float32), tf.TensorSpec((), tf.int32))
        return sets.from_generator(rows_of_an_epoch, output_signature=spec).batch(8)

    class Sequence(keras.utils.PyDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.order = np.arange(37)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            part = self.order[8 * index : 8 * index + 8]
            return rows[part], labels[part]

        def on_epoch_end(self) -> None:
            self.order = np.roll(self.order, 3)

    def sliced() -> Any:
        return sets.from_tensor_slices((rows, labels))

    kinds: dict[str, tuple[Callable[[], Any], int | None]] = {
        "fixed": (lambda: sliced().batch(8), None),
        "shuffled": (lambda: sliced().shuffle(37, seed=1).batch(8).prefetch(2), None),
        "shuffled twice": (lambda: sliced().shuffle(9, seed=1).shuffle(37, seed=2).batch(8), None),
        "shuffled and cached": (lambda: sliced().shuffle(37, seed=1).cache().batch(8), None),
        "repeated": (lambda: sliced().shuffle(37, seed=1).batch(8).repeat(), 3),
        "parts": (lambda: sliced().shuffle(37, seed=1).batch(8), 3),
        "drawn": (drawn, None),
        "a sequence": (Sequence, None),
    }

    def run(make: Callable[[], Any], steps: int | None, epochs: int, where: str | None) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [keras.Input((5,)), keras.layers.Dense(3, kernel_initializer="zeros")]
            model = gd.distributed(keras.Sequential(layers))
            model.compile(keras.optimizers.SGD(0.3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        callbacks = [gd.Checkpoints(where)] if where else []
        model.fit(make(), epochs=epochs, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    found: dict[str, Any] = {}
    for kind, (make, steps) in kinds.items():
        whole = run(make, steps, 5, None)
        for epochs in (2, 4, 5) if kind in ("shuffled", "parts") else (2, 5):  # interrupted twice, or once
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                again = run(make, steps, epochs, f"{folder}/{kind}")
        said = [str(one.message) for one in warned if one.category is UserWarning and "ran out of data" not in str(one.message)]
        found[kind] = max(float(np.abs(a - b).max()) for a, b in zip(whole, again, strict=True)), said
    return found


@pytest.mark.parametrize("topology", ["1x2", pytest.param("2x1", marks=pytest.mark.slow)])
def test_data_without_a_position_go_on_as_if_fit_had_not_been_interrupted(
    on_hosts: OnHosts, tmp_path: Path, topology: str
) -> None:
    for found in on_hosts(topology, through_datasets, str(tmp_path)):
        assert {kind: off for kind, (off, _) in found.items()} == dict.fromkeys(found, 0.0)
        assert {kind for kind, (_, said) in found.items() if not said} == {"fixed", "shuffled"}, "these are not read over"
        for _, said in found.values():
            assert all(text.startswith("gpudist reads data without a position again, up to where step-") for text in said)
            assert all(text.endswith("pass fit a gd.Pipeline, which continues there at once.") for text in said)


def left_to_chance(folder: str) -> list[str]:
    """What is warned of when a `fit` goes on in data whose order nobody knows: without a seed, and of Keras alone."""
    import warnings

    import keras
    import tensorflow as tf

    import gpudist_core as gd

    rows = np.ones((37, 5), "float32")
    said = []
    for name, make in (("parts", gd.distributed), ("keras", lambda model: model)):
        for epochs in (1, 2):
            model = make(keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, name="dense")]))
            model.compile("sgd", "mse")
            data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).shuffle(37).batch(8)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                model.fit(
                    data,
                    epochs=epochs,
                    steps_per_epoch=2,
                    shuffle=False,
                    verbose=0,
                    callbacks=[gd.Checkpoints(f"{folder}/{name}")],
                )
        said += [str(one.message) for one in warned if one.category is UserWarning]
    return said


def test_data_that_cannot_be_brought_to_where_they_were_are_named(on_hosts: OnHosts, tmp_path: Path) -> None:
    [(of_chance, of_keras)] = on_hosts("1x1", left_to_chance, str(tmp_path))
    assert of_chance == (
        "If an epoch has a part of the data, the order must have a seed to continue with the rest. Received: "
        "checkpoint='step-00000002', steps_per_epoch=2, shuffle='without a seed'. The data start again: some examples come "
        "twice, others later. Pass fit a gd.Pipeline, or give the shuffle a seed."
    )
    assert of_keras == (
        "Only the fit of a gd.distributed model continues its data where they were. Received: checkpoint='step-00000002', "
        "epoch=1. The data start again: a shuffle repeats the order of the first epoch, and data shared between epochs "
        "(steps_per_epoch) start at the first example. Train gd.distributed(model)."
    )


CALLBACKS = ("plateau", "early", "best", "own", "two")


def with_callbacks(folder: str, epochs: int, make: str, distributed: bool = True) -> dict[str, Any]:
    """Fit some epochs with a callback, from where the folder's checkpoint is; what it kept and what is warned of."""
    import os
    import warnings

    import keras

    import gpudist_core as gd
    from tests.core.checkpoints.training import strategy_here

    class Halving(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ends = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends += 1
            if self.ends % 3 == 0:
                self.model.optimizer.learning_rate = self.model.optimizer.learning_rate.numpy() / 2

    class Keeping(Halving):
        def state(self) -> dict[str, int]:
            return {"ends": self.ends}

        def restore(self, state: Any) -> None:
            self.ends = state["ends"]

    class Idle(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.told = "what"

    never = {"monitor": "loss", "patience": 3, "min_delta": 10.0}
    made: dict[str, Callable[[], list[Any]]] = {
        "plateau": lambda: [keras.callbacks.ReduceLROnPlateau(factor=0.1, cooldown=1, **never)],
        "early": lambda: [keras.callbacks.EarlyStopping(restore_best_weights=True, **never)],
        "best": lambda: [
            keras.callbacks.ModelCheckpoint(f"{folder}-{os.getpid()}.weights.h5", "loss", save_weights_only=True, save_freq=7)
        ],
        "own": lambda: [Keeping(), Idle()],
        "unknown": lambda: [Halving(), Idle(), keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: None)],
        "two": lambda: [keras.callbacks.EarlyStopping(**never), keras.callbacks.EarlyStopping(**never | {"patience": 2})],
    }
    keras.utils.set_random_seed(1)
    rows = np.arange(24, dtype="float32").reshape(12, 2) / 24
    others = made[make]()
    with strategy_here().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model = gd.distributed(model) if distributed else model
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = {"x": rows, "y": rows[:, :1], "batch_size": 4, "shuffle": False}
    if distributed:
        data = {"x": gd.Pipeline.from_arrays((rows, rows[:, :1]), global_batch_size=4, shuffle=True, seed=1)}
    # It stands first: others at the end of an epoch come before it all the same.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        history = model.fit(**data, epochs=epochs, verbose=0, callbacks=[gd.Checkpoints(folder), *others])
    return {
        "weights": model.get_weights(),
        "rate": float(model.optimizer.learning_rate.numpy()),
        "last": history.epoch[-1] if history.epoch else None,
        "kept": {name: value for name, value in vars(others[0]).items() if isinstance(value, int)},
        "said": [str(one.message) for one in warned if one.category is UserWarning],
    }


# On two hosts one callback that Keras brings is enough: the others keep their state in the same way.
@pytest.mark.parametrize(
    ("topology", "make"),
    [
        *[("1x2", make) for make in CALLBACKS],
        *[pytest.param("2x1", make, marks=() if make == "early" else pytest.mark.slow) for make in CALLBACKS],
    ],
)
def test_callbacks_go_on_as_if_fit_had_not_been_interrupted(
    on_hosts: OnHosts, tmp_path: Path, topology: str, make: str
) -> None:
    [straight] = on_hosts("1x2", with_callbacks, str(tmp_path / "a"), 8, make)
    on_hosts("1x2", with_callbacks, str(tmp_path / "b"), 2, make)
    for gone_on in on_hosts(topology, with_callbacks, str(tmp_path / "b"), 8, make):
        assert gone_on["said"] == []
        assert (gone_on["rate"], gone_on["last"], gone_on["kept"]) == (straight["rate"], straight["last"], straight["kept"])
        for ours, theirs in zip(gone_on["weights"], straight["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_callbacks_of_keras_alone_go_on_wherever_checkpoints_stand(on_hosts: OnHosts, tmp_path: Path) -> None:
    [straight] = on_hosts("1x1", with_callbacks, str(tmp_path / "a"), 8, "plateau", False)
    on_hosts("1x1", with_callbacks, str(tmp_path / "b"), 2, "plateau", False)
    [gone_on] = on_hosts("1x1", with_callbacks, str(tmp_path / "b"), 8, "plateau", False)
    assert gone_on["rate"] == straight["rate"] == pytest.approx(0.001)
    np.testing.assert_array_equal(gone_on["weights"][0], straight["weights"][0])


def test_callbacks_whose_state_nobody_knows_are_named(on_hosts: OnHosts, tmp_path: Path) -> None:
    on_hosts("1x2", with_callbacks, str(tmp_path), 2, "unknown")
    [gone_on] = on_hosts("1x2", with_callbacks, str(tmp_path), 4, "unknown")
    [text] = gone_on["said"]
    assert text == (
        "Only callbacks whose state is in the checkpoint continue. Received: checkpoint='step-00000006', start "
        "again=['Halving']. Give your own callback state() and restore(state)."
    )


def test_a_checkpoint_without_the_state_of_callbacks_is_gone_on_from(on_hosts: OnHosts, tmp_path: Path) -> None:
    from gpudist_core.checkpoints import files

    on_hosts("1x2", with_callbacks, str(tmp_path), 2, "early")
    for path in tmp_path.glob("step-*"):
        kept = files.read_manifest(path)
        (path / files.MANIFEST).unlink()
        states = {name: state for name, state in kept.states.items() if name != "callbacks"}
        states["fit"] = {name: states["fit"][name] for name in ("epoch", "in_epoch", "batch")}
        files.write_manifest(path, files.Manifest(kept.step, kept.entries, states, kept.info))
    [gone_on] = on_hosts("1x2", with_callbacks, str(tmp_path), 8, "early")
    assert gone_on["last"] == 5
    [text] = gone_on["said"]
    assert text == (
        "Only callbacks whose state is in the checkpoint continue. Received: checkpoint='step-00000006', start "
        "again=['EarlyStopping(loss)']. Give your own callback state() and restore(state)."
    )


def test_a_fit_that_a_callback_has_stopped_is_not_trained_on(on_hosts: OnHosts, tmp_path: Path) -> None:
    [stopped] = on_hosts("1x2", with_callbacks, str(tmp_path), 8, "early")
    [again] = on_hosts("1x2", with_callbacks, str(tmp_path), 8, "early")
    assert (stopped["last"], again["last"]) == (3, None)
    np.testing.assert_array_equal(again["weights"][0], stopped["weights"][0])
    [text] = again["said"]
    assert text == (
        "A callback has stopped fit, so only its end is repeated. Received: checkpoint='step-00000012', epochs made=4, "
        "epochs=8. To train further, use another folder."
    )


def at_the_end_of_an_epoch(folder: str, told: bool) -> Any:
    """Fit of two batches in an epoch, saved every two; told to leave after the first epoch's last batch, or not."""
    import os
    import signal
    import warnings

    import keras

    import gpudist_core as gd

    rows = np.arange(16, dtype="float32").reshape(8, 2) / 16
    model = gd.distributed(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.1), "mse")

    def leaving(batch: int, logs: Any) -> None:
        if told and batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    early = keras.callbacks.EarlyStopping("loss", patience=9, min_delta=10.0)
    callbacks = [early, keras.callbacks.LambdaCallback(on_train_batch_end=leaving), gd.Checkpoints(folder, every=2)]
    data = gd.Pipeline.from_arrays((rows, rows[:, :1]), global_batch_size=4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        except gd.Preempted as error:
            return error.step
    return early.wait, [str(one.message) for one in warned if one.category is UserWarning]


def test_what_is_saved_after_the_last_batch_of_an_epoch_has_what_callbacks_do_at_its_end(
    on_hosts: OnHosts, tmp_path: Path
) -> None:
    from gpudist_core.checkpoints import files

    on_hosts("1x1", at_the_end_of_an_epoch, str(tmp_path), False)
    kept = [files.read_manifest(path).states for path in sorted(tmp_path.glob("step-*"))]
    assert [state["callbacks"]["kept"]["EarlyStopping(loss)"]["wait"] for state in kept] == [0, 1, 2]
    assert [state["fit"]["epoch"] for state in kept] == [1, 2, 3]


def test_a_run_that_left_before_the_end_of_an_epoch_says_so_when_it_goes_on(on_hosts: OnHosts, tmp_path: Path) -> None:
    assert on_hosts("1x1", at_the_end_of_an_epoch, str(tmp_path), True) == [2]
    [(_, said)] = on_hosts("1x1", at_the_end_of_an_epoch, str(tmp_path), False)
    [text] = said
    assert text == (
        "The end of an epoch was not run: the run was stopped right before it. Received: checkpoint='step-00000002', "
        "epoch=0. Callbacks do not get its validation and its logs."
    )
