"""Keras's own fit, evaluate and predict give what Keras alone gives on one device, whatever the topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emulate.cluster import Cluster, Preload
from tests.core.conftest import OnHosts
from tests.core.keras_model import behaviour, training

SUMS = 2e-6  # of a tensor's scale: float32, added up in another order over about ten steps
# Adam divides by what may be as small as the rounding; of float16 there are ten bits.
ROUNDED = {
    "accumulated": 3e-5,
    "accumulated_by_own_steps": 3e-5,
    "averaged": 3e-5,
    "made_in_build": 1e-5,
    "half_precision": 2e-3,
    "half_precision_accumulated": 2e-3,
}

# What replicas of one host, or hosts, have to do with each other in these they have in the others too, or on one host.
ALIKE_ON_ONE_HOST = {"eagerly", "first_batch", "half_precision", "of_steps", "own_aggregations"}
ALIKE_ON_HOSTS = {
    "accumulated_by_own_steps",
    "ascending_first",
    "averaged",
    "by_row",
    "clipped",
    "clipped_by_hand",
    "drawing_for_weights",
    "few_rows_of_pipelines",
    "half_precision_accumulated",
    "keeping_in_16_bits",
    "made_in_build",
    "masked",
    "own_compute_loss",
    "own_optimizers",
    "positions",
    "predicted_first",
    "saved_between_updates",
    "several_outputs",
    "subclassed",
    "two_accumulating_optimizers",
    "two_optimizers",
    "updated_by_hand",
}
CORE = {"all_of_it", "accumulated", "own_losses", "own_train_step", "callbacks", "few_rows"}
LOSES_SUMS = (
    "A model that Keras saves in the middle of an accumulation loses the batches without an update: hosts cannot add their "
    "sums while one of them saves. To continue exactly use gd.Checkpoints."
)
Expected = Callable[[list[str]], dict[str, Any]]
LIMIT_SECONDS = 500.0  # for a busy machine; a quiet one takes a twentieth


@pytest.fixture(scope="module")
def expected(preload: Preload) -> Expected:
    """What Keras alone gives on one device, trained once for each name."""
    results: dict[str, Any] = {}

    def train(names: list[str]) -> dict[str, Any]:
        if missing := [name for name in names if name not in results]:
            with Cluster("1x1", preload=preload, timeout=LIMIT_SECONDS) as cluster:
                results.update(cluster.run(training.train_all, False, missing)[0])
        return results

    return train


@pytest.mark.parametrize(
    ("topology", "left_out"),
    [
        pytest.param("1x3", ALIKE_ON_ONE_HOST, marks=pytest.mark.slow),
        ("1x3", None),
        ("2x1", ALIKE_ON_HOSTS),
        pytest.param("2x2", {"saved_between_updates"}, marks=pytest.mark.slow),  # hosts lose their sums: docs/limits.md
    ],
    ids=["uneven replicas", "uneven replicas, what hosts leave out", "hosts", "hosts of several replicas"],
)
def test_fit_is_that_of_one_device(on_hosts: OnHosts, expected: Expected, topology: str, left_out: set[str] | None) -> None:
    chosen = ALIKE_ON_HOSTS | CORE if left_out is None else training.CASES.keys() - left_out
    check(on_hosts, expected, topology, [name for name in training.CASES if name in chosen])


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        ("1x1", ["all_of_it", "own_train_step", "two_optimizers", "accumulated", "on_batch"]),
        ("2x2", ["all_of_it", "accumulated"]),
        pytest.param("1x4", ["all_of_it", "accumulated"], marks=pytest.mark.slow),
    ],
)
def test_other_shapes_are_served_alike(on_hosts: OnHosts, expected: Expected, topology: str, names: list[str]) -> None:
    check(on_hosts, expected, topology, names)


def test_hosts_that_save_a_model_between_updates_say_that_they_lose_sums_and_go_on_as_keras_does_with_the_file(
    on_hosts: OnHosts,
) -> None:
    for said, seen in on_hosts("2x1", behaviour.saved_between_updates):
        assert said == [LOSES_SUMS]
        alike(seen["plain"], seen["history"], SUMS, "history")
        alike(seen["plain weights"]["weights"], seen["weights"], SUMS, "weights")


def check(on_hosts: OnHosts, expected: Expected, topology: str, names: list[str]) -> None:
    right = expected(names)
    for seen in on_hosts(topology, training.train_all, True, names, timeout=LIMIT_SECONDS):
        for name in names:
            alike(right[name], seen[name], ROUNDED.get(name, SUMS), name)


def alike(right: Any, seen: Any, rounded: float, where: str) -> None:
    """Whether two nested results are the same, numbers but for rounding in parts of the largest of their tensor."""
    if isinstance(right, dict):
        assert set(right) == set(seen), where
        for name in right:
            alike(right[name], seen[name], rounded, f"{where}/{name}")
    elif isinstance(right, (list, tuple)):
        assert len(right) == len(seen), where
        for place, (one, other) in enumerate(zip(right, seen, strict=True)):
            alike(one, other, rounded, f"{where}/{place}")
    elif isinstance(right, str):
        assert right == seen, where
    else:
        scale = float(np.max(np.abs(right), initial=1e-3))
        np.testing.assert_allclose(seen, right, rtol=0, atol=rounded * scale, err_msg=where)
