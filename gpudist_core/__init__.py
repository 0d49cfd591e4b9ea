"""gpudist_core: training with TensorFlow whose result does not depend on how many devices it runs on.

    import gpudist_core as gd

    strategy = gd.make_strategy()
    data = gd.Pipeline.from_arrays((images, labels), global_batch_size=256, shuffle=True, seed=1)
    with strategy.scope():
        model = gd.distributed(build_model())
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data, epochs=3, callbacks=[gd.Checkpoints("runs/a", keep=3)])

Each part is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudist_core.environments import Environment, environment
    from gpudist_core.errors import Unavailable, WrongUse
    from gpudist_core.pipelines import Pipeline
    from gpudist_core.replicas import Replicas, per_replica, replicas_of
    from gpudist_core.static import Replicated, ShardedEmbedding, replicate, shard
    from gpudist_core.steps import TrainStep
    from gpudist_core.strategies import make_strategy

_PLACES = {
    "Environment": "environments",
    "Pipeline": "pipelines",
    "Replicas": "replicas",
    "Replicated": "static",
    "ShardedEmbedding": "static",
    "TrainStep": "steps",
    "Unavailable": "errors",
    "WrongUse": "errors",
    "environment": "environments",
    "make_strategy": "strategies",
    "per_replica": "replicas",
    "replicas_of": "replicas",
    "replicate": "static",
    "shard": "static",
}

__all__ = [
    "Environment",
    "Pipeline",
    "Replicas",
    "Replicated",
    "ShardedEmbedding",
    "TrainStep",
    "Unavailable",
    "WrongUse",
    "environment",
    "make_strategy",
    "per_replica",
    "replicas_of",
    "replicate",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
