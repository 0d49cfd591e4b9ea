"""A training step has the result of one device, whatever the topology."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.conftest import OnHosts
from tests.core.steps import training

CASES: dict[str, dict[str, Any]] = {
    "the last batch has one row, so that replicas are empty": {},
    "rows have weights": {"weights": True, "metrics": True},
    "each variable's gradient is clipped": {"step": {"clip_norm": 0.05}},
    "all gradients are clipped together": {"step": {"clip_global_norm": 0.05}},
    "each element is clipped": {"step": {"clip_value": 0.01}},
    "the optimizer clips": {"optimizer": ("Adam", {"learning_rate": 0.01, "global_clipnorm": 0.05})},
    "four batches make one update, and two are left": {"step": {"accumulate": 4}, "weights": True},
    "the optimizer averages and overwrites": {
        "optimizer": ("Adam", {"learning_rate": 0.01, "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3})
    },
    "variables and activations are regularised": {
        "layers": lambda layers: [layers.Dense(16, activation="relu", kernel_regularizer="l2", activity_regularizer="l2")],
        "weights": True,
    },
    "BatchNormalization sees the global batch": {"layers": lambda layers: [layers.Dense(16), layers.BatchNormalization()]},
    "dropout belongs to the row": {
        "layers": lambda layers: [layers.Dense(16), layers.Dropout(0.5, seed=1), layers.GaussianNoise(0.3, seed=2)],
        "step": {"draws": "row"},
    },
    "several batches are trained in a call": {"several": 5, "step": {"accumulate": 2}},
    "XLA compiles each replica's part": {"step": {"jit_compile": True}, "weights": True},
    "XLA compiles a scaled loss": {"scales": True, "step": {"jit_compile": True}},
    "a scaled loss reaches the other replicas through BatchNormalization": {
        "layers": lambda layers: [layers.Dense(16), layers.BatchNormalization(), layers.Activation("relu")],
        "scales": True,
    },
}


# On all of them the last batch has one row, so that replicas are empty.
@pytest.mark.parametrize("topology", ["2x1", *(pytest.param(one, marks=pytest.mark.slow) for one in ("1x3", "2x2"))])
def test_a_step_is_that_of_one_device(on_hosts: OnHosts, topology: str) -> None:
    def all_cases() -> dict[str, Any]:
        where = training.strategy()
        return {name: training.train(where, case) for name, case in CASES.items()}

    (expected,) = on_hosts("1x1", all_cases)
    for seen in on_hosts(topology, all_cases):
        for name, one in expected.items():
            assert seen[name]["copies_agree"], name
            np.testing.assert_allclose(seen[name]["losses"], one["losses"], rtol=2e-5, err_msg=name)
            assert seen[name]["iterations"] == one["iterations"], name
            np.testing.assert_allclose(seen[name]["metric"], one["metric"], rtol=1e-6, err_msg=name)
            for weights, right in zip(seen[name]["weights"], one["weights"], strict=True):
                np.testing.assert_allclose(weights, right, atol=2e-5, err_msg=name)


def test_a_constant_loss_scale_changes_no_update(on_hosts: OnHosts) -> None:
    def with_and_without() -> list[Any]:
        where = training.strategy()
        options = [{"learning_rate": 0.1}, {"learning_rate": 0.1, "loss_scale_factor": 128.0}]
        steps: list[dict[str, Any]] = [{}, {"jit_compile": True}, {"accumulate": 2, "clip_global_norm": 0.05}]
        return [[training.train(where, {"optimizer": ("SGD", one), "step": step}) for one in options] for step in steps]

    for without, scaled in on_hosts("1x2", with_and_without)[0]:
        np.testing.assert_allclose(scaled["losses"], without["losses"], rtol=1e-5)
        for weights, right in zip(scaled["weights"], without["weights"], strict=True):
            np.testing.assert_allclose(weights, right, atol=1e-6)


def _flushed(kept: Any = None) -> Any:
    """A variable without a gradient beside others, before and after an update that decays; what is pending before it."""
    import keras

    from gpudist_core.steps import TrainStep

    where = training.strategy()
    keras.utils.set_random_seed(1)
    with where.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        idle = keras.Variable(np.ones(3, "float32"), name="idle")
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = TrainStep(model, optimizer, loss, accumulate=3, variables=[*model.trainable_variables, idle])
    if kept is None:
        for batch in training.batches(where, *training.digits(48), size=24):
            step(batch)
    else:
        step.restore(kept)
    pending = step.state()
    step.flush()
    return pending, [variable.numpy() for variable in (*model.trainable_variables, idle)]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_flush_leaves_alone_what_had_no_gradient_as_any_update_does(on_hosts: OnHosts) -> None:
    ((pending, weights),) = on_hosts("1x2", _flushed)
    ((_, restored),) = on_hosts("1x1", _flushed, pending)
    assert np.array_equal(weights[-1], np.ones(3))
    for one, other in zip(weights, restored, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def _table(kept: Any = None) -> Any:
    """What a step has accumulated of a sharded table after the first of two batches; from there on, the table in the end."""
    import keras

    import gpudist_core as gd

    strategy = gd.make_strategy()
    keras.utils.set_random_seed(1)
    ids = np.arange(40).reshape(20, 2) % 7
    data = gd.Pipeline.from_arrays((ids, np.arange(20) % 3), global_batch_size=10)
    with strategy.scope():
        embedding = gd.ShardedEmbedding(7, 4, seed=3)
        model = keras.Sequential([keras.Input((2,)), embedding, keras.layers.Flatten(), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = gd.TrainStep(model, optimizer, loss, accumulate=2)
    first, second = list(data.distribute(strategy))
    if kept is None:
        step(first)
        return step.state()
    step.restore(kept)
    step(second)
    return embedding.table.as_numpy()


def test_what_is_accumulated_of_a_table_in_slices_is_the_tables_and_goes_on_on_another_topology(on_hosts: OnHosts) -> None:
    one, two = (on_hosts(topology, _table)[0] for topology in ("1x1", "2x1"))
    assert [value.shape for value in two["accumulators"]["sums"]] == [(7, 4), (8, 3), (3,)]
    for here, there in zip(one["accumulators"]["sums"], two["accumulators"]["sums"], strict=True):
        np.testing.assert_allclose(here, there, atol=1e-6)
    alone, three = on_hosts("1x1", _table, one)[0], on_hosts("1x3", _table, two)[0]
    np.testing.assert_allclose(alone, three, atol=1e-6)
    assert abs(alone - on_hosts("1x3", _table, {"pending": 0})[0]).max() > 1e-3
