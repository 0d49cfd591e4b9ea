"""Use `Checkpoints` as a callback of Keras's `fit` by the methods of `keras.callbacks.Callback`.

The states of the other callbacks are saved with it. Data without a position are moved to where a run was interrupted, by
reading them again: the order of a shuffle, a generator or a sequence that shuffles itself depends on how often it was read.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core import state
from gpudist_core.checkpoints.files import has_state
from gpudist_core.checkpoints.run import Opened, RunParts
from gpudist_core.errors import UsageError


class CallbackMethods:
    """Provide the callback methods in which `Checkpoints` does nothing."""

    def on_batch_begin(self, batch: int, logs: Any = None) -> None: ...
    def on_batch_end(self, batch: int, logs: Any = None) -> None: ...
    def on_test_begin(self, logs: Any = None) -> None: ...
    def on_test_end(self, logs: Any = None) -> None: ...
    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None: ...
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None: ...
    def on_predict_begin(self, logs: Any = None) -> None: ...
    def on_predict_end(self, logs: Any = None) -> None: ...
    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None: ...
    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None: ...


class FollowedFit:
    """Follow one `fit`: where it is, and what it continues from. `Checkpoints` decides when to save and to stop.

    Args:
        checkpoints: The callback that follows.
        run: The parts of the run, completed from the model.
        model: The model that is trained.

    Attributes:
        batches: Number of batches in an epoch, as far as Keras knows.
        epochs: Number of epochs that `fit` was asked for.
        trained: Number of batches trained, with those before the checkpoint.
    """

    def __init__(self, checkpoints: Any, run: RunParts, model: Any) -> None:
        self._checkpoints, self._run, self._model = checkpoints, run, model
        self.trained = 0
        self._first_batch = self._batch = 0
        self.batches: int | None = None
        self.epochs: int | None = None
        self._epoch, self._in_epoch = 0, False
        self._read = 0
        self._from: Opened | None = None
        self._taken: Opened | None = None
        self._others = Others([])

    def position(self) -> dict[str, Any]:
        """Return the position of `fit`: the current epoch and the number of its finished batches, or the next epoch.

        After the last batch of an epoch, the next epoch is returned, as the pipeline does. Then the end of the epoch
        (validation, history) is not repeated.
        """
        if self._in_epoch and self.batches is not None and self._batch >= self.batches:
            return {"epoch": self._epoch + 1, "in_epoch": False, "batch": 0, "left_at_end": True}
        return {
            "epoch": self._epoch,
            "in_epoch": self._in_epoch,
            "batch": self._batch if self._in_epoch else 0,
            "epochs_read": self._read,
            "stopped": not self._in_epoch and bool(getattr(self._model, "stop_training", False)),
        }

    def others(self) -> dict[str, Any]:
        """Return the state of the other callbacks."""
        return self._others.state()

    def read_over(self, opened: Opened) -> None:
        """Read data without a position again, up to the checkpoint, before its random states are restored."""
        kept = opened.state("fit")
        epoch = int(kept["epoch"])
        self._read = int(kept.get("epochs_read", epoch))
        epochs = state.of_model.of(self._model).epochs
        if self._run.pipeline is not None or epoch == 0:
            return
        if epochs is not None:
            read_over(epochs, self._read, opened.path.name)
            return
        warnings.warn(
            "Only the fit of a gd.distributed model continues its data where they were. Received: "
            f"checkpoint={opened.path.name!r}, epoch={epoch}. The data start again: a shuffle repeats the order of the first "
            "epoch, and data shared between epochs (steps_per_epoch) start at the first example. Train gd.distributed(model).",
            stacklevel=2,
        )

    def taken(self, opened: Opened) -> None:
        """Continue from a checkpoint."""
        from gpudist_core.upstream import runtime

        kept = opened.state("fit")
        self.trained, self._epoch = opened.manifest.step, int(kept["epoch"])
        self._from, self._taken = (opened if kept["in_epoch"] else None), opened
        has_stopped = bool(kept.get("stopped"))
        runtime.begin_at(self._model, max(self._epoch, self.epochs or 0) if has_stopped else self._epoch)
        if has_stopped and self._epoch < (self.epochs or 0):
            warnings.warn(
                f"A callback has stopped fit, so only its end is repeated. Received: checkpoint={opened.path.name!r}, "
                f"epochs made={self._epoch}, epochs={self.epochs}. To train further, use another folder.",
                stacklevel=2,
            )
        if kept.get("left_at_end"):
            warnings.warn(
                "The end of an epoch was not run: the run was stopped right before it. Received: "
                f"checkpoint={opened.path.name!r}, epoch={self._epoch - 1}. Callbacks do not get its validation and its logs.",
                stacklevel=2,
            )
        epochs = state.of_model.of(self._model).epochs
        if epochs is not None and epochs.steps_per_epoch is not None:  # else the pipeline's position says it
            epochs.first_step = int(kept.get("batch", 0))

    def begin(self) -> None:
        from gpudist_core.upstream import trainer

        run, model = self._run, self._model
        run.take("model", model)
        run.take("optimizer", getattr(model, "optimizer", None))
        kept = state.of_model.of(model)
        run.take("pipeline", kept.pipeline)
        run.take("step", kept.accumulations)
        saved = [run.optimizer, *run.extra.values()]
        run.others = [optimizer for optimizer in trainer.optimizers_of(model) if not any(optimizer is other for other in saved)]
        for optimizer in run.others:
            if not optimizer.built:
                raise UsageError(
                    "An optimizer that a model keeps for a custom step must be built before it is saved",
                    "Build it after compile, in the strategy's scope: optimizer.build(part.trainable_variables).",
                    optimizer=optimizer.name,
                )

    def all_begun(self, callbacks: list[Any]) -> None:
        """Restore what callbacks keep, after all have started the training, which resets some.

        Args:
            callbacks: The list of callbacks. From now on, the others run first at the end of an epoch.
        """
        callbacks.sort(key=lambda callback: callback is self._checkpoints)
        self._others = Others([callback for callback in callbacks if callback is not self._checkpoints])
        if self._taken is not None:
            self._others.restore(self._taken.state("callbacks"), self._taken.path.name)
            self._taken = None

    def begin_epoch(self, epoch: int) -> None:
        self._epoch, self._in_epoch = epoch, False
        opened, self._from = self._from, None
        if opened is None:
            return
        # Keras has just reset the metrics: they had counted a part of this epoch.
        items = self._run.metrics()
        kept = {name for name in opened.manifest.entries if name.startswith("metrics/")}
        if {item.name for item in items} != kept:
            warnings.warn(
                f"The metrics start again in the middle of epoch {epoch + 1}: {opened.path.name} has other metrics.",
                stacklevel=2,
            )
            return
        opened.assign(items)

    def begin_batch(self, batch: int) -> None:
        self._first_batch = batch

    def end_batch(self, batch: int) -> None:
        # With several steps per call the last call of an epoch may have fewer than its number says.
        last = batch if self.batches is None else min(batch, self.batches - 1)
        self.trained += last - self._first_batch + 1
        self._batch = last + 1
        self._in_epoch = True

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Return whether the last batch of an epoch was trained, and callbacks still have something to do after it."""
        return self._batch == self.batches

    def end_epoch(self, epoch: int) -> None:
        self._epoch, self._in_epoch = epoch + 1, False
        self._read += 1

    def leave_model(self) -> None:
        """Let the next `fit` start with the epoch that it is given."""
        from gpudist_core.upstream import runtime

        runtime.begin_at(self._model, None)


