"""Turn this process into a host with the devices of its topology: emulated GPUs, or real ones.

Strategies use the emulated devices: all of them, or those that the program names. TensorFlow 2.21 is changed where a program
on emulated devices would fail, hang or compute something else than on real ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from emulate.devices import upstream
from emulate.devices.all_reduce import AllReduceChoice
from emulate.devices.config import DeviceAnswers, answer_program
from emulate.devices.gpus import VISIBLE, EmulatedGpus, split_cpu
from emulate.devices.names import DeviceNames, translate_placement
from emulate.devices.physical import PhysicalGpus, hide_gpus
from emulate.devices.plan import DevicePlan, Note
from emulate.devices.virtual.hosts import OF_SEVERAL_HOSTS, install_virtual
from emulate.errors import UsageError
from emulate.graph_functions import collective_launcher
from emulate.imports import tf, when_imported
from emulate.point import instead_of
from emulate.upstream import control_flow_root, dataset_class, function_graph_class

_said: set[tuple[str, str]] = set()


def install(plan: DevicePlan, note: Note) -> None:
    """Give this host its devices, now or as soon as TensorFlow has been imported; the runtime is not initialised.

    Args:
        plan: How many devices, and how they are summed.
        note: Called with a code and a text for what the report should mention, once for each text.

    Raises:
        UsageError: When TensorFlow's runtime is up already.
        Unavailable: When TensorFlow does not see the GPUs that the plan gives to this host.
    """
    shown = os.environ.get(VISIBLE)  # the program may write it, and import TensorFlow after that

    def note_once(code: str, text: str) -> None:
        if (code, text) not in _said:
            _said.add((code, text))
            note(code, text)

    when_imported("tensorflow", lambda: _install(plan, note_once, shown))


def _install(plan: DevicePlan, note: Note, shown: str | None) -> None:
    if upstream.is_initialized():
        raise UsageError(
            f"Devices are set up before TensorFlow's runtime. Received: num_devices={plan.num_devices} in a process that has "
            "run an operation. Start the host in a process that has not."
        )
    gpus: EmulatedGpus
    if plan.gpus is not None:
        gpus = PhysicalGpus(plan, note)
    else:
        hide_gpus()
        gpus = EmulatedGpus(plan, note, shown)
        split_cpu(plan.num_cpus)
    names = DeviceNames(gpus)
    choice = AllReduceChoice(plan, note)
    answer_program(DeviceAnswers(gpus, names))
    translate_placement(names)
    _mirrored(gpus.plan, names, choice)
    _multi_worker(gpus.plan, names, choice)
    _central_storage(gpus.plan, names)
    if isinstance(gpus, PhysicalGpus):
        give_servers_their_gpus(gpus.hide_unseen)
    else:
        leave_datasets_untuned()
    if choice.replaces:
        choice.without_nccl()
        choice.refused.install()
        defer_past_control_flow(choice.refused.say_in_a_branch)
    if plan.is_virtual:
        install_virtual(plan, note)
    elif plan.all_reduce == "ring":
        sum_in_one_order()


def _mirrored(plan: DevicePlan, names: DeviceNames, choice: AllReduceChoice) -> None:
    @instead_of(upstream.mirrored_extended(), "__init__")
    def init(real: Any, self: Any, container_strategy: Any, devices: Any = None, cross_device_ops: Any = None) -> None:
        if plan.is_virtual and plan.num_hosts > 1:
            raise UsageError(OF_SEVERAL_HOSTS.format(name=type(container_strategy).__name__))
        devices = names.of_strategy(devices) if devices else names.all_for_strategy()
        choice.new_keys(container_strategy)
        real(self, container_strategy, devices=devices, cross_device_ops=choice.on_one_host(cross_device_ops, len(devices)))
        choice.remember(self)


def _multi_worker(plan: DevicePlan, names: DeviceNames, choice: AllReduceChoice) -> None:
    cls = upstream.collective_extended()

    def devices_of(self: Any, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        # TensorFlow 2.21 takes one CPU however many there are.
        devices = tuple(names.all_for_strategy(worker_device, plan.num_hosts if plan.is_virtual else 1))
        return devices, "GPU" if "GPU" in devices[0] else "CPU"

    @instead_of(cls, "_initialize_local")
    def local(real: Any, self: Any, cluster_resolver: Any, devices: Any = None) -> None:
        choice.new_keys(self)
        real(self, cluster_resolver, devices=names.of_strategy(devices) if devices else None)

    @instead_of(cls, "__init__")
    def init(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        choice.for_multi_worker(self)

    cls._initialize_local_devices = devices_of


def _central_storage(plan: DevicePlan, names: DeviceNames) -> None:
    @instead_of(upstream.central_extended(), "_initialize_local")
    def local(real: Any, self: Any, compute_devices: Any, parameter_device: Any, cluster_resolver: Any = None) -> None:
        if plan.is_virtual:
            raise UsageError(OF_SEVERAL_HOSTS.format(name="CentralStorageStrategy"))
        devices = names.of_strategy(compute_devices) if compute_devices else names.all_for_strategy()
        real(self, devices, names.real(parameter_device), cluster_resolver=cluster_resolver)


def defer_past_control_flow(tell: Callable[[], None]) -> None:
    """Fix how the keys of collectives get to a tf.function that is called inside `cond` or `while`; call once in a process.

    A collective's key is captured at call time. Called in a branch of a `cond`, the function asks the branch for the key, and a
    branch is never fed one: `You must feed a value for placeholder tensor 'cond/else/_1/cond/Placeholder_2'`. That stops
    `steps_per_execution` and optimizers that are built inside a tf.function. Here the function around the `cond` is asked.

    Args:
        tell: Called whenever a program needs it.
    """

    @instead_of(function_graph_class(), "capture_call_time_value")
    def capture(real: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = control_flow_root(self)
        if graph is not self:
            tell()
        with graph.as_default():
            return real(graph, *args, **kwargs)


def sum_in_one_order() -> None:
    """Make the ring's sum independent of which replica holds which value; call once in a process.

    So topologies of equal size agree bit by bit. A ring adds in the order of the replicas. Two hosts with two devices take the
    shares of a batch in another order than one host with four (TensorFlow deals shares out host by host), so the same numbers
    are added in another order. Here the values are gathered along the ring, sorted element by element and then added.
    """

    @instead_of(collective_launcher(), "all_reduce")
    def all_reduce(real: Any, self: Any, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        # Two addends need no order: a + b and b + a are the same.
        if self._group_size <= 2 or not input_tensor.dtype.is_floating:
            return real(self, input_tensor, control_input, options)
        return _gather_and_add(self, input_tensor, control_input, options)


def _gather_and_add(launcher: Any, tensor: Any, control_input: Any, options: Any) -> Any:
    # Nothing gathers 16 bits of bfloat16; float32 has all of its numbers, and the values are added as what they are.
    wide = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
    with tf.device(launcher._device), tf.control_dependencies([] if control_input is None else [control_input]):
        row = tf.cast(tf.reshape(tensor, [1, -1]), wide)
    gathered = launcher._all_gather(row, options)
    with tf.device(launcher._device):
        rows = tf.unstack(tf.cast(tf.reshape(gathered, [launcher._group_size, -1]), tensor.dtype))
        # Sorted element by element over the rows: few wide operations instead of many small sorts.
        for low, high in _network(len(rows)):
            rows[low], rows[high] = tf.minimum(rows[low], rows[high]), tf.maximum(rows[low], rows[high])
        total = functools.reduce(tf.add, rows)
        return tf.ensure_shape(tf.reshape(total, tf.shape(tensor)), tensor.shape)


def _network(number: int) -> list[tuple[int, int]]:
    """Return the comparisons of Batcher's odd-even merge sort for any number of values."""
    comparisons = []
    outer = 1
    while outer < number:
        inner = outer
        while inner >= 1:
            for start in range(inner % outer, number - inner, 2 * inner):
                for i in range(min(inner, number - start - inner)):
                    low, high = start + i, start + i + inner
                    if low // (2 * outer) == high // (2 * outer):
                        comparisons.append((low, high))
            inner //= 2
        outer *= 2
    return comparisons


