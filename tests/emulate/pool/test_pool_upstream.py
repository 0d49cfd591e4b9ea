"""What is relied upon of TensorFlow's and Keras's private parts; fails when upstream changes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from emulate.cluster import HostContext
from emulate.errors import UsageError
from emulate.pool import HostResult, Pool


def returned(results: list[HostResult]) -> list[Any]:
    for result in results:
        assert result.status == "returned", (result.error and result.error.traceback_text, result)
    return [result.value for result in results]


def change_everything(context: HostContext) -> list[str]:
    """The settings whose change is not noticed."""
    import numpy as np
    import tensorflow as tf
    from keras import config, saving

    from emulate.pool.framework import _settings

    folder = os.environ["TMPDIR"]
    experimental, v1 = tf.config.experimental, tf.compat.v1
    changes: dict[str, Callable[[], Any]] = {
        "numpy.seterr": lambda: np.seterr(all="raise"),
        "numpy.set_printoptions": lambda: np.set_printoptions(precision=2),
        "tf.config.run_functions_eagerly": lambda: tf.config.run_functions_eagerly(True),
        "tf.config.set_soft_device_placement": lambda: tf.config.set_soft_device_placement(False),
        "tf.config.optimizer.set_jit": lambda: tf.config.optimizer.set_jit(True),
        "tf.config.optimizer.set_experimental_options": lambda: tf.config.optimizer.set_experimental_options(
            {"constant_folding": False}
        ),
        "tf.config.experimental.enable_tensor_float_32_execution": lambda: experimental.enable_tensor_float_32_execution(False),
        "tf.config.experimental.set_synchronous_execution": lambda: experimental.set_synchronous_execution(False),
        "tf.config.experimental.enable_op_determinism": experimental.enable_op_determinism,
        "tf.debugging.set_log_device_placement": lambda: tf.debugging.set_log_device_placement(True),
        "tf.debugging.disable_traceback_filtering": tf.debugging.disable_traceback_filtering,
        "tf.debugging.enable_check_numerics": tf.debugging.enable_check_numerics,
        "tf.data.experimental.enable_debug_mode": tf.data.experimental.enable_debug_mode,
        "tf.summary's writer": lambda: tf.summary.create_file_writer(folder).set_as_default(),
        "tf.summary.experimental.set_step": lambda: tf.summary.experimental.set_step(tf.Variable(7)),
        "tf.autograph.set_verbosity": lambda: tf.autograph.set_verbosity(3, alsologtostdout=True),
        "tf.experimental.numpy.experimental_enable_numpy_behavior": lambda: (
            tf.experimental.numpy.experimental_enable_numpy_behavior(dtype_conversion_mode="all")
        ),
        "tf.experimental.dispatch_for_api and its like": lambda: kept.append(_dispatch()),
        "tf.RegisterGradient": lambda: tf.RegisterGradient("Mine")(lambda op, grad: grad),
        "tf.register_tensor_conversion_function": lambda: tf.register_tensor_conversion_function(Mine, lambda *_: tf.ones([])),
        "tf.profiler.experimental.start": lambda: tf.profiler.experimental.start(folder),
        "the name scope": lambda: tf.name_scope("mine").__enter__(),
        "the device of tf.device": lambda: tf.device("CPU:0").__enter__(),
        "tf.distribute's strategy": lambda: tf.distribute.MirroredStrategy(["GPU:0"]).scope().__enter__(),
        "tf.compat.v1.disable_tensor_equality": v1.disable_tensor_equality,
        "tf.compat.v1.disable_resource_variables": v1.disable_resource_variables,
        "tf.compat.v1.disable_control_flow_v2": v1.disable_control_flow_v2,
        "keras.config.set_floatx": lambda: config.set_floatx("float64"),
        "keras.config.set_epsilon": lambda: config.set_epsilon(1e-3),
        "keras.config.set_image_data_format": lambda: config.set_image_data_format("channels_first"),
        "keras.config.set_dtype_policy": lambda: config.set_dtype_policy("mixed_bfloat16"),
        "what Keras finds by its name": lambda: sys.modules["keras.src.losses"].ALL_OBJECTS_DICT.update(mine=len),
        "Keras's custom objects": lambda: saving.get_custom_objects().update(mine=len),
        "the default graph": lambda: (kept.append(tf.Graph().as_default()), kept[-1].__enter__()),
        "tf.compat.v1.disable_eager_execution": lambda: None,  # only without a graph
    }
    if hasattr(config, "set_max_epochs"):  # not in Keras 3.8
        changes["keras.config.set_max_epochs"] = lambda: config.set_max_epochs(2)
        changes["keras.config.set_max_steps_per_epoch"] = lambda: config.set_max_steps_per_epoch(2)
    kept: list[Any] = []
    settings = {setting.name: setting for setting in _settings()}
    assert settings.keys() == changes.keys(), settings.keys() ^ changes.keys()
    before = {name: setting.get() for name, setting in settings.items()}
    missed = []
    for name, change in changes.items():
        change()
        if settings[name].get() == before[name] and name != "tf.compat.v1.disable_eager_execution":
            missed.append(name)
    return missed


class Mine:
    """A type of its own."""


def _dispatch() -> Any:
    import tensorflow as tf

    class Dispatcher(tf.__internal__.dispatch.GlobalOpDispatcher):
        def handle(self, op: Any, args: Any, kwargs: Any) -> Any:
            return self.NOT_SUPPORTED

    Dispatcher().register()
    return Dispatcher


def test_a_change_of_every_setting_is_noticed(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        assert returned(lease.run(change_everything)) == [[]]
        lease.run(lambda context: None)
    assert "it changed" in pool.statistics.reasons[0]


def change_what_can_be_put_back(context: HostContext) -> None:
    import numpy as np
    import tensorflow as tf
    from keras import config, saving

    from emulate.pool.upstream.settings import _NAMED

    np.seterr(all="raise")
    tf.ones([])
    tf.config.run_functions_eagerly(True)
    tf.config.set_soft_device_placement(False)
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.experimental.enable_op_determinism()
    tf.config.experimental.set_synchronous_execution(False)
    tf.summary.experimental.set_step(tf.Variable(7))
    tf.autograph.set_verbosity(3, alsologtostdout=True)
    tf.debugging.disable_traceback_filtering()
    tf.summary.create_file_writer(os.environ["TMPDIR"]).set_as_default()
    config.set_floatx("float64")
    config.set_epsilon(1e-3)
    config.set_image_data_format("channels_first")
    config.set_dtype_policy("mixed_bfloat16")
    saving.get_custom_objects()["mine"] = len
    for name in _NAMED:
        sys.modules[f"keras.src.{name}"].ALL_OBJECTS_DICT["mine"] = len


def test_what_has_a_way_back_is_put_back(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        returned(lease.run(change_what_can_be_put_back))
        returned(lease.run(lambda context: None))
    assert (pool.statistics.started, pool.statistics.reasons) == (1, [])


def look_at_runtime(context: HostContext) -> list[Any]:
    import tensorflow as tf

    from emulate.pool.upstream import runtime

    before = runtime.context()._initialized
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    tf.ones([])
    return [before, runtime.is_up(), runtime.context()._initialized, devices]


def test_a_warm_runtime_looks_as_if_it_were_not_up_until_the_first_operation(pool: Pool) -> None:
    with pool.lease("1x2") as lease:
        [fresh] = returned(lease.run(look_at_runtime))
        [warm] = returned(lease.run(look_at_runtime))
    assert fresh == warm == [False, True, True, ["/device:CPU:0", "/device:CPU:1"]]


def fail_in_a_collective(context: HostContext) -> str:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()

    def replica() -> Any:
        here = tf.distribute.get_replica_context()
        return here.all_reduce("SUM", tf.ones([2 + here.replica_id_in_sync_group]))

    try:
        tf.function(lambda: strategy.run(replica))()
    except tf.errors.OpError as error:
        return str(error)
    return "worked"


def test_a_collective_that_failed_in_silence_is_found(preload: Any) -> None:
    with Pool(preload=preload, all_reduce="ring") as pool, pool.lease("1x2") as lease:
        [text] = returned(lease.run(fail_in_a_collective))
        assert "Collective ops is aborted" in text
        returned(lease.run(lambda context: None))
        assert "collectives fail since one did" in pool.statistics.reasons[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"network": "mine"}, r"network must be one of own, host\. Received: network='mine'"),
        ({"all_reduce": "nccl"}, r"all_reduce must be one of .*\. Received: all_reduce='nccl'"),
        ({"max_hosts": 0}, r"A pool keeps at least one host\. Received: max_hosts=0"),
        ({"max_hosts": "a"}, r"A pool keeps at least one host\. Received: max_hosts='a'"),
        (
            {"environment": {"A": 1}},
            r"must have a text for each name\. Received: environment={'A': 1}\. Write it as {'A': '1'}",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(preload: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Pool(preload=preload, **options)
