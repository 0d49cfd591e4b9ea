"""Metrics that are functions: by row they are those of one device, and one number for a batch is warned of."""

from __future__ import annotations

import math

import pytest

from tests.core.conftest import OnHosts
from tests.core.keras_model import metric_functions

WARNING = (
    "A metric's function must return one value for each example, so that examples can be counted over all replicas. "
    "Received: metric='{}', shape={}. It is treated as the mean over the replica's examples. A root or a correlation over "
    "examples then differs from one device. Return the values, or pass a keras.metrics.Metric that adds up what it needs and "
    "computes the number in result(), as keras.metrics.RootMeanSquaredError does."
)


def test_a_metric_function_that_gives_one_number_is_warned_of_once_and_the_others_are_those_of_one_device(
    on_hosts: OnHosts,
) -> None:
    ((expected, _),) = on_hosts("1x1", _alone)
    ((seen, said),) = on_hosts("1x3", _distributed)
    of_numbers = {"correlation": "(2,)", "rmse": "()", "stepped rmse": "()"}
    assert sorted(said) == [WARNING.format(name, shape) for name, shape in of_numbers.items()]
    for name, value in seen.items():
        if "rmse" not in name and "correlation" not in name:
            assert value == pytest.approx(expected[name], rel=1e-5), name
    assert all(math.isfinite(seen[name]) for name in ("rmse", "correlation", "in fit rmse", "stepped rmse"))


def test_a_mean_that_keras_takes_over_the_rows_is_not_warned_of(on_hosts: OnHosts) -> None:
    assert on_hosts("1x2", metric_functions.of_one_output) == [[]]


def _alone():  # type: ignore[no-untyped-def]
    return metric_functions.counted(alone=True)


def _distributed():  # type: ignore[no-untyped-def]
    return metric_functions.counted(alone=False)
