"""Follow random streams, give each example of a batch a key that its draws follow, and turn random bits into draws.

Of the streams outside of graphs it is recorded which ones a program seeds, with what, and whether it draws in each step. Hosts
that seed a stream alike and draw from it for each batch, each for rows of its own, draw the same numbers.

`RowKeys` gives each example a key of its contents, and finds the examples again in parts of the batch. `draws_made_of` makes
draws of a distribution of random bits, element by element, in place of TensorFlow's draws.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulate.probe.point import around, caller, when_imported
from emulate.probe.recording import Recording
from emulate.probe.trace import digest

_MOST_STREAMS = 32
"""So many streams are followed; a program that makes one for each row makes a few lines' worth of them."""


@dataclass
class _Stream:
    """Hold one generator: its seed, and in how many of the observed steps it had advanced.

    Attributes:
        builds: Whether it was made, and advanced, in a function that makes the dataset of one host.
    """

    seed: str
    state: Callable[[], str]
    last: str = ""
    moved: int = 0
    looks: int = 0
    first: str = ""
    builds: bool = False

    def __post_init__(self) -> None:
        self.first = self.state()

    def look(self) -> None:
        now = self.state()
        self.moved += bool(self.looks) and now != self.last
        self.looks += 1
        self.last = now


class Streams:
    """Follow the generators of Python and NumPy that a program seeds.

    Args:
        recording: What writes of them.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._known: dict[str, _Stream] = {}

    def install(self) -> None:
        """See every `numpy.random.default_rng` from now on; the global generators are told by `seeded`."""
        when_imported("numpy", self._wrap_default_rng)
        self._recording.at_step.append(self.look)
        self._recording.at_end.append(lambda: self._recording.write({"event": "streams", "streams": self.found}))

    def seeded(self, generator: str) -> None:
        """Note that the program has seeded Python's or NumPy's global generator."""
        if generator in _GLOBAL:
            name, state = _GLOBAL[generator]
            self._known[name] = _Stream(state(), state)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Note what is made and advances in this block, which makes the dataset of one host."""
        before = [id(stream) for stream in self._known.values()]
        yield
        for stream in self._known.values():
            stream.builds |= id(stream) not in before and stream.state() != stream.first

    def look(self) -> None:
        """Note that a step was made."""
        for stream in list(self._known.values()):
            stream.look()

    @property
    def found(self) -> dict[str, dict[str, Any]]:
        """Return, by stream name, its seed, its count of advances, and whether it makes a host's dataset."""
        return {
            name: {"seed": stream.seed, "moved": stream.moved, "looks": stream.looks - 1, "builds": stream.builds}
            for name, stream in self._known.items()
        }

    def _wrap_default_rng(self) -> None:
        import numpy as np

        @around(np.random, "default_rng")
        def default_rng(original: Any, seed: Any = None) -> Any:
            generator = original(seed)
            frame = caller()
            name = f"numpy.random.default_rng, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            if _is_plain(seed) and name not in self._known and len(self._known) < _MOST_STREAMS:
                self._known[name] = _Stream(repr(seed), lambda: repr(generator.bit_generator.state))
            return generator


def _is_plain(seed: object) -> bool:
    """Return whether it is a number, or several."""
    return isinstance(seed, int) or (isinstance(seed, (list, tuple)) and all(isinstance(number, int) for number in seed))


def _python_state() -> str:
    return str(hash(random.getstate()))


def _numpy_state() -> str:
    import numpy as np

    state = np.random.get_state(legacy=False)["state"]
    return f"{digest(state['key'])}:{state['pos']}"


_GLOBAL: Mapping[str, tuple[str, Callable[[], str]]] = {
    "python": ("random", _python_state),
    "numpy": ("numpy.random", _numpy_state),
}


_ROUNDS = 6  # of gamma's rejection, each of which is accepted with a probability of 0.95 or more
_TERMS = 96  # of a sum of probabilities whose mean is below _LARGE
_LARGE_RATE = 30.0

DRAWN = "gpudist_draw"
"""Name of the operation whose result takes the place of a draw."""
COLUMNS = {"gamma": 2 * _ROUNDS + 1, "poisson": 1, "binomial": 1}
"""Random numbers for each element, in a last dimension. Other distributions need one number and have no such dimension."""
WHOLE = {"integer", "poisson", "binomial"}
"""Distributions of whole numbers, a few of which are the same by chance."""


