"""Collect the private names of TensorFlow and Keras that faults alone use (TF 2.21, Keras 3.15).

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


def merge_of_checkpoint() -> tuple[Any, str]:
    """Return the operation that merges the parts of a checkpoint: module and name."""
    return load("tensorflow.python.ops.gen_io_ops"), "merge_v2_checkpoints"


def keras_savers() -> list[tuple[Any, str]]:
    """Return what closes the file of weights while Keras 3 saves."""
    return [(load("keras.src.saving.saving_lib").H5IOStore, "close")] if "keras.src.saving.saving_lib" in sys.modules else []
