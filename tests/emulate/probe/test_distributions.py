"""Draws that are made of random bits have the mean, the spread and the range of their distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate import Cluster
from emulate.cluster import Preload

NUMBER = 20_000
KINDS: dict[str, tuple[str, dict[str, Any], float, float]] = {
    # name: distribution, what the operation is given, mean, variance
    "uniform": ("uniform", {}, 0.5, 1 / 12),
    "normal": ("normal", {}, 0.0, 1.0),
    "truncated": ("truncated", {}, 0.0, 0.7737),
    "integer": ("integer", {"minval": 3, "maxval": 7}, 4.5, 1.25),
    "gamma": ("gamma", {"alpha": 2.5}, 2.5, 2.5),
    "gamma below 1": ("gamma", {"alpha": 0.3}, 0.3, 0.3),
    "poisson": ("poisson", {"rate": 3.0}, 3.0, 3.0),
    "poisson of a large rate": ("poisson", {"lam": 80.0}, 80.0, 80.0),
    "poisson of nothing": ("poisson", {"rate": 0.0}, 0.0, 0.0),
    "binomial": ("binomial", {"counts": 10.0, "probs": 0.3}, 3.0, 2.1),
    "binomial, mostly": ("binomial", {"counts": 10.0, "probs": 0.9}, 9.0, 0.9),
    "binomial, always": ("binomial", {"counts": 10.0, "probs": 1.0}, 10.0, 0.0),
    "binomial of many": ("binomial", {"counts": 400.0, "probs": 0.5}, 200.0, 100.0),
}


def drawn() -> dict[str, Any]:
    import tensorflow as tf

    from emulate.interventions import distributions

    made = {}
    for name, (kind, given, _, _) in KINDS.items():
        columns = distributions.COLUMNS.get(kind)
        bits = np.random.default_rng(1).integers(0, 1 << 32, [NUMBER, *([columns] if columns else [])]).astype("uint32")
        made[name] = distributions.draws_made_of(
            tf.constant(bits), kind, given, tf.int64 if kind == "integer" else tf.float32
        ).numpy()
    return made


def slope() -> tuple[float, float]:
    """The mean of the derivatives of gamma's draws by alpha, of which the mean draw is 1, and of those below 1."""
    import tensorflow as tf

    from emulate.interventions import distributions

    alpha = tf.constant([0.4, 3.0])
    bits = np.random.default_rng(2).integers(0, 1 << 32, [NUMBER, 2, distributions.COLUMNS["gamma"]]).astype("uint32")
    with tf.GradientTape() as tape:
        tape.watch(alpha)
        mean = tf.reduce_mean(distributions.draws_made_of(tf.constant(bits), "gamma", {"alpha": alpha}, tf.float32), 0)
    small, large = tape.gradient(mean, alpha).numpy()
    return float(small), float(large)


@pytest.fixture(scope="module")
def host(preload: Preload) -> Any:
    with Cluster("1x1", preload=preload) as cluster:
        yield lambda function: cluster.run(function)[0]


@pytest.fixture(scope="module")
def made(host: Any) -> dict[str, Any]:
    return dict(host(drawn))


@pytest.mark.parametrize("name", KINDS)
def test_draws_have_the_moments_of_their_distribution(made: dict[str, Any], name: str) -> None:
    _, _, mean, variance = KINDS[name]
    values = made[name].astype("float64")
    assert np.isfinite(values).all()
    assert abs(values.mean() - mean) <= 5 * np.sqrt(variance / NUMBER)
    assert abs(values.var() - variance) <= 0.06 * variance


@pytest.mark.parametrize("name", [name for name, (kind, *_) in KINDS.items() if kind in ("integer", "poisson", "binomial")])
def test_draws_of_whole_numbers_are_whole_and_in_range(made: dict[str, Any], name: str) -> None:
    _, given, _, _ = KINDS[name]
    values = made[name]
    assert (values == np.floor(values)).all()
    assert values.min() >= given.get("minval", 0)
    assert values.max() <= given.get("maxval", given.get("counts", 1000))


def test_gamma_has_a_gradient_by_its_shape_as_tensorflows_has(host: Any) -> None:
    small, large = host(slope)
    assert 0.8 < small < 1.2
    assert 0.9 < large < 1.1


def of_parts() -> dict[str, float]:
    """By distribution how far the draws of a few rows in double precision are from the same rows' among all."""
    import tensorflow as tf

    from emulate.interventions import distributions

    apart = {}
    for name, (kind, given, _, _) in KINDS.items():
        columns = distributions.COLUMNS.get(kind)
        bits = np.random.default_rng(1).integers(0, 1 << 32, [800, *([columns] if columns else [])]).astype("uint32")
        dtype = tf.int64 if kind == "integer" else tf.float64
        whole = distributions.draws_made_of(tf.constant(bits), kind, given, dtype).numpy()
        slices = [slice(start, start + 7) for start in range(0, 793, 53)]  # they begin in each place of a vector
        parts = [distributions.draws_made_of(tf.constant(bits[few]), kind, given, dtype).numpy() for few in slices]
        apart[name] = max(float(np.abs(part - whole[few]).max()) for part, few in zip(parts, slices, strict=True))
    return apart


def test_draws_in_double_precision_do_not_depend_on_the_rows_beside_them(preload: Preload) -> None:
    """In 32 bits the last one does: rows are computed several at a time, and what is left over is computed otherwise."""
    with Cluster("1x1", preload=preload) as cluster:
        (apart,) = cluster.run(of_parts)
    assert max(apart.values()) < 1e-12
