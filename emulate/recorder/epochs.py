"""Find the length of the first epoch, and measure how fast the machine reads the program's data.

The length is known where the data tell it before the first step: Keras's `fit` knows the number of its batches; a loop has it
from the dataset that it iterates over. For the speed gpudist goes through the dataset once more, without steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from emulate.imports import tf


@dataclass(frozen=True)
class FirstEpoch:
    """Describe the first epoch of a training.

    Attributes:
        batches: The number of its batches; None where it is unknown, or without end.
        last: The number of examples in its last batch, where that is smaller than the others and known.
    """

    batches: int | None = None
    last: int | None = None


class EpochsOfData:
    """Remember which data a program was about to go through when it made its first step.

    Args:
        write: Writes an event to the trace.
        keeps_dataset: Whether the dataset is needed at the end.

    Attributes:
        dataset: What the last pass before the first step goes over; None where gpudist saw or keeps none.
        first: The first epoch, as far as it is known.
    """

    def __init__(self, write: Callable[[Mapping[str, Any]], None], *, keeps_dataset: bool = False) -> None:
        self._write = write
        self._keeps_dataset = keeps_dataset
        self.first = FirstEpoch()
        self._is_of_fit = False
        self._is_fixed = False
        self._of_arrays = FirstEpoch()
        self.dataset: Any = None

    def begins(self, dataset: Any, epoch: FirstEpoch) -> None:
        """Take note that a pass over a dataset begins: the last one before the first step is the one that trains."""
        if self._keeps_dataset and not self._is_fixed:
            self.dataset = dataset
        if not (self._is_fixed or self._is_of_fit):
            self.first = epoch

    def arrays_given(self, epoch: FirstEpoch) -> None:
        """Take note of the data that Keras has prepared for a `fit` or an evaluation."""
        self._of_arrays = epoch

    def fit_begins(self, batches: int | None) -> None:
        """Take note that a `fit` begins; it makes iterators of its own, which tell less."""
        if not self._is_fixed:
            same = self._of_arrays.batches == batches
            self.first, self._is_of_fit = FirstEpoch(batches, self._of_arrays.last if same else None), True

    def step_made(self) -> None:
        """Take note of a step: with the first one the epoch is known."""
        if not self._is_fixed:
            self._is_fixed = True
            if self.first.batches is not None:
                self._write({"event": "epoch", **asdict(self.first)})


_SECONDS = 1.0
_LONGEST = 10.0
"""After so many seconds gpudist no longer waits: data that the program can read only once may never come again."""


def measure_input_rate(dataset: Any, write: Callable[[Mapping[str, Any]], None]) -> None:
    """Time a dataset for a second.

    Args:
        dataset: What the program trains on, plain or distributed; None where gpudist saw none.
        write: Writes an event to the trace.
    """
    events: list[dict[str, Any]] = []

    def read() -> None:
        try:
            events.append({"failure": "gpudist saw no tf.data pipeline"} if dataset is None else _timed(dataset))
        except Exception as error:  # the program's own functions may raise anything
            events.append({"failure": f"reading it once more raises {type(error).__name__}"})

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_LONGEST)
    write({"event": "input", **(events or [{"failure": f"reading it once more takes more than {_LONGEST:g} s"}])[0]})


def _timed(dataset: Any) -> dict[str, Any]:
    """Return what came in how many seconds, after the first element, for which TensorFlow starts its threads."""
    iterator = iter(dataset)
    first, elements, examples = _num_examples(next(iterator)), 0, 0
    begun = time.perf_counter()
    for element in iterator:
        elements, examples = elements + 1, examples + _num_examples(element)
        if time.perf_counter() - begun > _SECONDS:
            break
    if not elements:
        return {"failure": "it has one batch"}
    seconds = time.perf_counter() - begun
    return {"first": first, "elements": elements, "examples": examples, "seconds": seconds, "cores": os.cpu_count()}


def _num_examples(element: Any) -> int:
    """Return the length of the first tensor of an element; 1 where it has no dimension."""
    shape = tf.nest.flatten(element)[0].shape
    return int(shape[0]) if shape.rank else 1
