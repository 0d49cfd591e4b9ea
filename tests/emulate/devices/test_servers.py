"""A server of a host on GPUs has the devices of that host, told to a TensorFlow whose GPUs are made up."""

from __future__ import annotations

from typing import Any

from tests.emulate.devices.hosts import Hosts

SLICED = [1000, 1000]
WHOLE: list[int] = []


def told(slices: list[int], *, given: str = "", by_default: str = "", hidden: bool = False) -> Any:
    """In a host: the GPU options and the number of GPUs of the server that a program makes."""
    import tensorflow as tf
    from google.protobuf import text_format
    from tensorflow.core.protobuf import config_pb2, tensorflow_server_pb2

    from emulate.devices import upstream
    from emulate.devices.install import give_servers_their_gpus

    context = upstream.context()
    context._initialize_physical_devices()
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    context._physical_devices.append(gpu)
    context._visible_device_list.append(gpu)
    context._memory_growth_map[gpu] = None
    if slices:
        context._virtual_device_map[gpu] = [tf.config.LogicalDeviceConfiguration(memory_limit=size) for size in slices]
    made: list[Any] = []
    upstream.server_class().__init__ = lambda self, *args: made.append(args)
    give_servers_their_gpus(lambda: context.set_visible_devices([], "GPU") if hidden else None)
    place: Any = {"worker": ["localhost:1"]}
    if by_default:
        place = tensorflow_server_pb2.ServerDef()
        text_format.Parse(by_default, place.default_session_config)
    config = text_format.Parse(given, config_pb2.ConfigProto()) if given else None
    tf.distribute.Server(place, protocol="grpc", config=config, start=False)
    [(place, job, task, protocol, config, start)] = made
    assert (job, task, protocol, start) == (None, None, "grpc", False)
    options = config.gpu_options
    limits = [list(one.memory_limit_mb) for one in options.experimental.virtual_devices]
    return limits, options.visible_device_list, config.device_count.get("GPU"), options.per_process_gpu_memory_fraction, config


def test_a_server_takes_the_slices_of_its_host_and_no_more(run: Hosts) -> None:
    assert run(told, SLICED)[:3] == ([[1000, 1000]], "0", 2)


def test_a_server_has_the_whole_gpus_of_its_host_and_none_that_the_program_hides(run: Hosts) -> None:
    assert run(told, WHOLE)[:3] == ([[]], "0", 1)
    assert run(lambda: told(WHOLE, hidden=True))[:3] == ([], "", 0)


def test_what_the_program_gives_a_server_stays(run: Hosts) -> None:
    def wishes(slices: list[int], given: str, by_default: str = "") -> Any:
        limits, _, _, fraction, config = told(slices, given=given, by_default=by_default)
        return limits, fraction, config.gpu_options.allow_growth, list(config.device_filters)

    assert run(wishes, WHOLE, "gpu_options { per_process_gpu_memory_fraction: 0.5 }") == ([], 0.5, False, [])
    assert run(wishes, SLICED, "device_filters: '/job:ps'") == ([[1000, 1000]], 0, False, ["/job:ps"])
    assert run(wishes, SLICED, "", "device_filters: '/job:ps'") == ([[1000, 1000]], 0, False, [])  # TensorFlow adds it
    own = "gpu_options { experimental { virtual_devices { memory_limit_mb: 300 } } }"
    assert run(wishes, SLICED, own)[0] == [[300]]


def test_a_share_of_the_gpus_memory_gives_way_to_the_slice(run: Hosts) -> None:
    given = "gpu_options { per_process_gpu_memory_fraction: 0.5 allow_growth: true }"

    def wish() -> Any:
        limits, _, _, fraction, config = told(SLICED, given=given)
        return limits, fraction, config.gpu_options.allow_growth

    assert run(wish) == ([[1000, 1000]], 0, True)
