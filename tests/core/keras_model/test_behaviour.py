"""What fit does beside the numbers: draws, damage, logs, the progress bar, ends by an exception, arrays that go on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.cluster import Cluster, Preload
from tests.core.conftest import OnHosts
from tests.core.keras_model import behaviour
from tests.core.keras_model.run import Run, strategy


@pytest.fixture(scope="module")
def seen(preload: Preload, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Cluster("1x2", preload=preload, timeout=300) as cluster:
        return dict(cluster.run(behaviour.seen_all, str(tmp_path_factory.mktemp("seen")))[0])


def test_each_replica_draws_a_mask_of_its_own(seen: dict[str, Any]) -> None:
    one, other = seen["masks"]
    assert {*np.unique(one), *np.unique(other)} == {0.0, 2.0}
    assert 16 < np.sum(one != other) < 48


def test_a_gradient_that_is_no_number_on_one_replica_damages_all_copies_alike(seen: dict[str, Any]) -> None:
    for copies in seen["damaged"]["copies"]:
        np.testing.assert_array_equal(copies[0], copies[1])
    assert any(np.isnan(copies[0]).any() for copies in seen["damaged"]["copies"])
    assert np.isnan(seen["damaged"]["losses"]).all()
    assert len(seen["damaged"]["losses"]) == 1


def test_the_progress_bar_ends_with_what_history_has(seen: dict[str, Any]) -> None:
    text, losses = seen["drawn_bar"]
    last = [re.sub(r"\x1b\[\d+m", "", line.rpartition("\r")[2]) for line in text.split("\n") if "4/4" in line]
    assert [line.split(" loss: ")[1].split()[0] for line in last] == [f"{loss:.4f}" for loss in losses]


def test_logs_are_a_dict_of_numbers_of_their_step(seen: dict[str, Any]) -> None:
    found = seen["logs_kept"]
    assert found["equal"]
    assert found["kinds"] == {"float"}
    assert found["taken"][0] == found["copies"][0]["accuracy"]
    assert found["taken"][1:] == [3.0, {"loss": found["losses"][2], "more": 3.0, "x": 1.0}, ["loss", "more"]]
    assert len({*found["losses"]}) == 3


def test_an_exception_of_a_callback_leaves_fit_and_its_folder_to_the_next(seen: dict[str, Any]) -> None:
    assert seen["ended_by_error"] == {
        "raised": "'the disk of the log is full'",
        "files": ["step-00000004"],  # an epoch is saved when all callbacks have done what they do at its end
        "signal": True,
        "rest": 3,
        "next": 4,
        "next of the other": 4,
    }


def test_arrays_without_a_seed_go_on_in_the_order_that_was_drawn(
    seen: dict[str, Any], on_hosts: OnHosts, tmp_path: Path
) -> None:
    def on_host(folder: str) -> Any:
        return behaviour.resumed(Run(strategy()), folder)

    for result in [seen["resumed"], *on_hosts("2x1", on_host, str(tmp_path / "run"))]:
        # The epoch that was cut, with what it had counted, and the last one.
        assert np.array_equal(result["counts"], np.ones((2, 20)))


def test_hosts_without_a_common_seed_shuffle_alike(on_hosts: OnHosts) -> None:
    def on_host() -> Any:
        return behaviour.shuffled_by_each_host(Run(strategy()))

    one, other = on_hosts("2x1", on_host)
    assert (
        one["refused"]
        == other["refused"]
        == (
            "A dataset must have the same order on all hosts. Received: shuffle='without a seed', hosts=2. Give its shuffle "
            "a seed: dataset.shuffle(n, seed=SEED). Or call keras.utils.set_random_seed(SEED) before."
        )
    )
    for kind in ("batches", "judged in between", "not dense"):
        # Every row once an epoch, of every batch half on each host, and each epoch in another order.
        epochs = [np.concatenate(halves) for halves in zip(one[kind], other[kind], strict=True)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2, kind
        assert list(epochs[0]) != list(epochs[1]), kind


def test_a_layer_that_is_frozen_between_fits_is_not_trained_and_that_it_was_not_compiled_so_is_said(
    seen: dict[str, Any],
) -> None:
    [said] = seen["frozen"]["said"]
    assert said == (
        "A model must be compiled after its trainable variables change. Received: trainable=2, trained before=4. From now on "
        "it trains the variables that are trainable now. Call compile again."
    )
    assert seen["frozen"]["moved"] == 0.0


def test_a_pickled_or_copied_model_is_a_plain_one(seen: dict[str, Any]) -> None:
    assert seen["pickled"] == {
        "kinds": ["keras.src.models.sequential"] * 2 + ["SGD"] * 2,
        "same": [True, True],
        "distributed": [False, False],
    }


def test_a_clone_is_distributed_as_its_model_is(seen: dict[str, Any]) -> None:
    assert seen["cloned"] == ["row", "Functional", "replica", "Functional"]


def test_what_a_layer_assigns_in_a_branch_and_a_model_that_one_device_trains_are_warned_of(seen: dict[str, Any]) -> None:
    alone = (
        "A model must be made in the scope of a strategy to be trained on all devices. Received: model='outside', made "
        "outside of a scope. One device trains it alone: MirroredStrategy with 2 replicas is not used. Make it under `with "
        "strategy.scope():`. To train on one device on purpose, use the scope of tf.distribute.OneDeviceStrategy."
    )
    [branch] = seen["warned"].pop("branch")
    assert re.sub("'sequential[^']*'", "'mean'", branch) == (
        "A layer must assign its variables outside of loops and branches of the graph, where collectives do not work. "
        "Received: variable='mean'. Each replica keeps the value of its own examples. Use keras.ops.where instead of a branch."
    )
    [count] = seen["warned"].pop("count")
    assert count == (
        "A log of a step must be a mean over the examples: gpudist averages the logs of all replicas, weighted by examples. "
        "Received: rows, dtype='int32'. It is treated as such a mean, so a count of examples becomes that of one replica. "
        "For a count over all replicas update a keras.metrics.Sum and return its result. Return a value that is equal on all "
        "replicas with tf.cast(value, tf.float32)."
    )
    assert seen["warned"] == {"distributed": [alone], "step": [alone], "within": [], "one device": []}
