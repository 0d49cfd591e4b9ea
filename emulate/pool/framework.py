"""Restore what a job may change in TensorFlow and Keras: generators, names, caches, settings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emulate.devices import forget_program
from emulate.pool.upstream import functions, runtime, settings, state
from emulate.topology import Topology


@dataclass(frozen=True)
class _Setting:
    """Describe a setting of the whole process. Without `put` it cannot be restored."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any] | None = None


class Framework:
    """Hold the settings of TensorFlow, Keras and NumPy at one moment."""

    def __init__(self) -> None:
        self._settings = _settings()
        with runtime.as_before():
            self._values = {setting.name: setting.get() for setting in self._settings}

    def begin(self) -> None:
        """Be as a process that has just started, for a job."""
        state.forget_seeds()
        runtime.begin_job()

    def restore(self) -> list[str]:
        """Put back what can be; what cannot."""
        runtime.end_job()
        changed = self._changed()
        functions.forget_traces()
        state.forget_names()
        state.forget_seeds()
        changed += [one for one in self._changed() if one not in changed]  # Keras forgets some settings with its names
        for setting in changed:
            if setting.put is not None:
                setting.put(self._values[setting.name])
        stuck = [one.name for one in changed if one.put is None or one.get() != self._values[one.name]]
        return [f"it changed {', '.join(stuck)}"] if stuck else []

    def _changed(self) -> list[_Setting]:
        return [one for one in self._settings if one.get() != self._values[one.name]]


def check(topology: Topology, host: int) -> list[str]:
    """Return why TensorFlow's runtime cannot serve another job like the first."""
    found = [runtime.unlike_a_fresh_one(topology.has_several_hosts), state.collectives_fail(host)]
    if not forget_program():
        found.append("it split devices")
    return [reason for reason in found if reason]


def _settings() -> list[_Setting]:
    found = []
    if "numpy" in sys.modules:
        found += _of_numpy()
    if "tensorflow" in sys.modules:
        found += _of_tensorflow()
    if "keras" in sys.modules:
        found += _of_keras()
    return found


def _of_numpy() -> list[_Setting]:
    import numpy as np

    return [
        _Setting("numpy.seterr", np.geterr, lambda value: np.seterr(**value)),
        _Setting("numpy.set_printoptions", lambda: repr(np.get_printoptions())),
    ]


def _of_tensorflow() -> list[_Setting]:
    import tensorflow as tf

    config, debugging, v1 = tf.config, tf.debugging, tf.compat.v1
    return [
        _Setting("tf.config.run_functions_eagerly", config.functions_run_eagerly, config.run_functions_eagerly),
        _Setting("tf.config.set_soft_device_placement", config.get_soft_device_placement, config.set_soft_device_placement),
        _Setting("tf.config.optimizer.set_jit", config.optimizer.get_jit),
        _Setting("tf.config.optimizer.set_experimental_options", settings.graph_options, settings.set_graph_options),
        _Setting(
            "tf.config.experimental.enable_tensor_float_32_execution",
            config.experimental.tensor_float_32_execution_enabled,
            config.experimental.enable_tensor_float_32_execution,
        ),
        _Setting(
            "tf.config.experimental.set_synchronous_execution",
            config.experimental.get_synchronous_execution,
            config.experimental.set_synchronous_execution,
        ),
        _Setting("tf.config.experimental.enable_op_determinism", settings.is_deterministic, settings.set_deterministic),
        _Setting("tf.debugging.set_log_device_placement", debugging.get_log_device_placement),
        _Setting(
            "tf.debugging.disable_traceback_filtering",
            debugging.is_traceback_filtering_enabled,
            lambda on: (debugging.enable_traceback_filtering if on else debugging.disable_traceback_filtering)(),
        ),
        _Setting("tf.debugging.enable_check_numerics", settings.callbacks),
        _Setting("tf.data.experimental.enable_debug_mode", settings.debugs_data),
        _Setting("tf.compat.v1.disable_eager_execution", v1.executing_eagerly_outside_functions),
        _Setting("tf.compat.v1.disable_control_flow_v2", v1.control_flow_v2_enabled),
        _Setting("tf.compat.v1.disable_resource_variables", v1.resource_variables_enabled),
        _Setting("tf.compat.v1.disable_tensor_equality", settings.compares_tensors),
        _Setting("tf.summary's writer", settings.summary_writer, settings.set_summary_writer),
        _Setting("tf.summary.experimental.set_step", settings.summary_step, settings.set_summary_step),
        _Setting("tf.autograph.set_verbosity", settings.autograph_verbosity, settings.set_autograph_verbosity),
        _Setting("tf.experimental.numpy.experimental_enable_numpy_behavior", settings.promotes_types),
        _Setting("tf.experimental.dispatch_for_api and its like", settings.dispatchers),
        _Setting("tf.RegisterGradient", settings.gradients),
        _Setting("tf.register_tensor_conversion_function", settings.conversions),
        _Setting("tf.profiler.experimental.start", settings.is_profiling),
        _Setting("the name scope", settings.name_scope),
        _Setting("the default graph", settings.graph_is_default),
        _Setting("tf.distribute's strategy", tf.distribute.has_strategy),
        _Setting("the device of tf.device", settings.device_scope),
    ]


def _of_keras() -> list[_Setting]:
    import keras

    config = keras.config
    return [
        _Setting("keras.config.set_floatx", config.floatx, config.set_floatx),
        _Setting("keras.config.set_epsilon", config.epsilon, config.set_epsilon),
        _Setting("keras.config.set_image_data_format", config.image_data_format, config.set_image_data_format),
        _Setting(
            "keras.config.set_dtype_policy",
            lambda: config.dtype_policy().name,
            config.set_dtype_policy,
        ),
        *(
            _Setting(f"keras.config.set_{name}", getattr(config, name), getattr(config, f"set_{name}"))
            for name in ("max_epochs", "max_steps_per_epoch")
            if hasattr(config, name)  # Keras 3.8 has neither
        ),
        _Setting("what Keras finds by its name", settings.objects_by_name, settings.set_objects_by_name),
        _Setting(
            "Keras's custom objects",
            lambda: dict(keras.saving.get_custom_objects()),
            lambda objects: (keras.saving.get_custom_objects().clear(), keras.saving.get_custom_objects().update(objects)),
        ),
    ]
