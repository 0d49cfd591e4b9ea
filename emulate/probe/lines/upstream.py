"""Collect the private names of TensorFlow and Keras for the user's lines.

A test (`tests/emulate/probe/test_upstream.py`) fails when upstream changes one of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from emulate.graph_functions import load

KERAS_LAYERS = ("keras.src.layers.layer", "tf_keras.src.engine.base_layer")


def stack() -> list[tuple[str, int]]:
    """Return (file, line) of each call on this thread, outermost first, through autograph's map of its code (TF 2.21)."""
    if "tensorflow" not in sys.modules:
        return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()]
    return [(frame.filename, frame.lineno) for frame in load("tensorflow.python.util.tf_stack").extract_stack()]


def converter() -> tuple[Any, str]:
    """Return where autograph converts a function: module and name. The result has `ag_source_map` (TF 2.21)."""
    return load("tensorflow.python.autograph.impl.api"), "_convert_actual"


def origins_of(converted: Any) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Yield each line of a converted function with the line that it was made of."""
    for place, origin in getattr(converted, "ag_source_map", {}).items():
        yield (place.filename, place.lineno), (origin.loc.filename, origin.loc.lineno)


def graph_class() -> Any:
    """Return the class whose `_create_op_internal` makes each operation of a traced function (TF 2.21)."""
    return load("tensorflow.python.framework.func_graph").FuncGraph


def operations_of(graph: Any, name: str) -> list[Any]:
    """Return the operations of a function that operations of a graph call (`Graph._functions`, TF 2.21)."""
    return list(graph._functions[name].graph.get_operations())


def replica_collectives() -> list[tuple[Any, str]]:
    """(class, method) of what replicas put their values together with (TF 2.21)."""
    lib = load("tensorflow.python.distribute.distribute_lib")
    return [(lib.ReplicaContextBase, "all_reduce"), (lib.ReplicaContext, "all_gather")]


def options_class() -> Any:
    """Return the class whose attributes are the options of datasets, `auto_shard_policy` among them (TF 2.21)."""
    return load("tensorflow.python.data.util.options").OptionsBase


def checkpoint_class() -> Any:
    """`tf.train.Checkpoint`."""
    return load("tensorflow.python.checkpoint.checkpoint").Checkpoint


def layer_classes(package: str) -> list[Any]:
    """Return the Layer class of an imported Keras version."""
    return [sys.modules[name].Layer for name in KERAS_LAYERS if name in sys.modules and name.startswith(f"{package}.")]


def tensor_number(tensor: Any) -> int | None:
    """Return an eager tensor's number, which no other has; None for anything else."""
    number = getattr(tensor, "_id", None)
    return number if isinstance(number, int) else None


@contextlib.contextmanager
def watching_operations(see: Callable[..., None]) -> Iterator[None]:
    """Call `see` with each operation that this thread runs in eager code (TF 2.21).

    MirroredStrategy gives the threads of its replicas the one list of callbacks of the thread that calls it (2.21,
    mirrored_run.py), so a callback is called by the other replicas, too, and by what adds up over them.
    """
    callbacks, own = load("tensorflow.python.framework.op_callbacks"), threading.get_ident()

    def see_own(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == own:
            see(*args, **kwargs)

    callbacks.add_op_callback(see_own)
    try:
        yield
    finally:
        callbacks.remove_op_callback(see_own)
