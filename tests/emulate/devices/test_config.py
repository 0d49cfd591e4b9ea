"""What a program asks TensorFlow about GPUs it is told as if they were there; TensorFlow and Keras are told the truth."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tests.emulate.devices.hosts import HostFailed, Hosts


def uninitialised() -> bool:
    from emulate.devices import upstream

    return not upstream.is_initialized()


def names(devices: list[Any]) -> list[str]:
    return [device.name for device in devices]


def test_the_runtime_stays_uninitialised(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        after_install = uninitialised()
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        return after_install, uninitialised()

    assert run(program) == (True, True)


def test_a_program_sees_as_many_gpus_as_the_host_has_devices(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        return (
            names(tf.config.list_physical_devices("GPU")),
            names(tf.config.list_physical_devices()),
            names(tf.config.experimental.list_physical_devices("GPU")),
            names(tf.compat.v1.config.experimental.list_physical_devices("GPU")),
            names(tf.config.list_logical_devices("GPU")),
            names(tf.config.experimental.list_logical_devices("GPU")),
            names(tf.config.get_visible_devices("GPU")),
        )

    physical = ["/physical_device:GPU:0", "/physical_device:GPU:1"]
    logical = ["/device:GPU:0", "/device:GPU:1"]
    expected = (physical, ["/physical_device:CPU:0", *physical], physical, physical, logical, logical, physical)
    assert run(program, devices=2) == expected


def test_a_program_that_emulates_on_cpu_itself_sees_all_logical_cpus(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        return names(tf.config.list_logical_devices("CPU"))

    assert run(program, devices=3) == ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]


def test_calls_from_inside_tensorflow_and_keras_see_the_truth(run: Hosts) -> None:
    def program() -> Any:
        import keras
        from tensorflow.python.distribute.cluster_resolver import cluster_resolver
        from tensorflow.python.eager import context

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return (
            model.jit_compile,
            sys.modules["keras.src.backend.tensorflow.rnn"]._is_gpu_available(),
            getattr(sys.modules["keras.src.backend.tensorflow.nn"], "_cpu_only", lambda: True)(),  # Keras 3.12 has none
            cluster_resolver.get_accelerator_devices("", None),
            context.num_gpus(),
        )

    assert run(program) == (False, False, True, [], 0)


def test_a_call_inside_a_traced_function_is_the_programs_own(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        @tf.function
        def traced() -> Any:
            return tf.constant(len(tf.config.list_physical_devices("GPU")))

        return int(traced())

    assert run(program) == 4


def test_visible_gpus_are_renumbered(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices(gpus[2:], "GPU")
        strategy = tf.distribute.MirroredStrategy()
        return (
            names(tf.config.get_visible_devices("GPU")),
            names(tf.config.list_logical_devices("GPU")),
            strategy.num_replicas_in_sync,
        )

    assert run(program) == (["/physical_device:GPU:2", "/physical_device:GPU:3"], ["/device:GPU:0", "/device:GPU:1"], 2)
    assert run.notes == [("gpus-hidden", "the program calls set_visible_devices: 2 of this host's 4 GPUs are visible to it")]


def test_hiding_every_gpu_leaves_one_cpu_as_on_a_gpu_machine(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        return tf.config.list_logical_devices("GPU"), tf.distribute.MirroredStrategy().num_replicas_in_sync

    assert run(program) == ([], 1)


def test_the_programs_own_cuda_visible_devices_counts(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        return len(tf.config.list_physical_devices("GPU")), tf.distribute.MirroredStrategy().num_replicas_in_sync

    assert run(program) == (2, 2)
    assert run.notes[0][0] == "gpus-hidden"


def test_cuda_visible_devices_of_the_users_shell_does_not_count(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        return len(tf.config.list_physical_devices("GPU"))

    assert run(program, environment={"CUDA_VISIBLE_DEVICES": "-1"}) == 4


def test_a_split_of_a_gpu_makes_more_logical_gpus(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        parts = [tf.config.LogicalDeviceConfiguration(memory_limit=512)] * 3
        tf.config.set_logical_device_configuration(gpus[0], parts)
        split = tf.config.get_logical_device_configuration(gpus[0])
        return len(split), len(tf.config.list_logical_devices("GPU")), tf.distribute.MirroredStrategy().num_replicas_in_sync

    assert run(program, devices=2) == (3, 4, 4)
    assert run.notes == [("gpu-split", "the program splits /physical_device:GPU:0 into 3: 4 logical GPUs on this host")]


def test_the_topology_overrides_a_programs_own_split_of_the_cpu(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.experimental.set_virtual_device_configuration(cpu, [tf.config.experimental.VirtualDeviceConfiguration()] * 8)
        strategy = tf.distribute.MirroredStrategy(tf.config.list_logical_devices("CPU"))
        return strategy.num_replicas_in_sync, len(tf.config.list_logical_devices("CPU"))

    assert run(program, devices=2) == (2, 2)
    assert run.notes == [("cpu-split", "the program splits its CPU into 8: it gets the topology's 2 devices instead")]


def test_a_program_that_hides_gpus_and_splits_its_cpu_gets_the_topologys_devices(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
        return tf.distribute.MirroredStrategy().num_replicas_in_sync

    assert run(program, devices=3) == 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("tf.config.set_visible_devices(gpus[:1], 'GPU')", "Visible devices cannot be modified after being initialized"),
        (
            "tf.config.experimental.set_memory_growth(gpus[0], True)",
            "Physical devices cannot be modified after being initialized",
        ),
        (
            "tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=1)] * 2)",
            "Virtual devices cannot be modified after being initialized",
        ),
        (
            "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)",
            "Virtual devices cannot be modified after being initialized",
        ),
    ],
)
def test_what_gpus_refuse_after_initialisation_is_refused_here(run: Hosts, change: str, text: str) -> None:
    def program() -> None:
        import tensorflow as tf

        tf.constant(0)
        gpus, cpu = tf.config.list_physical_devices("GPU"), tf.config.list_physical_devices("CPU")[0]
        exec(change, {"tf": tf, "gpus": gpus, "cpu": cpu, "__name__": "__main__"})

    with pytest.raises(HostFailed, match=text):
        run(program)


def test_saying_again_what_holds_is_accepted_after_initialisation(run: Hosts) -> None:
    def program() -> bool:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        tf.config.experimental.set_memory_growth(gpus[0], True)
        tf.constant(0)
        tf.config.experimental.set_memory_growth(gpus[0], True)
        tf.config.set_visible_devices(gpus, "GPU")
        return bool(tf.config.experimental.get_memory_growth(gpus[0]))

    assert run(program)


def test_memory_and_details_are_answered(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        gpu = tf.config.list_physical_devices("GPU")[1]
        info = tf.config.experimental.get_memory_info("GPU:1")
        tf.config.experimental.reset_memory_stats("GPU:1")
        details = tf.config.experimental.get_device_details(gpu)
        return info["current"] > 0, info["peak"] >= info["current"], details

    expected = {"device_name": "gpudist emulated GPU", "compute_capability": (8, 0)}
    assert run(program) == (True, True, expected)


def test_tests_for_a_gpu_find_one(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf
        from tensorflow.python.client import device_lib

        local = [device.name for device in device_lib.list_local_devices() if device.device_type == "GPU"]
        return tf.test.is_gpu_available(), tf.test.gpu_device_name(), tf.test.is_built_with_cuda(), local

    assert run(program, devices=2) == (True, "/device:GPU:0", True, ["/device:GPU:0", "/device:GPU:1"])


def test_unknown_devices_are_refused_as_tensorflow_refuses_them(run: Hosts) -> None:
    def program() -> None:
        import tensorflow as tf

        tf.config.set_visible_devices(tf.config.PhysicalDevice("/physical_device:GPU:7", "GPU"), "GPU")

    with pytest.raises(HostFailed, match="Unrecognized device: PhysicalDevice"):
        run(program)


def test_devices_are_set_up_also_when_tensorflow_is_imported_later(run: Hosts) -> None:
    import subprocess

    script = (
        "from emulate.devices import DevicePlan, install\n"
        "import sys\n"
        "install(DevicePlan(3), print)\n"
        "assert 'tensorflow' not in sys.modules\n"
        "import keras\n"
        "import tensorflow as tf\n"
        "print(len(tf.config.list_physical_devices('GPU')), len(tf.config.list_logical_devices('CPU')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "3 3\n"


def test_a_runtime_that_is_up_is_an_error(run: Hosts) -> None:
    def program() -> None:
        import tensorflow as tf

        from emulate.devices import DevicePlan, install

        tf.constant(0)
        install(DevicePlan(2), lambda code, text: None)

    with pytest.raises(HostFailed, match=r"Devices are set up before TensorFlow's runtime. Received: num_devices=2"):
        run(program)
