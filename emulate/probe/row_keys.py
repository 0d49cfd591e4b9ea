"""Give each example of a batch a key of its contents, and find the examples again in the parts that a step makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_NEXT_COPY = 0x9E3779B9


class RowKeys:
    """Hold the keys of a step's examples.

    A step that splits its batch (micro-batches, whose gradients it adds up) calls its model once for each part. On several
    replicas an example is in another part than on one device, and there in another place. So in a call of a model that gets
    rows of the batch, as they are, draws follow the keys of these rows, and are counted from where the first call began.

    Args:
        tensors: The inputs that hold the examples.

    Attributes:
        of_batch: Their keys.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self.of_batch = keys_of(tensors)
        self._tensors = tensors
        self._called: dict[int, list[Any]] = {}
        self._starts: dict[int, list[int]] = {}
        self._part: tuple[Any, Any, int] | None = None

    @contextlib.contextmanager
    def in_call(self, model: Any, args: Any, num_draws: int) -> Iterator[None]:
        """Have draws in this block follow the rows that a model is called with.

        Args:
            model: The outermost layer.
            args: What it is called with.
            num_draws: How many draws the step has made before.
        """
        import tensorflow as tf

        given = next((value for value in tf.nest.flatten(args) if self._may_be_rows(value)), None)
        if given is None:
            yield
            return
        called, starts = self._called.setdefault(id(model), []), self._starts.setdefault(id(model), [])
        turn = sum(one is given for one in called)  # the same rows once more are to draw something else
        called.append(given)
        if turn == len(starts):
            starts.append(num_draws)
        outer, self._part = self._part, (*self._found(given), starts[turn] - num_draws)
        try:
            yield
        finally:
            self._part = outer

    def at(self, place: int) -> tuple[Any, Any]:
        """Return the keys of the rows that the program has in hand, and the number that counts there as the place of a draw."""
        import tensorflow as tf

        if self._part is None:
            return self.of_batch, tf.constant(place, tf.int64)
        keys, are_rows, shift = self._part
        rows = tf.cond(are_rows, lambda: keys, lambda: self.of_batch)
        return rows, tf.where(are_rows, tf.constant(place + shift, tf.int64), tf.constant(place, tf.int64))

    def _may_be_rows(self, value: Any) -> bool:
        """Return whether a value may hold rows of the batch."""
        import tensorflow as tf

        is_dense = tf.is_tensor(value) and not isinstance(value, tf.RaggedTensor | tf.SparseTensor)
        return is_dense and bool(value.shape.rank) and bool(self._like(value))

    def _like(self, value: Any) -> list[Any]:
        """Return the inputs whose rows have the type and the shape of a value's."""
        tensors = self._tensors
        return [one for one in tensors if one.dtype == value.dtype and one.shape[1:].is_compatible_with(value.shape[1:])]

    def _found(self, value: Any) -> tuple[Any, Any]:
        """Return the key of each row of a value, and whether all of them are rows of the batch.

        The key is of the row alone: which other rows a replica has must not matter. A row that is there more often than in the
        batch, which was put together with itself, has another key each time.
        """
        import tensorflow as tf

        own = keys_of([value])
        if any(value is one for one in self._tensors):
            return own, tf.constant(True)
        wide = tf.cast(own, tf.int64)
        earlier = _earlier(wide)
        are_rows, copy = tf.constant(False), tf.zeros_like(earlier)
        for one in self._like(value):
            batch = tf.sort(tf.cast(keys_of([one]), tf.int64))
            times = tf.searchsorted(batch, wide, side="right") - tf.searchsorted(batch, wide)
            copy = tf.where(are_rows, copy, earlier // tf.maximum(times, 1))
            are_rows = tf.logical_or(are_rows, tf.reduce_all(times > 0))
        keys = wide + tf.cast(copy, tf.int64) * _NEXT_COPY
        return tf.cast(tf.math.floormod(keys, 1 << 32), tf.uint32), are_rows


def _earlier(keys: Any) -> Any:
    """Return how many equal keys stand before each."""
    import tensorflow as tf

    order = tf.argsort(keys, stable=True)
    ordered = tf.gather(keys, order)
    return tf.gather(tf.range(tf.size(keys)) - tf.searchsorted(ordered, ordered), tf.argsort(order))


def keys_of(tensors: list[Any]) -> Any:
    """Return a key of each row: of its part of all tensors that have as many rows as the first."""
    import tensorflow as tf

    number = tf.shape(tensors[0])[0]
    keys = tf.cast(tf.zeros([number], tf.int32), tf.uint32)  # GPUs fill no uint32 (TensorFlow 2.21)
    for tensor in tensors:
        if tensor.shape.rank is None or (tensor.shape[0] is not None and tensor.shape[0] != tensors[0].shape[0]):
            continue
        bits = tf.cast(tf.bitcast(tf.cast(tf.reshape(tensor, [number, -1]), tf.float32), tf.int32), tf.uint32)
        weights = mixed(tf.cast(tf.range(tf.shape(bits)[1]), tf.uint32) + tf.constant(0x9E3779B9, tf.uint32))
        keys = mixed(keys + _sum(mixed(bits ^ weights[None, :])))
    return keys


def mixed(bits: Any) -> Any:
    """Apply MurmurHash3's 32-bit finalizer (Appleby, public domain): every input bit affects every output bit."""
    import tensorflow as tf

    bits = bits ^ tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32))
    bits = bits * tf.constant(0x85EBCA6B, tf.uint32)
    bits = bits ^ tf.bitwise.right_shift(bits, tf.constant(13, tf.uint32))
    bits = bits * tf.constant(0xC2B2AE35, tf.uint32)
    return bits ^ tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32))


def _sum(values: Any) -> Any:
    """Sum modulo 2**32 over the second dimension (TensorFlow has no uint32 sum on CPU)."""
    import tensorflow as tf

    return tf.cast(tf.math.floormod(tf.reduce_sum(tf.cast(values, tf.int64), axis=1), 1 << 32), tf.uint32)
