"""Let one process stand for several hosts, whose replicas take turns.

One strategy has the devices of all, and each host has its own input pipeline. The batches of virtual replicas are dealt from
one iterator, in the order in which TensorFlow deals them to real devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from emulate.devices import upstream
from emulate.devices.config import calling_module, is_program
from emulate.devices.plan import DevicePlan, Note
from emulate.devices.virtual.replicas import VirtualReplicas
from emulate.errors import UsageError
from emulate.imports import tf, when_imported
from emulate.point import instead_of


def install_virtual(plan: DevicePlan, note: Note) -> None:
    """Trace a function given to `Strategy.run` once for all replicas, and deal their batches from one iterator.

    Args:
        plan: The hosts and devices that the process stands for.
        note: Told what the report should mention.
    """

    @instead_of(upstream.mirrored_run(), "_call_for_each_replica")
    def call_for_each_replica(real: Any, distribution: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        if tf.executing_eagerly() or len(distribution.extended.worker_devices) == 1:
            return real(distribution, fn, args, kwargs)
        return VirtualReplicas(distribution).run(fn, args, kwargs)

    for cls in (upstream.mirrored_extended(), upstream.collective_extended()):

        @instead_of(cls, "_get_local_replica_id")
        def local(real: Any, self: Any, number: Any) -> Any:
            # The replica that is traced for all takes its values from the first of them.
            return 0 if tf.is_tensor(number) else real(self, number)

    deal_from_one_iterator()
    stand_for_hosts(plan.num_hosts, plan.num_devices, note)


ASKED_FOR_HOST = "asks-for-host"
"""Code of the note that the program asks for the number of its host."""
OF_SEVERAL_HOSTS = (
    "Virtual replicas are those of MirroredStrategy on one host, or of MultiWorkerMirroredStrategy. Received: a program with "
    "{name}. Verify it without --virtual."
)


def stand_for_hosts(num_hosts: int, num_devices: int, note: Note) -> None:
    """Change MultiWorkerMirroredStrategy; call once in a process.

    Args:
        num_hosts: How many virtual hosts there are.
        num_devices: How many devices each has.
        note: Told when the program asks for the number of its host.
    """
    cls, mirrored = upstream.collective_extended(), upstream.mirrored_extended()

    def initialize(self: Any, cluster_resolver: Any, devices: Any) -> None:
        self._initialize_local(cluster_resolver, devices=devices)

    def workers(self: Any, options: Any = None) -> Any:
        host = upstream.device_util().get_host_for_device(self._worker_device)
        fetches = not options or options.experimental_fetch_to_device
        own = [self.worker_devices[first : first + num_devices] for first in range(0, len(self.worker_devices), num_devices)]
        return upstream.input_workers([(host, tuple(devices) if fetches else (host,) * len(devices)) for devices in own])

    def enable_get_next_as_optional(strategy: Any, dataset: Any, cardinality: Any) -> bool:
        # A replica without examples gets none, as TensorFlow does it wherever there are several hosts.
        is_enabled = getattr(strategy.extended, "experimental_enable_get_next_as_optional", False)
        return bool(is_enabled and cardinality != tf.data.INFINITE_CARDINALITY)

    cls._initialize_strategy = initialize
    cls._input_workers_with_options = workers
    cls._experimental_distribute_dataset = mirrored._experimental_distribute_dataset
    cls._distribute_datasets_from_function = mirrored._distribute_datasets_from_function
    if num_hosts > 1:
        upstream.data_distribution().replicate = lambda dataset, devices: _Clones(dataset)
        upstream.input_lib()._enable_get_next_as_optional = enable_get_next_as_optional
        when_imported(_MAKE, _refuse_core)
        _see_who_asks_for_the_number(note)


_MAKE = "gpudist_core.strategies.make"


def _refuse_core() -> None:
    """Refuse gpudist_core's strategy of several hosts at once: its hosts compare their data, and would wait for ever."""

    def refuse(*_: object) -> None:
        raise UsageError(OF_SEVERAL_HOSTS.format(name="gpudist_core.make_strategy, whose hosts wait for each other"))

    vars(sys.modules[_MAKE])["wait_for"] = refuse


