"""Define the certificate: what the first steps of a verified run were, in one file of JSON and arrays without pickle.

The file is an `.npz` with these members, for S certified steps, T tensors with gradients and `NUM` projections:

    about          JSON: format, program, topology, replicas, seed, versions, optimizer, reduced, tensors, inputs, left_out
    projections    [S, T, NUM]: of each gradient, summed over the replicas; NaN where it is not certified
    norms, noise   [S, T]: its norm, and the norm that rounding alone may have, as the verification measured it
    start          [T, NUM]: projections of the variables before the first step; start_norms [T]: their norms
    examples       [S, 3]: the fingerprint of the global batch; [0, 3] where it is not certified
    losses         [S, 2]: the loss in Keras's logs, and its noise; NaN where there is none

Fingerprints are computed with NumPy and, equal to rounding, inside a TensorFlow step. A gradient is seen as a matrix G of its
last axis by all others. Its fingerprint is `NUM` numbers u'Gv, where u and v hold random signs. Their mean square is the
squared norm of G, so a difference D of two gradients moves them by about the norm of D. They are linear: the replicas'
fingerprints add up to that of the summed gradient.
"""

from __future__ import annotations

import functools
import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpudist_core.errors import UsageError

FORMAT = "gpudist.certificate/1"
STEPS = 5
"""A certificate has at most so many steps."""
UNITS = {"float32": 1.0, "tfloat32": 2.0**13, "bfloat16": 2.0**16}
"""Units in the last place of float32 that one has of a precision in which devices multiply."""
FACTOR = 10.0
"""A difference may be so many times the noise. `gpudist verify` has the same factor."""
MOST = 0.5
"""The largest tolerance, as a part of the norm: a gradient that is twice too large is seen in every precision."""
SAME = 80 * 2.0**-23
"""Numbers that no step has changed may differ by this part of their norm: initializers round differently on GPUs."""
_ARRAYS = ("projections", "norms", "noise", "start", "start_norms", "examples", "losses")


