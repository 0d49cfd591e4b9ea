"""Keras's own fit, evaluate and predict give what Keras alone gives on one device, whatever the topology."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.conftest import OnHosts
from tests.core.keras_model import training


@pytest.fixture(scope="module")
def expected(loaded: Any) -> dict[str, Any]:
    from emulate.cluster import Cluster

    with Cluster("1x1", preload=loaded, timeout=120) as cluster:
        (results,) = cluster.run(training.train_all, False)
    return dict(results)


@pytest.mark.parametrize("topology", ["1x3", "2x2"])
def test_fit_is_that_of_one_device(on_hosts: OnHosts, expected: dict[str, Any], topology: str) -> None:
    for seen in on_hosts(topology, training.train_all, True):
        for name, right in expected.items():
            alike(right, seen[name], name)


def test_one_replica_is_served_alike(on_hosts: OnHosts, expected: dict[str, Any]) -> None:
    names = ["all_of_it", "own_train_step", "two_optimizers", "on_batch"]
    (seen,) = on_hosts("1x1", training.train_all, True, names)
    for name in names:
        alike(expected[name], seen[name], name)


def alike(right: Any, seen: Any, where: str) -> None:
    """Whether two nested results are the same, numbers within rounding."""
    if isinstance(right, dict):
        assert set(right) == set(seen), where
        for name in right:
            alike(right[name], seen[name], f"{where}/{name}")
    elif isinstance(right, (list, tuple)):
        assert len(right) == len(seen), where
        for place, (one, other) in enumerate(zip(right, seen, strict=True)):
            alike(one, other, f"{where}/{place}")
    elif isinstance(right, str):
        assert right == seen, where
    else:
        np.testing.assert_allclose(seen, right, rtol=3e-5, atol=3e-5, err_msg=where)
