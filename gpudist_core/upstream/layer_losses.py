"""Losses that layers add while they are called (activity regularisers, `add_loss`): a list for each replica.

Keras 3.15 keeps them in one list per layer, which all replicas share, and clears it when a model is called. Replicas are traced in
threads that take turns where they meet in a collective: one that met the others between its call and its `losses` would find
theirs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def apart(model: Any) -> Iterator[None]:
    """While a step is traced: each replica's thread has lists of its own.

    Args:
        model: A Keras model; anything else is left as it is.
    """
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else []
    kept = [(layer, layer._losses) for layer in layers]
    for layer, _ in kept:
        object.__setattr__(layer, "_losses", _ListOfThread())
    try:
        yield
    finally:
        for layer, losses in kept:
            object.__setattr__(layer, "_losses", losses)


class _ListOfThread(threading.local):
    """A list with other items in each thread, as far as `Layer` uses it."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def append(self, item: Any) -> None:
        """Add one."""
        self._items.append(item)

    def extend(self, items: Any) -> None:
        """Add some."""
        self._items.extend(items)

    def clear(self) -> None:
        """Forget all of this thread."""
        self._items.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: Any) -> Any:
        return self._items[place]
