"""Give each example of a batch a key of its content, which its draws follow, and find it again in parts of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from emulate.imports import tf

DRAWN = "gpudist_draw"
"""Name of the operation whose result takes the place of a draw."""
_NEXT_COPY = 0x9E3779B9


class RowKeys:
    """Hold the keys of a step's examples.

    A step that splits its batch (micro-batches, whose gradients it adds up) calls its model once for each part. On several
    replicas an example is in another part than on one device, and there in another place. So in a call of a model that gets
    rows of the batch, as they are, draws follow the keys of these rows, and are counted from where the first call began.

    Args:
        tensors: The inputs that hold the examples.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors
        self._called: dict[int, list[Any]] = {}
        self._starts: dict[int, list[int]] = {}
        self._part: tuple[Any, int] | None = None
        self._made: dict[tuple[int, int], tuple[Any, Any]] = {}

    @property
    def of_batch(self) -> Any:
        """Return the keys of all rows."""
        return self._once(self, lambda: keys_of(self._tensors))

    def _once(self, owner: Any, make: Callable[[], Any]) -> Any:
        """Return what is made for an owner, once in each graph: most programs draw nothing and need none of it."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        key = (id(owner), id(graph))
        if key not in self._made:
            self._made[key] = make(), graph  # with the graph, so that no other one gets its number
        return self._made[key][0]

    @property
    def in_hand(self) -> list[Any]:
        """Return the rows that the outermost layer was called with; none outside of its call."""
        return [] if self._part is None else [self._part[0]]

    @contextlib.contextmanager
    def in_call(self, model: Any, args: Any, num_draws: int) -> Iterator[None]:
        """Have draws in this block follow the rows that a model is called with.

        Args:
            model: The outermost layer.
            args: What it is called with.
            num_draws: How many draws the step has made before.
        """
        given = next((value for value in tf.nest.flatten(args) if self._may_be_rows(value)), None)
        if given is None:
            yield
            return
        called, starts = self._called.setdefault(id(model), []), self._starts.setdefault(id(model), [])
        turn = sum(earlier is given for earlier in called)  # the same rows once more are to draw something else
        called.append(given)
        if turn == len(starts):
            starts.append(num_draws)
        outer, self._part = self._part, (given, starts[turn] - num_draws)
        try:
            yield
        finally:
            self._part = outer

    def at(self, place: int) -> tuple[Any, Any]:
        """Return the keys of the rows that the program has in hand, and the number that counts there as the place of a draw."""
        if self._part is None:
            return self.of_batch, tf.constant(place, tf.int64)
        given, shift = self._part
        keys, are_rows = self._once(given, lambda: self._found(given))
        rows = tf.cond(are_rows, lambda: keys, lambda: self.of_batch)
        return rows, tf.where(are_rows, tf.constant(place + shift, tf.int64), tf.constant(place, tf.int64))

    def _may_be_rows(self, value: Any) -> bool:
        """Return whether a value may hold rows of the batch."""
        is_dense = tf.is_tensor(value) and not isinstance(value, tf.RaggedTensor | tf.SparseTensor)
        return is_dense and bool(value.shape.rank) and bool(self._like(value))

    def _like(self, value: Any) -> list[Any]:
        """Return the inputs whose rows have the type and the shape of a value's."""
        tensors = self._tensors
        return [t for t in tensors if t.dtype == value.dtype and t.shape[1:].is_compatible_with(value.shape[1:])]

    def _found(self, value: Any) -> tuple[Any, Any]:
        """Return the key of each row of a value, and whether all of them are rows of the batch.

        The key is of the row alone: which other rows a replica has must not matter. A row that is there more often than in the
        batch, which was put together with itself, has another key each time.
        """
        own = keys_of([value])
        if any(value is tensor for tensor in self._tensors):
            return own, tf.constant(True)
        wide = tf.cast(own, tf.int64)
        # How many equal keys stand before each.
        order = tf.argsort(wide, stable=True)
        ordered = tf.gather(wide, order)
        earlier = tf.gather(tf.range(tf.size(wide)) - tf.searchsorted(ordered, ordered), tf.argsort(order))
        are_rows, copy = tf.constant(False), tf.zeros_like(earlier)
        for tensor in self._like(value):
            batch = tf.sort(tf.cast(keys_of([tensor]), tf.int64))
            times = tf.searchsorted(batch, wide, side="right") - tf.searchsorted(batch, wide)
            copy = tf.where(are_rows, copy, earlier // tf.maximum(times, 1))
            are_rows = tf.logical_or(are_rows, tf.reduce_all(times > 0))
        keys = wide + tf.cast(copy, tf.int64) * _NEXT_COPY
        return tf.cast(tf.math.floormod(keys, 1 << 32), tf.uint32), are_rows


def keys_of(tensors: list[Any]) -> Any:
    """Return a key of each row: of its part of all tensors that have as many rows as the first.

    The hash is multilinear (Carter and Wegman 1979: two rows have the same with a probability of about 2**-32): few operations,
    because each replica makes them in each step.
    """
    number = tf.shape(tensors[0])[0]
    keys = tf.zeros([number], tf.int32)
    for place, tensor in enumerate(tensors):
        if tensor.shape.rank is None or (tensor.shape[0] is not None and tensor.shape[0] != tensors[0].shape[0]):
            continue
        rows = tf.reshape(tensor, [tf.shape(tensor)[0], tf.reduce_prod(tf.shape(tensor)[1:])])
        is_whole = tensor.dtype.is_integer or tensor.dtype.is_bool
        bits = tf.cast(rows, tf.int32) if is_whole else tf.bitcast(tf.cast(rows, tf.float32), tf.int32)
        parts = tf.reduce_sum(bits * _weights_of_bytes(tensor, tf.shape(bits)[1], place), axis=1)
        keys += parts if place == 0 or tensor.shape[0] is not None else _for_each(number, parts)
    return mixed(tf.cast(keys, tf.uint32))


def _for_each(number: Any, parts: Any) -> Any:
    """Return the parts if there is one for each row: how many rows an input has may be known only when the step runs."""
    return tf.cond(tf.size(parts) == number, lambda: parts, lambda: tf.zeros([number], tf.int32))


def _weights_of_bytes(tensor: Any, columns: Any, place: int) -> Any:
    """Return an odd number for each column of an input: a constant where its shape is known, and the same where it is not."""
    first = np.uint32(_NEXT_COPY + place)
    if tensor.shape[1:].is_fully_defined():
        known = mixed(np.arange(tensor.shape[1:].num_elements(), dtype=np.uint32) + first)
        return tf.constant(known.view(np.int32) | 1, tf.int32)
    return tf.bitwise.bitwise_or(tf.cast(mixed(tf.cast(tf.range(columns), tf.uint32) + first), tf.int32), 1)


def mixed(bits: Any) -> Any:
    """Apply MurmurHash3's 32-bit finalizer (Appleby, public domain): every input bit affects every output bit.

    Args:
        bits: uint32, a tensor or an array.

    Returns:
        The same kind.
    """
    shifted = np.right_shift if isinstance(bits, np.ndarray) else tf.bitwise.right_shift
    bits = bits ^ shifted(bits, np.uint32(16))
    bits = bits * np.uint32(0x85EBCA6B)
    bits = bits ^ shifted(bits, np.uint32(13))
    bits = bits * np.uint32(0xC2B2AE35)
    return bits ^ shifted(bits, np.uint32(16))