class Others:
    """Hold the callbacks beside `Checkpoints`, after all have started the training.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        from gpudist_core.upstream.trainer import attributes_of

        self._named = _named(callbacks)
        self._begun = {
            name: {key: _mark(value) for key, value in attributes_of(callback).items()}
            for name, callback in self._named.items()
        }

    def state(self) -> dict[str, Any]:
        """Return their states by name, and the names of callbacks that have kept something unknown meanwhile."""
        from gpudist_core.upstream.trainer import attributes_of, kept_by

        kept, unknown = {}, []
        for name, callback in self._named.items():
            if has_state(callback):
                kept[name] = callback.state()
                continue
            if kept_by(callback):
                kept[name] = {key: getattr(callback, key) for key in kept_by(callback) if hasattr(callback, key)}
            begun, now = self._begun[name], attributes_of(callback)
            if any(key not in begun or begun[key] != _mark(value) for key, value in now.items()):
                unknown.append(name)
        return {"kept": kept, "unknown": unknown}

    def restore(self, state: Mapping[str, Any] | None, checkpoint: str) -> None:
        """Restore their states.

        Args:
            state: The result of `state`, or None.
            checkpoint: The name of the checkpoint, for the message.
        """
        from gpudist_core.upstream.trainer import kept_by

        kept = (state or {}).get("kept", {})
        anew = [name for name in (state or {}).get("unknown", ()) if name in self._named]
        for name, callback in self._named.items():
            if name in kept and has_state(callback):
                callback.restore(kept[name])
            elif name in kept:
                for attribute, value in kept[name].items():
                    is_number = isinstance(value, np.ndarray) and value.ndim == 0
                    setattr(callback, attribute, value.item() if is_number else value)
            elif has_state(callback) or kept_by(callback):
                anew.append(name)
        if anew:
            warnings.warn(
                f"Only callbacks whose state is in the checkpoint continue. Received: checkpoint={checkpoint!r}, "
                f"start again={sorted(anew)}. Give your own callback state() and restore(state).",
                stacklevel=2,
            )


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Name callbacks by class and number, and by the monitored value if they have one."""
    named: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        name = type(callback).__name__ + (f"({monitor})" if isinstance(monitor, str) else "")
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} {counts[name]}"] = callback
    return named


