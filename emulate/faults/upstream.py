"""The one place where the faults touch private names of TensorFlow, Keras and tf_keras (TF 2.21, Keras 3.15).

A test (`tests/emulate/faults/test_upstream.py`) fails when upstream changes one of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def load(module: str) -> Any:
    """A private module of TensorFlow or Keras."""
    return importlib.import_module(module)


def strategy_classes() -> list[Any]:
    """Classes that define `run` themselves."""
    lib = load("tensorflow.python.distribute.distribute_lib")
    return [cls for cls in (lib.StrategyBase, lib.Strategy, lib.StrategyV1) if "run" in vars(cls)]


def device(name: str) -> Any:
    """`tf.device` as TensorFlow has it, whatever the emulator put in its place for programs."""
    return load("tensorflow.python.framework.ops").device_v2(name)


def is_function(candidate: object) -> bool:
    """Whether this is a `tf.function`."""
    return isinstance(candidate, load("tensorflow.python.eager.polymorphic_function.polymorphic_function").Function)


def clone_function(function: Any, python_function: Callable[..., Any]) -> Any:
    """The same tf.function around another body, as MirroredStrategy itself does (mirrored_run.py)."""
    clone = function._clone(python_function=python_function)
    clone.autograph_info__ = {}  # else `Strategy.run` wraps it, and MirroredStrategy no longer sees that it is a tf.function
    return clone


def convert(function: Callable[..., Any], *, enabled: bool | None = None) -> Callable[..., Any]:
    """Autograph as `Strategy.run` applies it: as in the calling context, or enabled."""
    api = load("tensorflow.python.autograph.impl.api")
    ctx = load("tensorflow.python.autograph.core.ag_ctx")
    if enabled is None:
        return api.tf_convert(function, ctx.control_status_ctx(), convert_by_default=False)  # type: ignore[no-any-return]
    return api.tf_convert(function, ctx.ControlStatusCtx(status=ctx.Status.ENABLED))  # type: ignore[no-any-return]


def do_not_convert(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep autograph out of our own code."""
    return load("tensorflow.python.autograph.impl.api").do_not_convert(function)  # type: ignore[no-any-return]


def run_independently(operation: Any) -> None:
    """Keep a tf.function from ordering this operation after all others with side effects, those of other replicas included."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def collective_launcher() -> Any:
    """What every collective between replicas is started by."""
    return load("tensorflow.python.distribute.cross_device_utils").CollectiveReplicaLauncher


def optimizers(package: str) -> list[tuple[Any, str]]:
    """(class, method) of every apply that a training step may end with, of TensorFlow, Keras 3 or tf_keras."""
    if package == "tensorflow":
        found = [(load("tensorflow.python.training.optimizer").Optimizer, "apply_gradients")]
    elif package == "keras":
        base = load("keras.src.optimizers.base_optimizer").BaseOptimizer
        found = [(base, "apply"), (load("keras.src.optimizers.loss_scale_optimizer").LossScaleOptimizer, "apply")]
    else:
        modern, scale = load("tf_keras.src.optimizers.optimizer"), load("tf_keras.src.mixed_precision.loss_scale_optimizer")
        classes = (modern._BaseOptimizer, modern.Optimizer, scale.LossScaleOptimizer, scale.LossScaleOptimizerV3)
        legacy = load("tf_keras.src.optimizers.legacy.optimizer_v2").OptimizerV2
        found = [(cls, "apply_gradients") for cls in (*classes, legacy)]
    return [(cls, name) for cls, name in found if name in vars(cls)]


def steps_made(optimizer: Any) -> int | None:
    """How many steps an optimizer has made, with those of the run that it was restored from; None where it does not count."""
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    count = getattr(inner, "_iterations", None)
    return None if count is None or isinstance(count, int) else int(count.numpy())


def merge_of_checkpoint() -> tuple[Any, str]:
    """The operation that makes one checkpoint of what was written: module and name."""
    return load("tensorflow.python.ops.gen_io_ops"), "merge_v2_checkpoints"


def keras_savers() -> list[tuple[Any, str]]:
    """What closes the file of weights while Keras 3 saves."""
    return [(load("keras.src.saving.saving_lib").H5IOStore, "close")] if "keras.src.saving.saving_lib" in sys.modules else []
