"""A device's name means one device of this host, however it is spelled, and never CPU:0 in silence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulate.devices.hosts import HostFailed, Hosts


@pytest.fixture(scope="module")
def index_of_spelling(run: Hosts) -> dict[str, int]:
    def program() -> dict[str, int]:
        import keras
        import tensorflow as tf

        def placed(device: Any) -> int:
            with tf.device(device):
                return int(tf.Variable(1.0).device.rsplit(":", 1)[1])

        spellings = ["/gpu:2", "gpu:2", "GPU:2", "/GPU:2", "/device:gpu:2", "/device:GPU:2", "/job:localhost/device:GPU:2"]
        spellings += ["/job:localhost/replica:0/task:0/device:GPU:2", "/cpu:2", "CPU:2", "/device:CPU:2", "/cpu:0", ""]
        found = {spelling: placed(spelling) for spelling in spellings}
        found["spec"] = placed(tf.DeviceSpec(device_type="GPU", device_index=2))
        found["logical"] = placed(tf.config.list_logical_devices("GPU")[2])
        found["none"] = placed(None)
        with keras.device("gpu:2"):
            found["keras"] = int(tf.Variable(1.0).device.rsplit(":", 1)[1])
        with tf.compat.v1.device("/gpu:2"):
            found["v1"] = int(tf.Variable(1.0).device.rsplit(":", 1)[1])
        return found

    found: dict[str, int] = run(program)
    return found


def test_every_spelling_of_a_gpu_means_its_logical_cpu(index_of_spelling: dict[str, int]) -> None:
    first = {"/cpu:0", "", "none"}
    assert {spelling: index for spelling, index in index_of_spelling.items() if index != (0 if spelling in first else 2)} == {}


def test_placement_holds_inside_a_traced_function_and_nests(run: Hosts) -> None:
    def program() -> list[str]:
        import tensorflow as tf

        devices = []

        @tf.function
        def traced(x: Any) -> Any:
            with tf.device("/gpu:1"):
                y = tf.sin(x)
                with tf.device("/gpu:2"):
                    z = tf.cos(y)
            devices.extend([y.device, z.device])
            return z

        traced(tf.constant(1.0))
        return devices

    assert run(program) == ["/device:CPU:1", "/device:CPU:2"]


def test_graphs_of_tensorflow_1_place_too(run: Hosts) -> None:
    def program() -> list[str]:
        import tensorflow as tf

        with tf.Graph().as_default() as graph:
            with graph.device("/gpu:1"):
                by_name = tf.constant(1.0)
            with graph.device(lambda operation: "/device:GPU:2"):
                by_function = tf.constant(1.0)
            with tf.compat.v1.Session() as session:
                session.run([by_name, by_function])
        return [by_name.device, by_function.device]

    assert run(program) == ["/device:CPU:1", "/device:CPU:2"]


@pytest.mark.parametrize("device", ["/gpu:4", "GPU:4", "/cpu:4", "/job:localhost/replica:0/task:0/device:GPU:4"])
def test_a_device_that_is_not_there_is_an_error_that_names_both(run: Hosts, device: str) -> None:
    def program() -> None:
        import tensorflow as tf

        with tf.device(device):
            tf.constant(1.0)

    with pytest.raises(HostFailed) as raised:
        run(program)
    text = str(raised.value)
    assert f"A device that a program names must be there. Received: device={device!r}" in text
    assert "this host has GPU:0 to GPU:3 and CPU:0 to CPU:3" in text
    assert "verify on a topology with more devices per host, 1x5 say" in text


def test_a_missing_device_inside_a_traced_function_is_the_same_error(run: Hosts) -> None:
    def program() -> None:
        import tensorflow as tf

        @tf.function
        def traced() -> Any:
            with tf.device("/gpu:9"):
                return tf.constant(1.0) + 1

        traced()

    with pytest.raises(HostFailed, match=r"A device that a program names must be there. Received: device='/gpu:9'"):
        run(program)


def test_the_reference_folds_missing_devices_onto_its_one(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([gpus[0], gpus[1]], "GPU")
        with tf.device("/gpu:3"):
            gpu = tf.Variable(1.0).device
        with tf.device("/cpu:1"):
            cpu = tf.Variable(1.0).device
        return len(gpus), gpu[-5:], cpu[-5:], len(tf.config.list_logical_devices("GPU"))

    assert run(program, devices=1, reference=True) == (1, "CPU:0", "CPU:0", 1)
    assert run.notes == []


def test_datasets_go_to_the_device_they_are_sent_to(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        data = tf.data.Dataset.range(4)
        prefetched = data.apply(tf.data.experimental.prefetch_to_device("/gpu:1"))
        copied = data.apply(tf.data.experimental.copy_to_device("/gpu:2"))
        return [[int(x) for x in prefetched], [int(x) for x in copied], next(iter(prefetched)).device[-5:]]

    assert run(program) == [[0, 1, 2, 3], [0, 1, 2, 3], "CPU:1"]


def test_placement_switches_of_programs_do_no_harm(run: Hosts) -> None:
    def program() -> str:
        import tensorflow as tf

        tf.config.set_soft_device_placement(False)
        tf.debugging.set_log_device_placement(True)
        tf.config.experimental.enable_tensor_float_32_execution(False)
        with tf.device("/gpu:1"):
            return str((tf.constant(1.0) + 1).device[-5:])

    assert run(program) == "CPU:1"
