"""Rows that come one after the other: from a generator, or from a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.sources.access import Rows, digest, spec_of, stacked

# What TensorFlow 2.21 says of elements, and of batches that are cut anew.
_OF_SEVERAL_SHAPES = ("Cannot batch tensors with different shapes", "source and dst shapes are")


class GeneratorStream:
    """The rows that a generator yields, the same at each call.

    Args:
        make: Makes an iterable of rows, new for each epoch.
        signature: The structure of one row, a `tf.TensorSpec` for each component; None takes it from the first row.
        num_rows: How many rows there are, if that is known.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], signature: Any, num_rows: int | None) -> None:
        self._make = make
        self._signature = signature
        self._latest: Any = None
        self.num_rows = num_rows

    @cached_property
    def spec(self) -> Any:
        """The structure of one row."""
        import tensorflow as tf

        if self._signature is not None:
            return self._signature
        rows = self._anew()
        first = next(rows, None)
        if hasattr(rows, "close"):
            rows.close()
        if first is None:
            raise WrongUse("A generator yields at least one row", "Look at what it yields.", make=self._make)
        return tf.nest.map_structure(spec_of, first)

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        import tensorflow as tf

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
        """All rows once more. An iterator that comes again is where it was left, or at its end: rows would be missing."""
        made = self._make()
        rows = iter(made)
        if rows is made and made is self._latest:
            raise WrongUse(
                "The function of a generator returns a new iterable each time",
                "Make the iterator within the function: lambda: zip(x, y).",
                make=self._make,
                returned=f"the same {type(made).__name__} again",
            )
        self._latest = rows
        return rows

    def keeping(self) -> KeptStream:
        """The same rows, kept in memory when they have been read once."""
        return KeptStream(self)

    def _flat(self, row: Any, specs: list[Any]) -> list[Any]:
        import tensorflow as tf

        flat = tf.nest.flatten(row)
        if len(flat) != len(specs):
            raise WrongUse("Each row has the structure of the signature", "Yield such rows.", row=row, signature=self.spec)
        return [_kept(value) for value in flat]

    @cached_property
    def fingerprint(self) -> str:
        """What tells these rows from others."""
        return digest(repr(self.spec), self.num_rows)

    @property
    def looks(self) -> str:
        """What hosts compare before they begin: their rows they compare batch by batch."""
        return f"{self.num_rows} rows of {self.spec}"


def _kept(value: Any) -> Any:
    """A value that stays what it is: a generator may yield one array each time, with other numbers in it."""
    import tensorflow as tf

    return value if isinstance(value, (tf.Tensor, np.generic, str, bytes, bool, int, float)) else np.array(value)


class KeptStream:
    """The rows of a stream, read to the end once and then kept in memory, all of them on every host.

    Args:
        stream: The rows, always in the same order.
    """

    def __init__(self, stream: GeneratorStream | DatasetStream) -> None:
        self._stream = stream
        self._chunks: list[Rows] | None = None
        self.num_rows = stream.num_rows

    @property
    def spec(self) -> Any:
        """The structure of one row."""
        return self._stream.spec

    @property
    def fingerprint(self) -> str:
        """What tells these rows from others."""
        return self._stream.fingerprint

    @property
    def looks(self) -> str:
        """What hosts compare before they begin."""
        return self._stream.looks

    def keeping(self) -> KeptStream:
        """Itself."""
        return self

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        if self._chunks is not None:
            yield from self._chunks
            return
        chunks = []
        for chunk in self._stream.chunks(size, seed, epoch):
            chunks.append(chunk)
            yield chunk
        # Only what was read to the end is all.
        self._chunks = chunks


class DatasetStream:
    """The rows of a `tf.data.Dataset`.

    Args:
        dataset: Its elements are rows, or batches of rows.
        batched: Whether they are batches.

    Raises:
        WrongUse: It is none, never ends, gives other rows or another order each time, or has elements that are no plain
            tensors.
    """

    def __init__(self, dataset: Any, batched: bool) -> None:
        import tensorflow as tf

        from gpudist_core.upstream.datasets import shuffles_that_vary

        if not isinstance(dataset, tf.data.Dataset):
            raise WrongUse("A tf.data.Dataset is needed", "from_arrays takes arrays.", dataset=type(dataset).__name__)
        _check_specs(dataset.element_spec)
        varying = shuffles_that_vary(dataset)
        if varying:
            raise WrongUse(
                "A dataset gives the same rows in the same order each time, on every host",
                "Leave its shuffle out and say Pipeline.shuffle(buffer), which shuffles by seed and epoch; or give it a seed "
                "and reshuffle_each_iteration=False.",
                shuffles=varying,
            )
        if batched:
            _check_batched(dataset.element_spec)
        size = int(dataset.cardinality())
        if size == tf.data.INFINITE_CARDINALITY:
            raise WrongUse("A dataset ends", "Leave repeat() out: each iteration of a pipeline is one epoch.", dataset=dataset)
        if size == 0:
            raise WrongUse("There is at least one row", "Give a dataset with elements.", dataset=dataset)
        options = tf.data.Options()
        options.deterministic = True
        self._dataset = dataset.with_options(options)
        self._batched = batched
        self.num_rows = size if size > 0 and not batched else None
        self.spec = tf.nest.map_structure(lambda spec: _row_of(spec) if batched else spec, dataset.element_spec)

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        import tensorflow as tf

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
                raise WrongUse(
                    "The rows of a dataset have one shape", "Pad or crop them in the dataset.", shapes=shapes
                ) from error
            if batch is None:
                return
            parts = [np.asarray(part) for part in tf.nest.flatten(batch)]
            yield [np.arange(count, count + len(parts[0])), *parts]
            count += len(parts[0])

    def keeping(self) -> KeptStream:
        """The same rows, kept in memory when they have been read once."""
        return KeptStream(self)

    @cached_property
    def fingerprint(self) -> str:
        """What tells these rows from others."""
        return digest(repr(self.spec), self.num_rows)

    @property
    def looks(self) -> str:
        """What hosts compare before they begin: their rows they compare batch by batch."""
        return f"{self.num_rows} rows of {self.spec}"


def _row_of(spec: Any) -> Any:
    import tensorflow as tf

    return tf.TensorSpec(spec.shape[1:], spec.dtype)


def _check_specs(spec: Any) -> None:
    import tensorflow as tf

    if not all(isinstance(part, tf.TensorSpec) for part in tf.nest.flatten(spec)):
        raise WrongUse("The components of a row are dense tensors", "Make them dense in the dataset.", element_spec=spec)


def _check_batched(spec: Any) -> None:
    import tensorflow as tf

    if any(part.shape.rank == 0 for part in tf.nest.flatten(spec)):
        raise WrongUse(
            "An element of a batched dataset has its rows along the first axes", "Say batched=False.", element_spec=spec
        )
