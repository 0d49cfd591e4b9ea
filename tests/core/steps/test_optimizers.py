"""Every optimizer of Keras 3, with dense and sparse gradients and uneven shards, takes the steps of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.conftest import OnHosts
from tests.core.steps import training
from tests.versions import since

OPTIMIZERS = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "clipnorm": 0.05},
    "RMSprop": {"learning_rate": 0.01, "centered": True, "momentum": 0.5},
    "Adam": {"learning_rate": 0.01, "amsgrad": True},
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.1, "clipvalue": 0.01},
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.1},
    "Adamax": {"learning_rate": 0.01},
    "Adafactor": {"learning_rate": 0.01},
    "Nadam": {"learning_rate": 0.01},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 0.001},
    "Lamb": {"learning_rate": 0.01},
    "Muon": {"learning_rate": 0.01},
    "ScheduleFreeAdamW": {"learning_rate": 0.01},
}


def train(where: Any, name: str, arguments: dict[str, Any]) -> list[Any]:
    """Weights after six steps, each of one row for two replicas and none for the third; words come again in both rows."""
    import keras

    from gpudist_core.steps import TrainStep

    keras.utils.set_random_seed(5)
    _, labels = training.digits(12)
    words = (np.arange(12 * 3).reshape(12, 3) * 7 % 5).astype("int64")
    with where.scope():
        layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((3,), dtype="int64"), *layers])
        optimizer = getattr(keras.optimizers, name)(**arguments)
    step = TrainStep(model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for batch in training.batches(where, words, labels, size=2):
        step(batch)
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.slow
def test_every_optimizer_takes_the_steps_of_one_device(on_hosts: OnHosts) -> None:
    def all_optimizers() -> dict[str, list[Any]]:
        import keras

        where = training.strategy()
        kinds = {name for name, cls in vars(keras.optimizers).items() if isinstance(cls, type)}
        assert kinds - {"Optimizer", "OptimizerMap", "LossScaleOptimizer", "MultiOptimizer"} <= set(OPTIMIZERS), (
            "one is left out"
        )
        if not since("keras", "3.13"):
            kinds.discard("Muon")  # Keras 3.8 has none, and that of 3.10 and 3.12 knows no variables of replicas
        return {name: train(where, name, one) for name, one in OPTIMIZERS.items() if name in kinds}

    (expected,) = on_hosts("1x1", all_optimizers)
    (seen,) = on_hosts("1x3", all_optimizers)
    assert len(expected) >= len(OPTIMIZERS) - 2  # older versions of Keras have fewer
    for name, weights in expected.items():
        for one, right in zip(seen[name], weights, strict=True):
            np.testing.assert_allclose(one, right, atol=5e-5, err_msg=name)
