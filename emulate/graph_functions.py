"""Collect the private names of TensorFlow 2.21 for `tf.function` and `Strategy.run`, which instruments and faults wrap.

Tests (`tests/emulate/probe/test_upstream.py`, `tests/emulate/faults/test_upstream.py`) fail when upstream changes one of them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from emulate.imports import tf


def load(module: str, name: str = "") -> Any:
    """Import a private module of TensorFlow or Keras, or one name of it."""
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


def strategy_classes() -> list[Any]:
    """Return the classes that define `run` themselves."""
    lib = load("tensorflow.python.distribute.distribute_lib")
    return [cls for cls in (lib.StrategyBase, lib.Strategy, lib.StrategyV1) if "run" in vars(cls)]


def device(name: str) -> Any:
    """Return TensorFlow's own `tf.device`, not the emulator's replacement for programs."""
    server = load("tensorflow.python.eager.context").context().get_server_def()
    if server is not None:  # of this process, even if it is connected to other processes
        name = f"/job:{server.job_name}/replica:0/task:{server.task_index}/device:{name}"
    return load("tensorflow.python.framework.ops").device_v2(name)


# The class of a `tf.function`.
function_class = functools.partial(load, "tensorflow.python.eager.polymorphic_function.polymorphic_function", "Function")


def on_cpu() -> Any:
    """Place operations without a GPU kernel on the CPU.

    TensorFlow would place them itself, but not once the program has called `tf.config.set_soft_device_placement(False)`.
    """
    return device("CPU:0")


TRACES_FIRST = "_initialize"
"""Name of the method that traces a `tf.function` for the first time."""
INITIALIZES = "_initialize_uninitialized_variables"
"""Name of the method that initializes variables created in a trace, before the function runs."""


def is_function(candidate: object) -> bool:
    """Return whether an object is a `tf.function`."""
    return isinstance(candidate, function_class())


def clone_function(function: Any, python_function: Callable[..., Any]) -> Any:
    """Return the same tf.function around another body, as MirroredStrategy itself does (mirrored_run.py)."""
    clone = function._clone(python_function=python_function)
    clone.autograph_info__ = {}  # else `Strategy.run` wraps it, and MirroredStrategy no longer sees that it is a tf.function
    return clone


def wrap_traced(function: Any, wrapper: Callable[..., Callable[..., Any]]) -> None:
    """Have a `tf.function` that was not called yet trace what `wrapper` makes of its Python function."""
    function._python_function = wrapper(function._python_function, autograph=function._autograph)
    function._gpudist_wrapped = True


def value_at_call(graph: Any, read: Callable[[], Any], spec: Any) -> Any:
    """Return a tensor of a function's graph that has at each call of the function the value that `read` returns then."""
    return graph.capture_call_time_value(read, spec)


def convert(function: Callable[..., Any], *, enabled: bool | None = None) -> Callable[..., Any]:
    """Apply AutoGraph as `Strategy.run` does: as in the calling context, or enabled, or not at all."""
    api = load("tensorflow.python.autograph.impl.api")
    ctx = load("tensorflow.python.autograph.core.ag_ctx")
    if enabled is False:
        return function
    here = ctx.control_status_ctx() if enabled is None else ctx.ControlStatusCtx(status=ctx.Status.ENABLED)
    converted = api.tf_convert(function, here, convert_by_default=enabled is True)
    as_it_is = converted is function and not is_function(function)
    return _in_context(function, ctx.ControlStatusCtx, here) if as_it_is else converted


def _in_context(function: Callable[..., Any], context: Any, here: Any) -> Callable[..., Any]:
    """Enable autograph for a nested tf.function: what it calls is converted only if autograph is enabled there."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context(status=here.status, options=here.options):
            return function(*args, **kwargs)

    return call


def do_not_convert(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep autograph out of our own code."""
    return load("tensorflow.python.autograph.impl.api").do_not_convert(function)  # type: ignore[no-any-return]


# The class that starts every collective between replicas (TF 2.21).
collective_launcher = functools.partial(load, "tensorflow.python.distribute.cross_device_utils", "CollectiveReplicaLauncher")


_REPLICAS = "_gpudist_virtual_replicas"


def mark_virtual(graph: Any, number: Any, count: int) -> None:
    """Note that one graph serves several replicas, and which tensor of it holds the replica's number."""
    setattr(graph, _REPLICAS, (number, count))


def virtual_replicas() -> tuple[Any, int] | None:
    """Return, where the graph under construction serves several replicas, the tensor with the number and their count."""
    replicas: tuple[Any, int] | None = found_on_graphs(_REPLICAS)
    return replicas


def found_on_graphs(attribute: str) -> Any:
    """Return an attribute of the graph under construction, or of the nearest one around it; None where none has it."""
    return next((getattr(graph, attribute) for graph in graphs_being_built() if hasattr(graph, attribute)), None)


def graphs_being_built() -> Iterator[Any]:
    """Yield the graph under construction and those around it, the nearest first; nothing in eager code."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
