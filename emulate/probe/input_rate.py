"""Measure how fast the machine reads the program's data: go through its dataset once more, without steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

_SECONDS = 1.0
_LONGEST = 10.0
"""After so many seconds gpudist no longer waits: data that the program can read only once may never come again."""


def measure(dataset: Any, write: Callable[[Mapping[str, Any]], None]) -> None:
    """Time a dataset for a second.

    Args:
        dataset: What the program trains on, plain or distributed; None where gpudist saw none.
        write: Writes an event to the trace.
    """
    events: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: events.append(_timed_or_failure(dataset)), daemon=True)
    reader.start()
    reader.join(_LONGEST)
    write({"event": "input", **(events or [{"failure": f"reading it once more takes more than {_LONGEST:g} s"}])[0]})


def _timed_or_failure(dataset: Any) -> dict[str, Any]:
    try:
        return {"failure": "gpudist saw no tf.data pipeline"} if dataset is None else _timed(dataset)
    except Exception as error:  # the program's own functions may raise anything
        return {"failure": f"reading it once more raises {type(error).__name__}"}


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
    import tensorflow as tf

    shape = tf.nest.flatten(element)[0].shape
    return int(shape[0]) if shape.rank else 1