def draws_made_of(bits: Any, distribution: str, given: dict[str, Any], dtype: Any) -> Any:
    """Return draws of a distribution.

    Args:
        bits: uint32, of the shape of what is drawn, with a last dimension more where `COLUMNS` says so.
        distribution: Its name.
        given: The arguments of TensorFlow's operation by name.
        dtype: Of the draws.

    Returns:
        A tensor of the shape of what is drawn.
    """
    import tensorflow as tf

    if distribution == "integer":
        return _integer(bits, given, dtype)
    # One row is computed in vectors of several lengths: where 64 bits are compared, the last bit of 32 would differ.
    numbers = tf.cast(uniform(bits), tf.float64 if dtype == tf.float64 else tf.float32)
    if distribution == "normal":
        numbers = tf.math.ndtri(_inside(numbers))
    elif distribution == "truncated":
        numbers = tf.math.ndtri(numbers * 0.9544997 + 0.02275013)
    elif distribution == "gamma":
        numbers = _gamma(_inside(numbers), tf.cast(given["alpha"], numbers.dtype))
    elif distribution == "poisson":
        numbers = _poisson(_inside(numbers[..., 0]), tf.cast(given["rate"] if "rate" in given else given["lam"], numbers.dtype))
    elif distribution == "binomial":
        numbers = _binomial(_inside(numbers[..., 0]), *(tf.cast(given[name], numbers.dtype) for name in ("counts", "probs")))
    return tf.cast(numbers, dtype)


def uniform(bits: Any) -> Any:
    """Return float32 numbers in [0, 1) with 24 bits."""
    import tensorflow as tf

    return tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32) * (1.0 / (1 << 24))


def _inside(numbers: Any) -> Any:
    """Scale the numbers so that none is 0 or 1."""
    return numbers * (1.0 - 2e-7) + 1e-7


def _integer(bits: Any, given: dict[str, Any], dtype: Any) -> Any:
    """Return integers from minval to maxval - 1."""
    import tensorflow as tf

    low, high = (tf.cast(given[name], tf.int64) for name in ("minval", "maxval"))
    return tf.cast(low + tf.math.floormod(tf.cast(bits, tf.int64), high - low), dtype)


def _gamma(numbers: Any, alpha: Any) -> Any:
    """Draw by rejection (Marsaglia and Tsang 2000), a few rounds at once; differentiable in alpha, as in TensorFlow."""
    import tensorflow as tf

    normals, uniforms, last = tf.math.ndtri(numbers[..., :_ROUNDS]), numbers[..., _ROUNDS:-1], numbers[..., -1]
    is_small = alpha < 1.0
    d = tf.where(is_small, alpha + 1.0, alpha) - 1.0 / 3.0
    c = tf.math.rsqrt(9.0 * d)
    cubes = (1.0 + c[..., None] * normals) ** 3
    most = 0.5 * normals**2 + d[..., None] * (1.0 - cubes + tf.math.log(tf.maximum(cubes, 1e-30)))
    accepted = tf.logical_and(cubes > 0.0, tf.math.log(uniforms) < most)
    accepted_first = tf.one_hot(tf.argmax(tf.cast(accepted, tf.int32), -1), _ROUNDS, dtype=alpha.dtype)
    chosen = accepted_first * tf.cast(accepted, alpha.dtype)
    normal = tf.stop_gradient(tf.reduce_sum(chosen * normals, -1))
    return d * (1.0 + c * normal) ** 3 * tf.where(is_small, last ** (1.0 / tf.where(is_small, alpha, 1.0)), 1.0)


def _poisson(numbers: Any, rate: Any) -> Any:
    """Draw by cumulative probabilities; for a large rate from the nearby normal distribution."""
    import tensorflow as tf

    small = tf.minimum(rate, _LARGE_RATE)
    exact = _by_sums(numbers, tf.exp(-small), lambda k: small / k)
    near = tf.floor(rate + tf.sqrt(rate) * tf.math.ndtri(numbers) + 0.5)
    return tf.where(rate < _LARGE_RATE, exact, tf.maximum(near, 0.0))


def _binomial(numbers: Any, counts: Any, probs: Any) -> Any:
    """Draw as `_poisson` does, for the rarer of the two outcomes."""
    import tensorflow as tf

    rare = tf.minimum(probs, 1.0 - probs)
    mean = counts * rare
    odds = rare / (1.0 - rare)
    exact = _by_sums(
        numbers, tf.where(mean < _LARGE_RATE, (1.0 - rare) ** counts, 1.0), lambda k: (counts - k + 1.0) / k * odds
    )
    near = tf.clip_by_value(tf.floor(mean + tf.sqrt(mean * (1.0 - rare)) * tf.math.ndtri(numbers) + 0.5), 0.0, counts)
    drawn = tf.minimum(tf.where(mean < _LARGE_RATE, exact, near), counts)
    return tf.where(probs > 0.5, counts - drawn, drawn)


