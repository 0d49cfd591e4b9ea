"""Collect the private names of TensorFlow, Keras and tf_keras for the faults (TF 2.21, Keras 3.15).

A test (`tests/emulate/faults/test_upstream.py`) fails when upstream changes one of them.
"""

from __future__ import annotations

import sys
from typing import Any

from emulate.graph_functions import load


def run_independently(operation: Any) -> None:
    """Keep a tf.function from ordering this operation after all others with side effects, those of other replicas included."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def optimizers(package: str) -> list[tuple[Any, str]]:
    """Return (class, method) of every apply that can end a training step, of TensorFlow, Keras 3 and tf_keras."""
    if package == "tensorflow":
        applies = [(load("tensorflow.python.training.optimizer").Optimizer, "apply_gradients")]
    elif package == "keras":
        base = load("keras.src.optimizers.base_optimizer").BaseOptimizer
        applies = [(base, "apply"), (load("keras.src.optimizers.loss_scale_optimizer").LossScaleOptimizer, "apply")]
    else:
        modern, scale = load("tf_keras.src.optimizers.optimizer"), load("tf_keras.src.mixed_precision.loss_scale_optimizer")
        classes = (modern._BaseOptimizer, modern.Optimizer, scale.LossScaleOptimizer, scale.LossScaleOptimizerV3)
        legacy = load("tf_keras.src.optimizers.legacy.optimizer_v2").OptimizerV2
        applies = [(cls, "apply_gradients") for cls in (*classes, legacy)]
    return [(cls, name) for cls, name in applies if name in vars(cls)]


def steps_made(optimizer: Any) -> int | None:
    """Return how many steps an optimizer has made, including those of a restored run; None if it does not count."""
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    count = getattr(inner, "_iterations", None)
    return None if count is None or isinstance(count, int) else int(count.numpy())


def merge_of_checkpoint() -> tuple[Any, str]:
    """Return the operation that merges the parts of a checkpoint: module and name."""
    return load("tensorflow.python.ops.gen_io_ops"), "merge_v2_checkpoints"


def keras_savers() -> list[tuple[Any, str]]:
    """Return what closes the file of weights while Keras 3 saves."""
    return [(load("keras.src.saving.saving_lib").H5IOStore, "close")] if "keras.src.saving.saving_lib" in sys.modules else []
