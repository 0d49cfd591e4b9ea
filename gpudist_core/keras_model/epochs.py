"""Iterate the epochs of fit, evaluate and predict, as Keras's loops expect it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from gpudist_core.keras_model.batches import Placed
from gpudist_core.keras_model.sources import Source
from gpudist_core.upstream.trainer import epoch_item


class Epochs:
    """Iterate one epoch: (first step, last step, iterator of batches) for each call of the compiled function.

    Args:
        source: The source of the batches.
        steps_per_epoch: Number of batches in an epoch; None for all. The next epoch continues after them. At the end of the
            data, it starts again.
        steps_per_execution: Number of batches in one call.
    """

    def __init__(self, source: Source, steps_per_epoch: int | None, steps_per_execution: int) -> None:
        self.source = source
        self.steps_per_epoch = steps_per_epoch
        self._stride = steps_per_execution
        self._iterator: _Batches | None = None
        self._counted: int | None = None
        self.step = 0
        self.first_step = 0

    @property
    def num_batches(self) -> int | None:
        """Return the number of batches in an epoch, as far as it is known."""
        return self.steps_per_epoch or self.source.num_batches or self._counted

    def reset(self) -> None:
        """Start the data again in the next epoch."""
        self._iterator = None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self.source.begin()
        if self._iterator is None or self.steps_per_epoch is None or self._iterator.is_empty():
            self.first_step = self.first_step or (0 if self.steps_per_epoch else self.source.first)
            number = self.source.num_batches
            left = None if number is None else number - self.source.first
            self._iterator = _Batches(map(Placed, self.source.epoch()), left)
        self.step, self.first_step = self.first_step, 0
        stop = self.steps_per_epoch or self.source.num_batches
        while stop is None or self.step < stop:
            step, self.step = self.step, self.step + self._stride
            yield epoch_item(step, step + self._stride - 1, self._iterator)
            if self.steps_per_epoch and self._iterator.has_ended:  # within a call of several batches, which Keras does not tell
                self._run_out()
                return
        self.source.end()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """End the epoch if the data ends early. Warn if steps were promised."""
        try:
            yield
        except (StopIteration, tf.errors.OutOfRangeError):
            if self.steps_per_epoch is None:
                self._counted = max(self.step - self._stride, 0)
            self._run_out()

    def _run_out(self) -> None:
        """Note the end of the data: the next epoch starts again."""
        if self.steps_per_epoch:
            warnings.warn(
                "Your input ran out of data; interrupting training. Make sure that it can generate at least "
                "`steps_per_epoch * epochs` batches.",
                stacklevel=3,
            )
        self._iterator = None
        self.source.end()


class _Batches:
    """Iterate batches, and know whether any is left.

    Args:
        batches: The batches.
        number: Their number; None if it is unknown.
    """

    def __init__(self, batches: Iterator[Any], number: int | None) -> None:
        self._batches = batches
        self._left = number
        self._ahead: list[Any] = []
        self.has_ended = False

    def is_empty(self) -> bool:
        """Return whether no batch is left. If the number is unknown, fetch the next batch and keep it."""
        if self._left is not None:
            return self._left <= 0
        with contextlib.suppress(StopIteration):
            self._ahead = self._ahead or [next(self._batches)]
        return not self._ahead

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.has_ended = True
            raise
        self._left = None if self._left is None else self._left - 1
        return batch