def _mark(value: Any) -> Any:
    """Return a mark that shows whether an attribute was replaced or has grown."""
    # What may hold other numbers without that gets a new mark each time.
    if isinstance(value, np.ndarray) or hasattr(value, "assign") or hasattr(value, "update_state"):
        return object()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return id(value), len(value) if isinstance(value, (list, dict, set, tuple)) else 0


def read_over(epochs: Any, number: int, name: str) -> None:
    """Read some epochs again, so that the data continue after them.

    Args:
        epochs: The epochs of `fit`, before the first one (`keras_model.sources.Epochs`).
        number: Number of epochs that were read.
        name: The name of the checkpoint, for messages.
    """
    from gpudist_core.upstream import datasets

    dataset: Any = getattr(epochs.source, "dataset", None)
    if number == 0 or (epochs.steps_per_epoch is not None and _warns_of_chance(epochs, name)):
        return
    varies = datasets.what_varies(dataset) if isinstance(dataset, tf.data.Dataset) else "more"
    if epochs.steps_per_epoch is None and varies != "more":
        for _ in range(number if varies == "one shuffle" else 0):
            iter(dataset)
        return
    warnings.warn(
        f"gpudist reads data without a position again, up to where {name} was saved. Received: epochs={number}. If that takes "
        "too long, pass fit a gd.Pipeline, which continues there at once.",
        stacklevel=2,
    )
    for _ in range(number):
        with epochs.catch_stop_iteration():
            for first, last, batches in epochs:
                if not sum(1 for _ in itertools.islice(batches, last - first + 1)):
                    raise StopIteration


def _warns_of_chance(epochs: Any, name: str) -> bool:
    """Warn of epochs with a part of the batches in an unseeded order: nobody knows which examples they had."""
    from gpudist_core.upstream import datasets, trainer

    dataset, seed = getattr(epochs.source, "dataset", None), getattr(epochs.source, "seed", None)
    by_chance = seed is not None and trainer.seed() is None
    if by_chance or (isinstance(dataset, tf.data.Dataset) and "unseeded" in datasets.shuffles_that_vary(dataset)):
        warnings.warn(
            "If an epoch has a part of the data, the order must have a seed to continue with the rest. Received: "
            f"checkpoint={name!r}, steps_per_epoch={epochs.steps_per_epoch}, shuffle='without a seed'. The data start again: "
            "some examples come twice, others later. Pass fit a gd.Pipeline, or give the shuffle a seed.",
            stacklevel=3,
        )
        return True
    return False
