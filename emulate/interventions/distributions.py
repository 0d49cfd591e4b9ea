"""Make draws of a distribution of random bits, element by element, in place of TensorFlow's draws."""

from __future__ import annotations

from typing import Any

from emulate.imports import tf

_ROUNDS = 6  # of gamma's rejection, each of which is accepted with a probability of 0.95 or more
_TERMS = 96  # of a sum of probabilities whose mean is below _LARGE
_LARGE_RATE = 30.0

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
    if distribution == "integer":
        low, high = (tf.cast(given[name], tf.int64) for name in ("minval", "maxval"))
        return tf.cast(low + tf.math.floormod(tf.cast(bits, tf.int64), high - low), dtype)
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
    return tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32) * (1.0 / (1 << 24))


def _inside(numbers: Any) -> Any:
    """Scale the numbers so that none is 0 or 1."""
    return numbers * (1.0 - 2e-7) + 1e-7


def _gamma(numbers: Any, alpha: Any) -> Any:
    """Draw by rejection (Marsaglia and Tsang 2000), a few rounds at once; differentiable in alpha, as in TensorFlow."""
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
    small = tf.minimum(rate, _LARGE_RATE)
    exact = _by_sums(numbers, tf.exp(-small), lambda k: small / k)
    near = tf.floor(rate + tf.sqrt(rate) * tf.math.ndtri(numbers) + 0.5)
    return tf.where(rate < _LARGE_RATE, exact, tf.maximum(near, 0.0))


def _binomial(numbers: Any, counts: Any, probs: Any) -> Any:
    """Draw as `_poisson` does, for the rarer of the two outcomes."""
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
    numbers = tf.stop_gradient(numbers)
    term = tf.stop_gradient(first + tf.zeros_like(numbers))

    def add(k: Any, drawn: Any, term: Any, total: Any) -> Any:
        drawn += tf.cast(numbers > total, numbers.dtype)
        term *= tf.maximum(tf.stop_gradient(ratio(k)), 0.0)
        return k + 1.0, drawn, term, total + term

    start = (tf.ones([], numbers.dtype), tf.zeros_like(numbers), term, term)
    shapes = (tf.TensorShape([]), *(tensor.shape for tensor in start[1:]))
    return tf.while_loop(lambda k, *_: k <= _TERMS, add, start, shape_invariants=shapes)[1]
