"""The one place of this package that touches private names of TensorFlow (2.21); a test guards each."""

from __future__ import annotations

import sys
from typing import Any

from emulate.devices import strategies_made


def is_runtime_initialized() -> bool:
    """Whether TensorFlow's runtime is up in this process."""
    context = _context()
    return context is not None and context._context_handle is not None


def _context() -> Any:
    module = sys.modules.get("tensorflow.python.eager.context")
    return None if module is None else module._context


def num_strategies() -> int:
    """How many strategies this process has made."""
    return strategies_made()


def continue_strategies(number: int) -> None:
    """Count the strategies on from here."""
    strategies_made(number)


def forget_seeds() -> None:
    """Unseeded generators, as after a start: NumPy's, TensorFlow's, and what Keras derives from one."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if "tensorflow" in sys.modules:
        import tensorflow as tf
        from tensorflow.python.ops import stateful_random_ops

        tf.random.set_seed(None)
        stateful_random_ops.global_generator = None


def forget_names() -> None:
    """Keras counts its layers anew, the default graph is empty, kernels and their state are gone."""
    for name in ("keras", "tf_keras"):
        if (library := sys.modules.get(name)) is not None:
            library.utils.clear_session(free_memory=False) if name == "keras" else library.backend.clear_session()
    if is_runtime_initialized():
        context = _context()
        context._clear_caches()
        context.clear_kernel_cache()


def is_deterministic() -> bool:
    """Whether operations are asked to be deterministic."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


def set_deterministic(on: bool) -> None:
    """Ask for it, or no longer."""
    from tensorflow.python.framework import config

    (config.enable_op_determinism if on else config.disable_op_determinism)()


def graph_options() -> dict[str, Any]:
    """What was asked of Grappler; what strategies with collectives ask for is not among it."""
    context = _context()
    return {} if context is None else dict(context._optimizer_experimental_options)


def set_graph_options(options: dict[str, Any]) -> None:
    """Ask for exactly that of Grappler."""
    context = _context()
    context._optimizer_experimental_options.clear()
    context.set_optimizer_experimental_options(options)


def checks_numerics() -> bool:
    """Whether `tf.debugging.enable_check_numerics` is in force."""
    from tensorflow.python.debug.lib import check_numerics_callback

    return getattr(check_numerics_callback._state, "callback", None) is not None


def debugs_data() -> bool:
    """Whether tf.data runs Python functions eagerly."""
    from tensorflow.python.data.ops import debug_mode

    return bool(debug_mode.DEBUG_MODE)


def compares_tensors() -> bool:
    """Whether `==` on tensors compares their elements."""
    from tensorflow.python.framework import tensor

    return bool(tensor.Tensor._USE_EQUALITY)


def summary_writer() -> Any:
    """The writer that `tf.summary` writes to by default."""
    from tensorflow.python.ops import summary_ops_v2

    return summary_ops_v2._summary_state.writer


def device_scope() -> str:
    """The device that a `tf.device` which was not left asks for."""
    context = _context()
    return "" if context is None else str(context.device_name)


def unhealthy() -> list[str]:
    """What keeps this process from running another program, though it looks as before."""
    return []