def give_servers_their_gpus(before: Callable[[], None]) -> None:
    """Let every `tf.distribute.Server` of this process compute on the GPUs of its host; call once.

    It makes its devices from the configuration that it is given, and from none where the program gives none (TF 2.21,
    server_lib._make_server_def): what was set of the process's devices would not hold for it, and every server would take all
    memory of a GPU of which its host has a slice.

    Args:
        before: Called before each server is made.
    """

    @instead_of(upstream.server_class(), "__init__")
    def init(
        real: Any,
        self: Any,
        server_or_cluster_def: Any,
        job_name: Any = None,
        task_index: Any = None,
        protocol: Any = None,
        config: Any = None,
        start: Any = True,
    ) -> None:
        before()
        by_default = getattr(server_or_cluster_def, "default_session_config", None)
        real(self, server_or_cluster_def, job_name, task_index, protocol, _with_gpus(config, by_default), start)


def _with_gpus(config: Any, by_default: Any) -> Any:
    """Add the devices of this process to a server's configuration, unless the program sets them."""
    ours = upstream.context().config
    said, made = type(ours)(), type(ours)()
    for given in (by_default, config):
        if given is not None:
            said.MergeFrom(given)
    if config is not None:
        made.CopyFrom(config)
    wanted, there = said.gpu_options, ours.gpu_options
    if not said.HasField("gpu_options"):
        made.gpu_options.CopyFrom(there)
        if "GPU" not in said.device_count:
            made.device_count["GPU"] = ours.device_count["GPU"]
    elif any(gpu.memory_limit_mb for gpu in there.experimental.virtual_devices) and not wanted.experimental.virtual_devices:
        made.gpu_options.visible_device_list = there.visible_device_list
        made.gpu_options.experimental.virtual_devices.MergeFrom(there.experimental.virtual_devices)
        made.gpu_options.per_process_gpu_memory_fraction = 0  # what a slice has is a number, and TensorFlow refuses both
    return made


def leave_datasets_untuned() -> None:
    """Let datasets run without the tuning thread, which may hang at the end of an epoch; call once in a process.

    tf.data starts a thread for each iterator that tunes it, first after 10 ms, then after twice as long each time, up to a
    minute. An iterator that ends wakes that thread and waits for it; but the flag that says so is set after the wake-up, so
    that on a busy machine the thread sees none and sleeps on, and the iterator (there is one for each device) waits up to a
    minute. Emulated devices have no spare cores to tune for: where a program does not ask for the tuning itself, it is off, and
    what it would have chosen has tf.data's own fixed defaults.
    """

    @instead_of(dataset_class(), "_apply_debug_options")
    def apply(real: Any, self: Any) -> Any:
        dataset = real(self)
        if dataset.options().autotune.enabled is not None:
            return dataset
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)
