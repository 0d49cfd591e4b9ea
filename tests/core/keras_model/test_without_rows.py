"""A replica without rows computes with every layer of Keras, and the model is that of one device."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.conftest import OnHosts
from tests.core.keras_model import without_rows

# On hosts, as TensorFlow may end a process.
QUICK = ("images", "waves")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in without_rows.SHAPES]
)
@pytest.mark.parametrize(
    ("topology", "way", "rows"),
    [
        ("1x2", "fit", 1),
        pytest.param("1x2", "step", 1, marks=pytest.mark.slow),
        pytest.param("1x3", "fit", 9, marks=pytest.mark.slow),
        pytest.param("1x3", "step", 9, marks=pytest.mark.slow),
    ],
    ids=["fit, none known", "step, none known", "fit, unknown", "step, unknown"],
)
def test_every_layer_is_trained_as_on_one_device_where_a_replica_has_no_rows(
    on_hosts: OnHosts, kind: str, topology: str, way: str, rows: int
) -> None:
    (expected,) = on_hosts("1x1", without_rows.trained, kind, "alone", rows)
    (seen,) = on_hosts(topology, without_rows.trained, kind, way, rows)
    assert len(seen) == len(expected)
    for one, right in zip(seen, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-5 * max(1e-2, np.max(np.abs(right), initial=0)))