@dataclass(frozen=True)
class Tensor:
    """Name a variable with a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Input:
    """Name an argument of `Strategy.run` that holds examples.

    Attributes:
        position: Its place among the tensors with axes of the flattened arguments.
        shape: The shape of one example.
    """

    position: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Certificate:
    """Hold the first steps of a verified run. The module describes the arrays.

    Attributes:
        program: The program's name.
        topology: The verified topology.
        replicas: Its number of replicas.
        seed: The seed of the verification.
        versions: The versions of gpudist, TensorFlow and Keras.
        optimizer: The name of the optimizer.
        reduced: Whether the program gives the optimizer gradients that are already summed over the replicas.
        tensors: The variables with gradients, in the order in which the optimizer gets them.
        inputs: The arguments that hold the examples.
        left_out: What is not certified, and why.
    """

    program: str
    topology: str
    replicas: int
    seed: int
    versions: dict[str, str]
    optimizer: str
    reduced: bool
    tensors: tuple[Tensor, ...]
    inputs: tuple[Input, ...]
    left_out: tuple[str, ...]
    projections: Floats = field(repr=False)
    norms: Floats = field(repr=False)
    noise: Floats = field(repr=False)
    start: Floats = field(repr=False)
    start_norms: Floats = field(repr=False)
    examples: Integers = field(repr=False)
    losses: Floats = field(repr=False)

    @property
    def steps(self) -> int:
        """Return the number of certified steps."""
        return len(self.projections)

    def tolerances(self, step: int, precision: str) -> Floats:
        """Return how far a projection of each gradient may be from the certified one.

        Rounding grows with the unit in the last place of what devices multiply, so the measured noise is scaled by it.

        Args:
            step: The step, counted from 0.
            precision: A key of `UNITS`.

        Returns:
            A number for each tensor.
        """
        return np.asarray(np.minimum(FACTOR * UNITS[precision] * self.noise[step], MOST * self.norms[step]))

    def loss_tolerance(self, step: int, precision: str) -> float:
        """Return how far a loss may be from the certified one."""
        loss, noise = self.losses[step]
        return min(FACTOR * UNITS[precision] * float(noise), MOST * abs(float(loss)))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file. It stands there as a whole or not at all."""
        whole = asdict(self)
        arrays = {name: whole.pop(name) for name in _ARRAYS}
        partial = Path(f"{os.fspath(path)}.partial")
        with partial.open("wb") as file:  # by a file, as NumPy adds a suffix to a name
            np.savez(file, about=np.array(json.dumps({"format": FORMAT, **whole}).encode()), **arrays)
        partial.replace(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a file.

        Args:
            path: Written by `gpudist verify --certificate`.

        Returns:
            The certificate.

        Raises:
            UsageError: If it is not there, not a certificate, or damaged.
        """
        try:
            # NumPy leaves a damaged file open that it has opened itself.
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                header: dict[str, Any] = json.loads(file["about"].item())
                certificate = _from(cls, header, {name: file[name] for name in _ARRAYS})
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise UsageError(
                f"A certificate must be a file of the format {FORMAT}, as it was written",
                f"It cannot be read ({why}). Copy it again, or write it anew with `gpudist verify PROGRAM --certificate FILE`.",
                certificate=os.fspath(path),
            ) from error
        return certificate


def _from(cls: type[Certificate], header: dict[str, Any], arrays: dict[str, Any]) -> Certificate:
    """Return the certificate of a file's members; raise ValueError where they do not fit each other."""
    if header.pop("format", None) != FORMAT:
        raise ValueError("another format")
    names = {member.name for member in fields(cls)}
    header = {name: value for name, value in header.items() if name in names}
    header["tensors"] = tuple(Tensor(tensor["name"], tuple(tensor["shape"]), tensor["dtype"]) for tensor in header["tensors"])
    header["inputs"] = tuple(Input(place["position"], tuple(place["shape"]), place["dtype"]) for place in header["inputs"])
    header["left_out"] = tuple(header["left_out"])
    certificate = cls(**header, **arrays)
    steps, tensors = certificate.projections.shape[0], len(certificate.tensors)
    shapes = ((steps, tensors, NUM), (steps, tensors), (steps, tensors), (tensors, NUM), (tensors,))
    rest = ((steps if certificate.inputs else 0, 3), (steps, 2))
    if not steps or tuple(arrays[name].shape for name in _ARRAYS) != (*shapes, *rest):
        raise ValueError("its arrays do not fit its tensors")
    return certificate


class CertificateMismatch(RuntimeError):
    """Report the step in which a run leaves its certificate.

    Outside of `fit`, TensorFlow reports it as an error of its own, with this text in it, where a compiled step raises it.

    Args:
        step: The step, counted from 0.
        stage: `start`, `examples`, `gradient` or `loss`.
        tensor: What differs: a variable, an input or a loss.
        value: What this run has.
        certified: What the certificate has.
        tolerance: How far they may be apart.
        advice: What to look at.
    """

    def __init__(
        self, step: int, stage: str, tensor: str, value: object, certified: object, tolerance: float, advice: str
    ) -> None:
        self.step, self.stage, self.tensor = step, stage, tensor
        self.value, self.certified, self.tolerance = value, certified, tolerance
        super().__init__(
            f"Step {step} differs from the certificate. Received: stage={stage!r}, tensor={tensor!r}, value={value}, "
            f"certified={certified}, tolerance={tolerance:.3g}. {advice}"
        )


NUM = 8
"""The number of projections of each tensor."""
START = -1
"""Stands for the step in the signs for variables before the first step."""
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_MIX = (-4658895280553007687, -7723592293110705685)  # SplitMix64's multipliers
_COLUMNS, _BITS = 1, np.arange(3, 3 + 7 * NUM, 7)
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def seed_of(name: str) -> int:
    """Return the seed of a tensor's random signs."""
    return zlib.crc32(name.encode())


def project(gradient: NDArray[Any], name: str, step: int) -> Floats:
    """Return the projections of a whole gradient.

    Args:
        gradient: Its values, in the variable's shape.
        name: The variable's name, which seeds the signs.
        step: The step, counted from 0, which seeds them, too.

    Returns:
        `NUM` numbers.
    """
    rows = gradient.reshape(-1, _width(gradient.shape)).astype(np.float64)
    signs = _signs(_numbers(np.arange(len(rows)), seed_of(name), step))
    return np.asarray((rows @ _column_signs(rows.shape[1]) * signs).sum(axis=0))


def examples_of(inputs: Sequence[NDArray[Any]]) -> Integers:
    """Return the fingerprint of a batch, in which the order of the examples does not matter.

    Args:
        inputs: The arrays that hold the examples, each with as many rows.

    Returns:
        The number of examples, the sum of their keys, and that of the squares of the keys, modulo 2**64. Parts of a batch add
        up to the batch.
    """
    keys = np.zeros(len(inputs[0]), np.int64)
    for place, array in enumerate(inputs):
        bits = _bits(array.reshape(len(array), math.prod(array.shape[1:])))
        keys += (bits * _weights(bits.shape[1], place)).sum(axis=1)
    return np.array([len(keys), keys.sum(), (keys * keys).sum()], np.int64)


def projected(gradients: Sequence[Any], names: Sequence[str], step: Any) -> Any:
    """Return the projections of a replica's gradients, as operations of a step: a product for each tensor, then few for all.

    Args:
        gradients: Tensors of floats, or `tf.IndexedSlices`.
        names: The names of their variables.
        step: The number of the step: an int64 scalar tensor.

    Returns:
        A float64 tensor of shape [tensors, NUM].
    """
    import tensorflow as tf

    products, row_numbers = [], []
    for gradient in gradients:
        values = getattr(gradient, "values", gradient)
        width = _width(values.shape)
        wide = values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
        signs = tf.constant(_column_signs(width), wide.dtype)
        products.append(tf.cast(tf.matmul(tf.reshape(wide, [-1, width]), signs), tf.float64))
        if isinstance(gradient, tf.IndexedSlices):
            each = math.prod(values.shape[1:-1])
            first = tf.cast(gradient.indices, tf.int64)[:, None] * each
            row_numbers.append(tf.reshape(first + tf.range(each, dtype=tf.int64), [-1]))
        else:
            row_numbers.append(tf.range(tf.shape(products[-1], tf.int64)[0]))
    ends = tf.cumsum(tf.stack([tf.shape(product, tf.int64)[0] for product in products]))
    seeds = tf.constant([seed_of(name) for name in names], tf.int64)
    # searchsorted, as tf.repeat makes a mask of all rows for each tensor.
    owners = tf.searchsorted(ends, tf.range(ends[-1]), side="right")
    signs = _signs(_numbers(tf.concat(row_numbers, 0), tf.gather(seeds, owners), step))
    # The number, as a sparse gradient may have no rows at its end.
    return tf.math.unsorted_segment_sum(tf.concat(products, 0) * signs, owners, len(products))


def examples_in(inputs: Sequence[Any]) -> Any:
    """Return the same as `examples_of`, for tensors of a step.

    Args:
        inputs: Dense tensors, whose shapes are known but for the number of rows.

    Returns:
        An int64 tensor of shape [3].
    """
    import tensorflow as tf

    rows = tf.shape(inputs[0])[0]
    keys = tf.zeros([rows], tf.int64)
    for place, tensor in enumerate(inputs):
        width = math.prod(tensor.shape[1:])
        bits = _bits_in(tf.reshape(tensor, [rows, width]))
        keys += tf.reduce_sum(bits * tf.constant(_weights(width, place)), axis=1)
    return tf.stack([tf.cast(rows, tf.int64), tf.reduce_sum(keys), tf.reduce_sum(keys * keys)])


def _width(shape: Sequence[int]) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _bits(rows: NDArray[Any]) -> Integers:
    if rows.dtype.kind != "f":
        return rows.astype(np.int64)
    if rows.dtype == np.float64:
        return np.ascontiguousarray(rows).view(np.int64)
    return np.ascontiguousarray(rows.astype(np.float32)).view(np.int32).astype(np.int64)


def _bits_in(rows: Any) -> Any:
    import tensorflow as tf

    if not rows.dtype.is_floating:
        return tf.cast(rows, tf.int64)
    if rows.dtype == tf.float64:
        return tf.bitcast(rows, tf.int64)
    return tf.cast(tf.bitcast(tf.cast(rows, tf.float32), tf.int32), tf.int64)


@functools.lru_cache(maxsize=8)
def _weights(width: int, place: int) -> Integers:
    """Return an odd number for each element of an example (multilinear hashing: Carter and Wegman 1979)."""
    return np.asarray(_numbers(np.arange(width), place, 0) | 1)


@functools.lru_cache(maxsize=64)
def _column_signs(width: int) -> Floats:
    return np.asarray(_signs(_numbers(np.arange(width), _COLUMNS, -1)))


def _numbers(places: Any, seed: Any, step: Any) -> Any:
    """Return random int64 numbers: SplitMix64 (Steele, Lea and Flood 2014, public domain) of place, seed and step."""
    if isinstance(places, np.ndarray):
        seed, step = np.array([seed]), np.array([step])  # arrays wrap around, where Python's integers grow
    return _mixed(places * _GOLDEN + (seed * _MIX[0] + step * _MIX[1]))


def _mixed(values: Any) -> Any:
    shift = _shift_of(values)
    values = (values ^ shift(values, 30)) * _MIX[0]
    values = (values ^ shift(values, 27)) * _MIX[1]
    return values ^ shift(values, 31)


def _signs(numbers: Any) -> Any:
    """Return `NUM` signs for each number, from bits of its own."""
    bits = _shift_of(numbers)(numbers[:, None], _BITS) & 1
    if isinstance(bits, np.ndarray):
        return 1.0 - 2.0 * bits.astype(np.float64)
    import tensorflow as tf

    return 1.0 - 2.0 * tf.cast(bits, tf.float64)


def _shift_of(values: Any) -> Callable[[Any, Any], Any]:
    """Return the arithmetic shift to the right, which TensorFlow's tensors have as no operator."""
    if isinstance(values, np.ndarray):
        return np.right_shift
    import tensorflow as tf

    return lambda tensor, by: tf.bitwise.right_shift(tensor, tf.constant(by, tf.int64))
