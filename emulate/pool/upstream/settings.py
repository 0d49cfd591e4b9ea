"""Read and restore settings of TensorFlow without a public getter or setter."""

from __future__ import annotations

import sys
from typing import Any

from emulate.pool.upstream.runtime import context

_NAMED = ("activations", "constraints", "initializers", "losses", "metrics", "optimizers", "regularizers")


def is_deterministic() -> bool:
    """Return whether operations must be deterministic."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


def set_deterministic(on: bool) -> None:
    """Ask for it, or no longer."""
    from tensorflow.python.framework import config

    (config.enable_op_determinism if on else config.disable_op_determinism)()


def graph_options() -> dict[str, Any]:
    """Return the options set for Grappler, without those that strategies with collectives set."""
    return {} if context() is None else dict(context()._optimizer_experimental_options)


def set_graph_options(options: dict[str, Any]) -> None:
    """Ask for exactly that of Grappler."""
    context()._optimizer_experimental_options.clear()
    context().set_optimizer_experimental_options(options)


def callbacks() -> int:
    """Return how many functions are called with every operation (`tf.debugging.enable_check_numerics` for example)."""
    return 0 if context() is None else len(context().op_callbacks)


def debugs_data() -> bool:
    """Return whether tf.data runs Python functions eagerly."""
    from tensorflow.python.data.ops import debug_mode

    return bool(debug_mode.DEBUG_MODE)


def compares_tensors() -> bool:
    """Return whether `==` on tensors compares their elements."""
    from tensorflow.python.framework import tensor

    return bool(tensor.Tensor._USE_EQUALITY)


def promotes_types() -> Any:
    """Return how NumPy's type promotion is configured."""
    from tensorflow.python.framework import ops

    return ops.is_numpy_style_type_promotion(), str(ops.get_dtype_conversion_mode())


def summary_writer() -> Any:
    """Return the default writer of `tf.summary`."""
    from tensorflow.python.ops import summary_ops_v2

    return summary_ops_v2._summary_state.writer


def set_summary_writer(writer: Any) -> None:
    """Write there, or nowhere."""
    from tensorflow.python.ops import summary_ops_v2

    summary_ops_v2._summary_state.writer = writer


def summary_step() -> tuple[int, Any]:
    """Return the default step of `tf.summary`, after its identity, because a variable is compared by value."""
    from tensorflow.python.ops import summary_ops_v2

    step = summary_ops_v2._summary_state.step
    return id(step), step


def set_summary_step(known: tuple[int, Any]) -> None:
    """Write that one, or none."""
    from tensorflow.python.ops import summary_ops_v2

    summary_ops_v2._summary_state.step = known[1]


def autograph_verbosity() -> tuple[Any, bool]:
    """Return AutoGraph's verbosity, and whether it also writes to standard output."""
    from tensorflow.python.autograph.utils import ag_logging

    return ag_logging.verbosity_level, ag_logging.echo_log_to_stdout


def set_autograph_verbosity(known: tuple[Any, bool]) -> None:
    """Tell so much."""
    from tensorflow.python.autograph.utils import ag_logging

    ag_logging.verbosity_level, ag_logging.echo_log_to_stdout = known


def objects_by_name() -> dict[str, dict[str, Any]]:
    """Return what Keras finds by a name, such as `"relu"`: activations, losses and the like."""
    return {name: dict(objects) for name, objects in _tables_of_names().items()}


def set_objects_by_name(known: dict[str, dict[str, Any]]) -> None:
    """Find exactly these."""
    for name, objects in _tables_of_names().items():
        objects.clear()
        objects.update(known[name])


def _tables_of_names() -> dict[str, dict[str, Any]]:
    modules = {name: sys.modules.get(f"keras.src.{name}") for name in _NAMED}
    return {name: module.ALL_OBJECTS_DICT for name, module in modules.items() if module is not None}


def device_scope() -> str:
    """Return the device of a `tf.device` that was entered and not left."""
    return "" if context() is None else str(context().device_name)


def name_scope() -> str:
    """Return the name scope that was not left."""
    return "" if context() is None else str(context().scope_name)


def dispatchers() -> int:
    """Return how many functions dispatch calls of TensorFlow's API."""
    from tensorflow.python.util import dispatch

    return len(dispatch._GLOBAL_DISPATCHERS)


def gradients() -> frozenset[str]:
    """Return the names of operations with a gradient, without numbered ones from functions and custom gradients."""
    from tensorflow.python.framework import ops

    return frozenset(name for name in ops.gradient_registry._registry if not name.rpartition("-")[2].isdigit())


def conversions() -> int:
    """Return how many types have their own conversion to tensors."""
    from tensorflow.python.framework import tensor_conversion_registry

    return sum(map(len, tensor_conversion_registry._tensor_conversion_func_registry.values()))


def is_profiling() -> bool:
    """Return whether a profile is being recorded."""
    profiler = sys.modules.get("tensorflow.python.profiler.profiler_v2")
    return profiler is not None and profiler._profiler is not None


def graph_is_default() -> bool:
    """Return whether a graph was entered with `as_default` and not left."""
    from tensorflow.python.framework import ops

    return len(ops._default_graph_stack.stack) > 0