def _by_sums(numbers: Any, first: Any, ratio: Any) -> Any:
    """Return the smallest integer whose cumulative probability reaches a uniform number: `first`, then times `ratio(k)`."""
    import tensorflow as tf

    numbers = tf.stop_gradient(numbers)
    term = tf.stop_gradient(first + tf.zeros_like(numbers))

    def add(k: Any, drawn: Any, term: Any, total: Any) -> Any:
        drawn += tf.cast(numbers > total, numbers.dtype)
        term *= tf.maximum(tf.stop_gradient(ratio(k)), 0.0)
        return k + 1.0, drawn, term, total + term

    start = (tf.ones([], numbers.dtype), tf.zeros_like(numbers), term, term)
    shapes = (tf.TensorShape([]), *(tensor.shape for tensor in start[1:]))
    return tf.while_loop(lambda k, *_: k <= _TERMS, add, start, shape_invariants=shapes)[1]


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
        import tensorflow as tf

        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        key = (id(owner), id(graph))
        if key not in self._made:
            self._made[key] = make(), graph  # with the graph, so that no other one gets its number
        return self._made[key][0]

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
        import tensorflow as tf

        if self._part is None:
            return self.of_batch, tf.constant(place, tf.int64)
        given, shift = self._part
        keys, are_rows = self._once(given, lambda: self._found(given))
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
        return [t for t in tensors if t.dtype == value.dtype and t.shape[1:].is_compatible_with(value.shape[1:])]

    def _found(self, value: Any) -> tuple[Any, Any]:
        """Return the key of each row of a value, and whether all of them are rows of the batch.

        The key is of the row alone: which other rows a replica has must not matter. A row that is there more often than in the
        batch, which was put together with itself, has another key each time.
        """
        import tensorflow as tf

        own = keys_of([value])
        if any(value is tensor for tensor in self._tensors):
            return own, tf.constant(True)
        wide = tf.cast(own, tf.int64)
        earlier = _earlier(wide)
        are_rows, copy = tf.constant(False), tf.zeros_like(earlier)
        for tensor in self._like(value):
            batch = tf.sort(tf.cast(keys_of([tensor]), tf.int64))
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
    """Return a key of each row: of its part of all tensors that have as many rows as the first.

    The hash is multilinear (Carter and Wegman 1979: two rows have the same with a probability of about 2**-32): few operations,
    because each replica makes them in each step.
    """
    import tensorflow as tf

    number = tf.shape(tensors[0])[0]
    keys = tf.zeros([number], tf.int32)
    for place, tensor in enumerate(tensors):
        if tensor.shape.rank is None or (tensor.shape[0] is not None and tensor.shape[0] != tensors[0].shape[0]):
            continue
        rows = tf.reshape(tensor, [number, -1])
        is_whole = tensor.dtype.is_integer or tensor.dtype.is_bool
        bits = tf.cast(rows, tf.int32) if is_whole else tf.bitcast(tf.cast(rows, tf.float32), tf.int32)
        keys += tf.reduce_sum(bits * _weights_of_bytes(tensor, tf.shape(bits)[1], place), axis=1)
    return mixed(tf.cast(keys, tf.uint32))


def _weights_of_bytes(tensor: Any, columns: Any, place: int) -> Any:
    """Return an odd number for each column of an input: a constant, where its shape is known."""
    import tensorflow as tf

    if tensor.shape[1:].is_fully_defined():
        generator = np.random.default_rng(_NEXT_COPY + place)
        return tf.constant(generator.integers(-(1 << 31), 1 << 31, tensor.shape[1:].num_elements()) | 1, tf.int32)
    numbers = mixed(tf.cast(tf.range(columns), tf.uint32) + tf.constant(_NEXT_COPY + place, tf.uint32))
    return tf.bitwise.bitwise_or(tf.cast(numbers, tf.int32), 1)


def mixed(bits: Any) -> Any:
    """Apply MurmurHash3's 32-bit finalizer (Appleby, public domain): every input bit affects every output bit."""
    import tensorflow as tf

    bits = bits ^ tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32))
    bits = bits * tf.constant(0x85EBCA6B, tf.uint32)
    bits = bits ^ tf.bitwise.right_shift(bits, tf.constant(13, tf.uint32))
    bits = bits * tf.constant(0xC2B2AE35, tf.uint32)
    return bits ^ tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32))