_STATE_OF = {
    "ShuffleDatasetV3": "DummySeedGenerator",
    "ShuffleAndRepeatDatasetV2": "DummySeedGenerator",
    "CacheDatasetV2": "DummyMemoryCache",
}
"""Operations of a dataset that refer to a state, and what in its place lets a copy of the dataset make its own (TF 2.21)."""


class _Clones:
    """Give each host a copy of a dataset, with its own order of shuffles and its own cache: real hosts share none.

    Args:
        dataset: What the program distributes.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        definition = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph(strip_device_assignment=True).numpy())
        nodes = {node.name: node for node in definition.node}
        for node in definition.node:
            state = nodes.get(node.input[-1].partition(":")[0]) if node.op in _STATE_OF else None
            if state is not None and state.op == "Const":
                state.op = _STATE_OF[node.op]
                state.attr.clear()
        self._definition = definition.SerializeToString()

    def __getitem__(self, device: str) -> Any:
        made = upstream.data_distribution()._RemoteDataset(tf.constant(self._definition), device, self._dataset.element_spec)
        return made.with_options(self._dataset.options())


def _see_who_asks_for_the_number(note: Note) -> None:
    """Note when the program asks which host it is."""
    base: Any = type(os.environ)

    class VirtualEnvironment(base):
        __slots__ = ()  # else Python refuses to change the class of os.environ

        def __getitem__(self, name: Any) -> Any:
            if name == "TF_CONFIG" and _is_asked_by_program():
                note(ASKED_FOR_HOST, "TF_CONFIG")
            return super().__getitem__(name)

    os.environ.__class__ = VirtualEnvironment
    cls = upstream.config_resolver()
    for name in ("task_id", "task_type"):
        _note_reads(cls, name, note)


def _note_reads(cls: Any, name: str, note: Note) -> None:
    @instead_of(cls, name)
    def read(original: Any, self: Any) -> Any:
        if is_program(2):
            note(ASKED_FOR_HOST, f"cluster_resolver.{name}")
        return original(self)


def _is_asked_by_program() -> bool:
    """Return whether the program reads the environment, also through Python's own modules."""
    depth = 2
    while calling_module(depth) in ("os", "collections.abc", "_collections_abc"):
        depth += 1
    return is_program(depth)


def deal_from_one_iterator() -> None:
    """Change the iterator over several devices; call once in a process.

    TensorFlow 2.21 makes an iterator with threads and buffers for each device, which takes 35 ms a replica.
    """
    cls = upstream.multi_device_iterator()

    @instead_of(cls, "__init__")
    def init(real: Any, self: Any, dataset: Any = None, devices: Any = None, *args: Any, **kwargs: Any) -> None:
        if dataset is None:
            real(self, dataset, devices, *args, **kwargs)
            return
        iterator = iter(dataset)
        self._element_spec, self._devices = dataset.element_spec, devices
        self._source_device = kwargs.get("source_device", "/cpu:0")
        self._multi_device_iterator_resource = iterator._iterator_resource
        self._device_iterators = [iterator] * len(devices)

    def get_next(self: Any, device: Any = None) -> Any:
        if device is not None:
            return self._device_iterators[self._devices.index(device)].get_next()
        following = [iterator.get_next for iterator in self._device_iterators]
        return _one_after_the_other(
            following, lambda element: [tensor.op for tensor in tf.nest.flatten(element, expand_composites=True)[:1]]
        )

    def get_next_as_optional(self: Any) -> Any:
        following = [iterator.get_next_as_optional for iterator in self._device_iterators]
        return _one_after_the_other(following, lambda optional: [optional._variant_tensor.op])

    cls.get_next, cls.get_next_as_optional = get_next, get_next_as_optional


def _one_after_the_other(following: list[Callable[[], Any]], ops_of: Callable[[Any], list[Any]]) -> list[Any]:
    """Call each; in a graph, where the replicas' iterators are inputs of their own, in this order."""
    made: list[Any] = []
    for call in following:
        with tf.control_dependencies([] if tf.executing_eagerly() or not made else ops_of(made[-1])):
            made.append(call())
    return made
