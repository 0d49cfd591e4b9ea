"""Each kind of pipeline: the same global batches on every topology, every row once, each share on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

from emulate.cluster import Cluster, Preload
from gpudist_core.pipelines import shares
from tests.core.pipelines import every_source
from tests.core.pipelines.every_source import BATCH, ROWS

ALL = None
SOME = ("arrays", "eagerly", "a dict")
TOPOLOGIES = {"1x3": (3, ALL), "2x2": (4, ALL), "2x1": (2, SOME), "1x8": (8, SOME)}
RESTORED = ("arrays", "balanced", "three record files", "files", "generator", "dataset", "cached", "weights")
ONCE = {
    "arrays",
    "memory map",
    "in order",
    "one record file",
    "three record files",
    "a file a row",
    "files",
    "generator",
    "dataset",
}


@pytest.fixture(scope="module")
def run(preload: Preload) -> Iterator[Callable[..., Any]]:
    """A function on the hosts of a topology."""
    cloudpickle.register_pickle_by_value(every_source)

    def go(topology: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        with Cluster(topology, preload=preload, timeout=120) as cluster:
            return cluster.run(function, *args)

    yield go
    cloudpickle.unregister_pickle_by_value(every_source)


@pytest.fixture(scope="module")
def folder(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows")
    run("1x1", every_source.write_files, path)
    return str(path)


@pytest.fixture(scope="module")
def reference(run: Callable[..., Any], folder: str) -> Any:
    """For each pipeline, epoch and batch: its components, on one device."""
    return joined(run("1x1", every_source.on_replicas, folder))


def joined(hosts: list[Any]) -> Any:
    """The global batches: the rows of the replicas in their order."""
    return {
        name: [[_whole([host[name][e][b] for host in hosts]) for b in range(len(epoch))] for e, epoch in enumerate(epochs)]
        for name, epochs in hosts[0].items()
    }


def _whole(hosts: list[Any]) -> list[Any]:
    replicas = [replica for host in hosts for replica in host]
    return [np.concatenate(parts) for parts in zip(*replicas, strict=True)]


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert [len(epoch) for epoch in found[name]] == [len(epoch) for epoch in expected[name]], name
        for epoch, epoch_expected in zip(found[name], expected[name], strict=True):
            for batch, batch_expected in zip(epoch, epoch_expected, strict=True):
                for part, part_expected in zip(batch, batch_expected, strict=True):
                    assert part.dtype == part_expected.dtype, name
                    np.testing.assert_array_equal(part, part_expected, name)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_has_the_global_batches_of_one_device(
    topology: str, run: Callable[..., Any], folder: str, reference: Any
) -> None:
    replicas, names = TOPOLOGIES[topology]
    hosts = run(topology, every_source.on_replicas, folder, names)
    assert_same(joined(hosts), {name: reference[name] for name in names or reference})
    for name, epochs in hosts[0].items():
        for e, epoch in enumerate(epochs):
            for b, _ in enumerate(epoch):
                held = [len(replica[0]) for host in hosts for replica in host[name][e][b]]
                assert held == shares(sum(held), replicas), name


@pytest.mark.parametrize("name", sorted(ONCE))
def test_an_epoch_has_every_row_once_and_an_order_of_its_own(name: str, reference: Any) -> None:
    epochs = [[int(row) for batch in epoch for row in batch[1]] for epoch in reference[name]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert [len(batch[1]) for batch in reference[name][0]] == [8, 8, 8, 1]
    assert (epochs[0] == epochs[1]) == (name == "in order")


def test_augmentation_is_of_the_row_and_the_epoch(reference: Any) -> None:
    draws = []
    for epoch in reference["in order"]:
        x = np.concatenate([batch[0] for batch in epoch])
        draws.append(x - every_source.rows()[0])
    assert len(np.unique(np.concatenate(draws))) > 1.9 * 2 * ROWS
    # The same rows by another way, in another order: the same draws.
    for name in ("arrays", "one record file", "dataset"):
        x, y = (np.concatenate([batch[i] for batch in reference[name][0]]) for i in range(2))
        np.testing.assert_array_equal(x[np.argsort(y)], every_source.rows()[0] + draws[0])


def test_a_dropped_remainder_leaves_whole_batches(reference: Any) -> None:
    assert [[len(batch[1]) for batch in epoch] for epoch in reference["drop"]] == [[BATCH] * 3] * 2


def test_balanced_batches_have_each_class_half_of_the_time(reference: Any) -> None:
    for batch in (batch for epoch in reference["balanced"] for batch in epoch):
        assert (batch[1] < 20).sum() * 2 == len(batch[1])


def test_rows_drawn_twice_are_augmented_twice(reference: Any) -> None:
    x, y = (np.concatenate([batch[i] for batch in reference["balanced"][0]]) for i in range(2))
    assert (np.bincount(y)[20:] == 3).all()
    assert len(np.unique(x[y == 20], axis=0)) == 3


def test_weights_are_of_the_whole_data(reference: Any) -> None:
    y, weight = (np.concatenate([batch[i] for batch in reference["weights"][0]]) for i in (1, 2))
    assert weight.dtype == np.float32
    assert np.allclose([weight[y == label].sum() for label in range(3)], ROWS / 3)
    y, weight = (np.concatenate([batch[i] for batch in reference["weighted stream"][0]]) for i in (1, 2))
    np.testing.assert_array_equal(weight, np.where(y, 2, 0.5))


def test_a_position_is_restored_on_another_topology(run: Callable[..., Any], folder: str, reference: Any) -> None:
    started = run("1x3", _begin, folder, RESTORED)
    states = started[0][1]
    rest = run("2x2", _go_on, folder, states)
    first = joined([started[0][0]])
    second = joined(rest)
    whole = {name: [first[name][0], [*first[name][1], *second[name][0]]] for name in first}
    assert_same(whole, {name: reference[name] for name in RESTORED})
    assert all(len(epochs[1]) == 2 for epochs in first.values())


def _begin(folder: str, names: Any) -> Any:
    """An epoch, and two batches of the next, while more is made ahead; then the states, by way of JSON."""
    import json

    strategy = every_source.strategy_here()
    found, states = {}, {}
    for name in names:
        pipeline = every_source.pipelines(folder)[name]
        distributed = pipeline.distribute(strategy)
        found[name] = [every_source.epoch_of(distributed), every_source.epoch_of(distributed, 2)]
        states[name] = json.loads(json.dumps(pipeline.state()))
        assert (states[name]["epoch"], states[name]["batch"]) == (1, 2), name
    return found, states


def _go_on(folder: str, states: Any) -> Any:
    """The rest of the epoch of the states."""
    strategy = every_source.strategy_here()
    found = {}
    for name in states:
        pipeline = every_source.pipelines(folder)[name]
        pipeline.restore(states[name])
        found[name] = [every_source.epoch_of(pipeline.distribute(strategy))]
        assert (pipeline.state()["epoch"], pipeline.state()["batch"]) == (2, 0), name
    return found
