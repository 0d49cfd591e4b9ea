"""Read examples one after the other: from a generator, or from a `tf.data.Dataset`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.sources.access import Rows, digest, spec_of, stacked

# What TensorFlow 2.21 says of elements, and of batches that are cut anew.
_OF_SEVERAL_SHAPES = ("Cannot batch tensors with different shapes", "source and dst shapes are")


class _Stream(ABC):
    """Provide examples that are read one after the other, always in the same order."""

    spec: Any
    num_rows: int | None
    _keeps = False
    _kept: list[Rows] | None = None

    @abstractmethod
    def _read(self, size: int) -> Iterator[Rows]:
        """Yield the examples in pieces of a size, each with the numbers of its examples first."""

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        if self._kept is not None:
            yield from self._kept
            return
        chunks = []
        for chunk in self._read(size):
            if self._keeps:
                chunks.append(chunk)
            yield chunk
        # Only what was read to the end is all.
        self._kept = chunks if self._keeps else None

    def keeping(self) -> _Stream:
        """Return the same examples, read to the end once and then kept in memory, all of them on every host."""
        kept = self if self._keeps else copy(self)
        kept._keeps = True
        return kept

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of these examples."""
        return digest(repr(self.spec), self.num_rows)

    @property
    def looks(self) -> str:
        """Return the text that hosts compare before they start. They compare the examples batch by batch later."""
        return f"{self.num_rows} examples of {self.spec}"


class GeneratorStream(_Stream):
    """Provide the examples that a generator yields, the same at each call.

    Args:
        make: A function that returns a new iterable of examples for each epoch.
        signature: The structure of one example, a `tf.TensorSpec` for each component. None takes it from the first example.
        num_rows: The number of examples, if it is known.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], signature: Any, num_rows: int | None) -> None:
        self._make = make
        self._signature = signature
        self._latest: Any = None
        self.num_rows = num_rows

    @cached_property
    def spec(self) -> Any:
        """Return the structure of one example."""
        if self._signature is not None:
            return self._signature
        rows = self._anew()
        first = next(rows, None)
        if hasattr(rows, "close"):
            rows.close()
        if first is None:
            raise UsageError("A generator must yield at least one example", "Check what it yields.", make=self._make)
        return tf.nest.map_structure(spec_of, first)

    def _read(self, size: int) -> Iterator[Rows]:
        specs = tf.nest.flatten(self.spec)
        rows, count = self._anew(), 0
        try:
            while chunk := [self._flat(row, specs) for row in islice(rows, size)]:
                yield [np.arange(count, count + len(chunk)), *stacked(chunk, specs)]
                count += len(chunk)
        finally:
            # The generator's own `finally` runs now, not when it is collected.
            if hasattr(rows, "close"):
                rows.close()

    def _anew(self) -> Iterator[Any]:
        """Return a new iterable of all examples. Refuse the same iterator a second time: examples would be missing."""
        elements = self._make()
        rows = iter(elements)
        if rows is elements and elements is self._latest:
            raise UsageError(
                "make must return a new iterable at each call",
                "Create the iterator inside the function: lambda: zip(x, y).",
                make=self._make,
                returned=f"the same {type(elements).__name__} again",
            )
        self._latest = rows
        return rows

    def _flat(self, row: Any, specs: list[Any]) -> list[Any]:
        flat = tf.nest.flatten(row)
        if len(flat) != len(specs):
            raise UsageError(
                "Each example must have the structure of the signature", "Yield such examples.", row=row, signature=self.spec
            )
        return [_unchanging(value) for value in flat]


def _unchanging(value: Any) -> Any:
    """Return a value that does not change later: a generator may yield the same array each time, with other numbers in it."""
    return value if isinstance(value, (tf.Tensor, np.generic, str, bytes, bool, int, float)) else np.array(value)


class DatasetStream(_Stream):
    """Provide the examples of a `tf.data.Dataset`.

    Args:
        dataset: A dataset whose elements are examples, or batches of them.
        batched: Whether the elements are batches.

    Raises:
        UsageError: If it is not a dataset, never ends, yields other examples or another order each time, or has elements that
            are not plain tensors.
    """

    def __init__(self, dataset: Any, batched: bool) -> None:
        from gpudist_core.upstream.datasets import shuffles_that_vary

        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError("dataset must be a tf.data.Dataset", "For arrays use from_arrays.", dataset=type(dataset).__name__)
        specs = tf.nest.flatten(dataset.element_spec)
        if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
            raise UsageError(
                "The components of an example must be dense tensors",
                "Make them dense in the dataset.",
                element_spec=dataset.element_spec,
            )
        varying = shuffles_that_vary(dataset)
        if varying:
            raise UsageError(
                "A dataset must yield the same examples in the same order each time, on every host",
                "Leave its shuffle out and use Pipeline.shuffle(buffer), which shuffles by seed and epoch. Or give its shuffle "
                "a seed and reshuffle_each_iteration=False.",
                shuffles=varying,
            )
        if batched and any(spec.shape.rank == 0 for spec in specs):
            raise UsageError(
                "An element of a batched dataset must have its examples along the first axes",
                "Use batched=False.",
                element_spec=dataset.element_spec,
            )
        size = int(dataset.cardinality())
        if size == tf.data.INFINITE_CARDINALITY:
            raise UsageError(
                "A dataset must end", "Leave repeat() out: each iteration of a pipeline is one epoch.", dataset=dataset
            )
        if size == 0:
            raise UsageError("The data must have at least one example", "Pass a dataset with elements.", dataset=dataset)
        options = tf.data.Options()
        options.deterministic = True
        self._dataset = dataset.with_options(options)
        self._batched = batched
        self.num_rows = size if size > 0 and not batched else None
        self.spec = dataset.element_spec
        if batched:
            self.spec = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), self.spec)

    def _read(self, size: int) -> Iterator[Rows]:
        rows = self._dataset.rebatch(size) if self._batched else self._dataset.batch(size)
        # Each chunk may be asked for by another thread, and a device scope belongs to one.
        count = 0
        with tf.device("CPU:0"):
            batches = iter(rows.prefetch(1))
        while True:
            try:
                with tf.device("CPU:0"):
                    batch = next(batches, None)
            except (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError) as error:
                if not any(text in error.message for text in _OF_SEVERAL_SHAPES):
                    raise
                shapes = [tuple(spec.shape) for spec in tf.nest.flatten(self.spec)]
                raise UsageError(
                    "The examples of a dataset must have one shape", "Pad or crop them in the dataset.", shapes=shapes
                ) from error
            if batch is None:
                return
            parts = [np.asarray(part) for part in tf.nest.flatten(batch)]
            yield [np.arange(count, count + len(parts[0])), *parts]
            count += len(parts[0])
