"""The features: how each departs from a plain training of digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

BATCH = 48
EVEN, UNEVEN, EMPTY = 5 * BATCH, 5 * BATCH + 25, 5 * BATCH + 1
TOPOLOGIES = ("1x2", "1x3", "1x4", "2x1", "2x2", "2x4")
STYLES = ("fit", "own step", "train_step")


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        title: What it is called in the documentation.
        style: `fit`, `own step` (a loop around a compiled step), or `train_step` (a model with a train_step of its own).
        rows: Training rows; the last batch of an epoch has what remains of them.
        text: Words with a mask instead of digits.
        weights: Whether rows have weights.
        layers: A function (layers) -> hidden layers.
        optimizer: Its name and arguments.
        loss: The loss's name, or None for the task's own.
        metrics: A function (keras) -> metrics.
        fit: More arguments of `fit`.
        compile: More arguments of `compile`.
        policy: The dtype policy.
        draws: How `gpudist_core` draws.
        sharded: Whether the embedding is a table whose slices lie on different devices.
    """

    title: str
    style: str = "fit"
    rows: int = UNEVEN
    text: bool = False
    weights: bool = False
    layers: Callable[[Any], list[Any]] | None = None
    optimizer: tuple[str, Mapping[str, Any]] = ("SGD", {"learning_rate": 0.1})
    metrics: Callable[[Any], list[Any]] | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    compile: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "float32"
    draws: str = "replica"
    sharded: bool = False


def _sgd(**arguments: Any) -> tuple[str, Mapping[str, Any]]:
    return "SGD", {"learning_rate": 0.1, **arguments}


def _normalized(layers: Any) -> list[Any]:
    return [layers.Dense(32), layers.BatchNormalization(momentum=0.8, synchronized=True), layers.ReLU()]


def _convolved(layers: Any) -> list[Any]:
    convolution = [layers.Reshape((8, 8, 1)), layers.Conv2D(8, 3, activation="relu")]
    return [*convolution, layers.BatchNormalization(momentum=0.8, synchronized=True), layers.Flatten()]


def _dropped(layers: Any) -> list[Any]:
    return [layers.Dense(32, activation="relu"), layers.Dropout(0.3, seed=1)]


def _regularized(layers: Any) -> list[Any]:
    return [layers.Dense(32, activation="relu", kernel_regularizer="l2", activity_regularizer="l2")]


def _measured(keras: Any) -> list[Any]:
    entropy = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    return ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3), entropy]


OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"learning_rate": 0.001},
    "Adam": {"learning_rate": 0.001},
    "AdamW": {"learning_rate": 0.001, "weight_decay": 0.01},
    "Adadelta": {"learning_rate": 0.5},
    "Adagrad": {"learning_rate": 0.01},
    "Adamax": {"learning_rate": 0.001},
    # With its default, 1e-30, weights whose gradient is 0 (those of pixels in corners) become NaN.
    "Adafactor": {"learning_rate": 0.001, "epsilon_1": 1e-12},
    "Nadam": {"learning_rate": 0.001},
    "Ftrl": {"learning_rate": 0.05},
    "Lion": {"learning_rate": 0.0003},
    "Lamb": {"learning_rate": 0.001},
    "Muon": {"learning_rate": 0.001},
    "ScheduleFreeAdamW": {"learning_rate": 0.001},
}

FEATURES: Mapping[str, Feature] = {
    "even": Feature("even batches", rows=EVEN),
    "uneven": Feature("uneven last batch"),
    "empty": Feature("empty shards (a last batch of one example)", rows=EMPTY),
    "empty-convolution": Feature("empty shards, convolutions and BatchNormalization", rows=EMPTY, layers=_convolved),
    "masks": Feature("masks", text=True),
    "weights": Feature("sample weights", weights=True),
    "class-weights": Feature("class weights", fit={"class_weight": {i: 0.5 + i / 5 for i in range(10)}}),
    "clip-norm": Feature("clipping by norm", optimizer=_sgd(clipnorm=0.05)),
    "clip-global-norm": Feature("clipping by global norm", optimizer=_sgd(global_clipnorm=0.05)),
    "clip-value": Feature("clipping by value", optimizer=_sgd(clipvalue=0.005)),
    "regularisation": Feature("regularization of weights and activations", layers=_regularized),
    "accumulation": Feature("gradient accumulation", optimizer=_sgd(gradient_accumulation_steps=3)),
    **{f"optimizer-{name}": Feature(f"optimizer {name}", optimizer=(name, made)) for name, made in OPTIMIZERS.items()},
    "float16": Feature("mixed precision, float16", policy="mixed_float16", optimizer=("Adam", {"learning_rate": 0.001})),
    "bfloat16": Feature("mixed precision, bfloat16", policy="mixed_bfloat16", optimizer=("Adam", {"learning_rate": 0.001})),
    "ema": Feature("EMA with overwrite", optimizer=_sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4)),
    "batch-norm": Feature("BatchNormalization, synchronized", layers=_normalized),
    "dropout": Feature('dropout with `draws="row"`', layers=_dropped, draws="row"),
    "embedding": Feature("embedding (sparse gradients)", text=True, optimizer=("Adam", {"learning_rate": 0.001})),
    "sharded": Feature("sharded table, own loop", style="own step", text=True, sharded=True),
    "sharded-fit": Feature("sharded table, `fit`", text=True, sharded=True, optimizer=("Adam", {"learning_rate": 0.001})),
    "metrics": Feature("metrics", metrics=_measured),
    "steps-per-execution": Feature("several steps per execution", compile={"steps_per_execution": 3}),
    "own-step": Feature("own loop", style="own step"),
    "own-step-weights": Feature(
        "own loop with weights and clipping", style="own step", weights=True, optimizer=_sgd(global_clipnorm=0.05)
    ),
    "train-step": Feature("own `train_step` in `fit`", style="train_step"),
}
