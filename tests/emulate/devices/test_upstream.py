"""What the emulated devices take from TensorFlow's private parts is still there and still means the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.emulate.devices.hosts import Hosts


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def signature_of(expression: str) -> list[str]:
    from emulate import graph_functions
    from emulate import upstream as shared
    from emulate.devices import upstream

    return parameters(eval(expression, {"upstream": upstream, "shared": shared, "graph_functions": graph_functions}))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("upstream.context_class().device", ["self", "name"]),
        ("upstream.graph_class().device", ["self", "device_name_or_function"]),
        ("upstream.device_util().canonicalize", ["d", "default"]),
        ("upstream.prefetching().copy_to_device", ["target_device", "source_device"]),
        ("upstream.mirrored_extended().__init__", ["self", "container_strategy", "devices", "cross_device_ops"]),
        ("upstream.collective_extended()._initialize_local", ["self", "cluster_resolver", "devices"]),
        ("upstream.collective_extended()._initialize_local_devices", ["self", "cluster_resolver", "worker_device"]),
        (
            "upstream.central_extended()._initialize_local",
            ["self", "compute_devices", "parameter_device", "cluster_resolver"],
        ),
        (
            "shared.function_graph_class().capture_call_time_value",
            ["self", "closure", "spec", "key", "default_value", "placeholder"],
        ),
        ("graph_functions.collective_launcher().all_reduce", ["self", "input_tensor", "control_input", "options"]),
        ("graph_functions.collective_launcher()._all_gather", ["self", "input_tensor", "options"]),
        ("upstream.concrete_function_class()._call_flat", ["self", "tensor_inputs", "captured_inputs"]),
        ("upstream.communication_options().__init__", ["self", "bytes_per_pack", "timeout_seconds", "implementation"]),
        (
            "upstream.server_class().__init__",
            ["self", "server_or_cluster_def", "job_name", "task_index", "protocol", "config", "start"],
        ),
        ("upstream.context().set_logical_device_configuration", ["dev", "virtual_devices"]),
        ("upstream.context().set_visible_devices", ["devices", "device_type"]),
        ("upstream.context().set_memory_growth", ["dev", "enable"]),
        ("upstream.context().ensure_initialized", []),
        ("upstream.mirrored_run()._call_for_each_replica", ["distribution", "fn", "args", "kwargs"]),
        ("upstream.mirrored_extended()._get_local_replica_id", ["self", "replica_id_in_sync_group"]),
        ("upstream.collective_extended()._initialize_strategy", ["self", "cluster_resolver", "devices"]),
        ("upstream.collective_extended()._input_workers_with_options", ["self", "options"]),
        ("upstream.mirrored_extended()._experimental_distribute_dataset", ["self", "dataset", "options"]),
        ("upstream.mirrored_extended()._distribute_datasets_from_function", ["self", "dataset_fn", "options"]),
        ("upstream.input_lib()._enable_get_next_as_optional", ["strategy", "dataset", "cardinality"]),
        ("upstream.multi_device_iterator().get_next", ["self", "device"]),
        ("upstream.multi_device_iterator().get_next_as_optional", ["self"]),
        (
            "upstream.multi_device_iterator().__init__",
            [
                *("self", "dataset", "devices", "max_buffer_size", "prefetch_buffer_size", "source_device"),
                *("components", "element_spec"),
            ],
        ),
    ],
)
def test_a_function_we_replace_or_call_has_the_parameters_we_know(run: Hosts, expression: str, expected: list[str]) -> None:
    assert run(signature_of, expression) == expected


def test_the_attributes_we_read_and_set_are_there(run: Hosts) -> None:
    def program() -> Any:
        import tensorflow as tf

        from emulate.devices import upstream

        before = upstream.is_initialized()
        tf.constant(0)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        extended = strategy.extended
        launcher = extended._host_cross_device_ops._launchers[0]
        names = ("_num_workers", "_cross_device_ops", "_collective_key_base", "_host_cross_device_ops", "worker_devices")
        of_mirrored = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"]).extended
        assert type(of_mirrored._cross_device_ops).__name__ == "ReductionToOneDevice"  # what was chosen for it
        assert of_mirrored._communication_options.implementation.name == "RING"
        return (
            before,
            upstream.is_initialized(),
            [hasattr(extended, name) for name in names],
            extended._communication_options.implementation.name,
            (launcher._group_size, launcher._device[-5:]),
            tf.distribute.MirroredStrategy._collective_key_base,
            sorted(upstream.device_attributes().DESCRIPTOR.fields_by_name)[:3],
        )

    assert run(program) == (False, True, [True] * 5, "AUTO", (1, "CPU:0"), 0, ["device_type", "incarnation", "locality"])


def test_a_branch_of_a_condition_is_known_as_control_flow(run: Hosts) -> None:
    def program() -> list[bool]:
        import tensorflow as tf

        found = []

        def branch() -> Any:
            graph = tf.compat.v1.get_default_graph()
            found.extend([graph.is_control_flow_graph, graph.outer_graph.is_control_flow_graph])
            return tf.constant(1)

        tf.function(lambda x: tf.cond(x > 0, branch, branch))(tf.constant(1))
        return found[:2]

    assert run(program) == [True, False]


def test_every_public_spelling_of_a_function_is_answered(run: Hosts) -> None:
    def program() -> list[str]:
        import tensorflow as tf

        from emulate.devices import upstream
        from emulate.devices.config import DeviceAnswers

        wanted = {name for name in vars(DeviceAnswers) if not name.startswith("_")}
        modules = [*upstream.public_modules(), tf.config, tf.config.experimental, tf.test]
        return [
            f"{module.__name__}.{name}"
            for module in modules
            for name in wanted & set(dir(module))
            if "emulate" not in getattr(module, name).__code__.co_filename
        ]

    assert run(program) == []


def test_every_function_we_answer_exists(run: Hosts) -> None:
    def program() -> set[str]:
        from emulate.devices import upstream
        from emulate.devices.config import DeviceAnswers

        wanted = {name for name in vars(DeviceAnswers) if not name.startswith("_")}
        return wanted - {name for module in upstream.defining_modules() for name in vars(module)}

    assert run(program) == set()


def test_collectives_still_lose_their_keys_in_a_branch_without_us(run: Hosts) -> None:
    """When this fails TensorFlow has mended it, and `deferred_captures` can go."""

    def program() -> str:
        import tensorflow as tf

        from emulate import upstream

        cls = upstream.function_graph_class()
        cls.capture_call_time_value = cls.capture_call_time_value.__wrapped__
        strategy = tf.distribute.MirroredStrategy()

        def replica() -> Any:
            return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))

        inner = tf.function(lambda: strategy.reduce("SUM", strategy.run(replica), axis=None))
        outer = tf.function(lambda x: tf.cond(x > 0, inner, lambda: 0.0))
        try:
            return str(outer(tf.constant(1)))
        except tf.errors.InvalidArgumentError as error:
            return str(error)

    assert "You must feed a value for placeholder tensor" in run(program, devices=2, all_reduce="ring")
