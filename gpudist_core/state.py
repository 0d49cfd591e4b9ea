"""Keep what gpudist_core knows of a thread, and of a user's objects beside them: nothing is pickled or saved with them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """Hold a value that code sets for what its own thread traces: TensorFlow traces each replica in a thread.

    Args:
        value: The value in a thread that has set none.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[T]:
        """Set the value in this thread until the block ends."""
        outer, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = outer


class Kept(Generic[T]):
    """Keep a state for each object as long as the object lives. Objects are distinguished by identity.

    A state must not refer to its object: then neither would ever be freed.

    Args:
        make: Makes the state of an object that has none yet.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._states: dict[int, tuple[weakref.ref[Any], T]] = {}

    def known(self, owner: Any) -> T | None:
        """Return the state of an object, or None if `of` was never called for it."""
        entry = self._states.get(id(owner))
        return entry[1] if entry is not None and entry[0]() is owner else None

    def of(self, owner: Any) -> T:
        """Return the state of an object, which is made if there is none."""
        state = self.known(owner)
        if state is None:
            key, state = id(owner), self._make()
            self._states[key] = weakref.ref(owner, lambda _: self._states.pop(key, None)), state
        return state


@dataclass
class OfModel:
    """Hold what a distributed model keeps.

    Attributes:
        accumulations: The accumulations of its optimizers, or None.
        fits: Number of calls of `fit`.
        pipeline: The pipeline that the current `fit` trains with, or None.
        epochs: The epochs of the current `fit`, or None.
        next_iterator: What makes the iterators of the current `fit`, or None.
        place: The strategy on the coordinator of parameter servers, or None.
    """

    accumulations: Any = None
    fits: int = 0
    pipeline: Any = None
    epochs: Any = None
    next_iterator: Any = None
    place: Any = None


@dataclass
class OfOptimizer:
    """Hold what an exact optimizer keeps.

    Attributes:
        is_exact: Whether it was made exact. A clone was not.
        is_reduced: Whether it gets gradients that are already summed, as inside a `LossScaleOptimizer`.
        reduce: Sums the gradients in the step that is traced, or None.
        clip: Clips them before the optimizer's own clipping, or None.
        accumulate: Over how many batches the user wants the mean of gradients, or None.
        accumulation: What holds the sums of these batches, or None.
        overwrite: After how many updates the user wants averages in place of variables, or None.
        taken_over: The sums that a loaded optimizer had, or None.
    """

    is_exact: bool = False
    is_reduced: bool = False
    reduce: Any = None
    clip: Any = None
    accumulate: int | None = None
    accumulation: Any = None
    overwrite: int | None = None
    taken_over: list[Any] | None = None


@dataclass
class OfVariable:
    """Hold what a `tf.Variable` with slices of a table keeps.

    Attributes:
        shard: Which replica holds which rows: a `static.ShardInfo`; None for any other variable.
        table: A weak reference to its `ShardedTable`, or None.
    """

    shard: Any = None
    table: weakref.ref[Any] | None = None


of_model = Kept(OfModel)
of_optimizer = Kept(OfOptimizer)
of_variable = Kept(OfVariable)
limit_of: weakref.WeakKeyDictionary[Any, float | None] = weakref.WeakKeyDictionary()
"""The longest time of a step of each strategy of several hosts, in seconds."""
warned_metrics: weakref.WeakSet[Any] = weakref.WeakSet()
"""The metrics about whose function the user was warned."""
