"""Train TensorFlow models so that the result does not depend on the number of devices.

    import gpudist_core as gd

    strategy = gd.make_strategy()
    data = gd.Pipeline.from_arrays((images, labels), global_batch_size=256, shuffle=True, seed=1)
    with strategy.scope():
        model = gd.distributed(build_model())
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data, epochs=3, callbacks=[gd.Checkpoints("runs/a", keep=3)])

Each part is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpudist_core.certificates import CertificateMismatch
    from gpudist_core.certificates.checks import Check, check
    from gpudist_core.checkpoints import (
        CheckpointRefused,
        Checkpoints,
        FolderInUse,
        HostMissing,
        Preempted,
        Restored,
        SaveFailed,
    )
    from gpudist_core.environments import Environment, environment
    from gpudist_core.errors import Unavailable, UsageError, WrongUse
    from gpudist_core.keras_model import distributed
    from gpudist_core.parameter_servers import CoordinatedTraining, PartitionedEmbedding, PartitionedTable, partition
    from gpudist_core.pipelines import Distributed, Pipeline, UnknownLength
    from gpudist_core.replicas import Replicas, per_replica, replicas_of
    from gpudist_core.static import Replicated, ShardedEmbedding, ShardedTable, replicate, shard
    from gpudist_core.steps import TrainStep
    from gpudist_core.strategies import make_strategy

_NAMES = {
    "certificates": ("CertificateMismatch",),
    "certificates.checks": ("Check", "check"),
    "checkpoints": ("CheckpointRefused", "Checkpoints", "FolderInUse", "HostMissing", "Preempted", "Restored", "SaveFailed"),
    "environments": ("Environment", "environment"),
    "errors": ("Unavailable", "UsageError", "WrongUse"),
    "keras_model": ("distributed",),
    "parameter_servers": ("CoordinatedTraining", "PartitionedEmbedding", "PartitionedTable", "partition"),
    "pipelines": ("Distributed", "Pipeline", "UnknownLength"),
    "replicas": ("Replicas", "per_replica", "replicas_of"),
    "static": ("Replicated", "ShardedEmbedding", "ShardedTable", "replicate", "shard"),
    "steps": ("TrainStep",),
    "strategies": ("make_strategy",),
}
_PLACES = {name: place for place, names in _NAMES.items() for name in names}

_WITHOUT_TENSORFLOW = ("environments", "errors")
_WITHOUT_KERAS = ("replicas", "strategies")

__all__ = [
    "CertificateMismatch",
    "Check",
    "CheckpointRefused",
    "Checkpoints",
    "CoordinatedTraining",
    "Distributed",
    "Environment",
    "FolderInUse",
    "HostMissing",
    "PartitionedEmbedding",
    "PartitionedTable",
    "Pipeline",
    "Preempted",
    "Replicas",
    "Replicated",
    "Restored",
    "SaveFailed",
    "ShardedEmbedding",
    "ShardedTable",
    "TrainStep",
    "Unavailable",
    "UnknownLength",
    "UsageError",
    "WrongUse",
    "check",
    "distributed",
    "environment",
    "make_strategy",
    "partition",
    "per_replica",
    "replicas_of",
    "replicate",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _PLACES[name] not in _WITHOUT_TENSORFLOW:
        from gpudist_core.errors import Unavailable
        from gpudist_core.installed import unsupported

        if text := unsupported(with_keras_2=_PLACES[name] in _WITHOUT_KERAS):
            raise Unavailable(text)
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
