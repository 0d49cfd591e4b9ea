"""Let one process stand for several hosts: one strategy has the devices of all, and each host has its own input pipeline."""

from __future__ import annotations

import functools
import os
from typing import Any

from emulate.devices import upstream
from emulate.devices.caller import calling_module, is_program
from emulate.devices.plan import Note

ASKED_FOR_HOST = "asks-for-host"
"""Code of the note that the program asks for the number of its host."""


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

    cls._initialize_strategy = initialize
    cls._input_workers_with_options = workers
    cls._experimental_distribute_dataset = mirrored._experimental_distribute_dataset
    cls._distribute_datasets_from_function = mirrored._distribute_datasets_from_function
    if num_hosts > 1:
        _wait_for_partial_batches()
        _see_who_asks_for_the_number(note)


def _wait_for_partial_batches() -> None:
    """Let a replica without examples get none, as TensorFlow does wherever there are several hosts."""
    lib = upstream.input_lib()

    def enable_get_next_as_optional(strategy: Any, dataset: Any, cardinality: Any) -> bool:
        import tensorflow as tf

        is_enabled = getattr(strategy.extended, "experimental_enable_get_next_as_optional", False)
        return bool(is_enabled and cardinality != tf.data.INFINITE_CARDINALITY)

    lib._enable_get_next_as_optional = enable_get_next_as_optional


def _see_who_asks_for_the_number(note: Note) -> None:
    """Note when the program asks which host it is."""
    base: Any = type(os.environ)

    class Environment(base):
        __slots__ = ()  # else Python refuses to change the class of os.environ

        def __getitem__(self, name: Any) -> Any:
            if name == "TF_CONFIG" and _is_asked_by_program():
                note(ASKED_FOR_HOST, "TF_CONFIG")
            return super().__getitem__(name)

    os.environ.__class__ = Environment
    cls = upstream.config_resolver()
    for name in ("task_id", "task_type"):
        setattr(cls, name, _seen(getattr(cls, name), name, note))


def _seen(original: Any, name: str, note: Note) -> Any:
    @functools.wraps(original.fget)
    def read(self: Any) -> Any:
        if is_program(1):
            note(ASKED_FOR_HOST, f"cluster_resolver.{name}")
        return original.fget(self)

    return property(read, original.fset)


def _is_asked_by_program() -> bool:
    """Return whether the program reads the environment, also through Python's own modules."""
    depth = 2
    while calling_module(depth) in ("os", "collections.abc", "_collections_abc"):
        depth += 1
    return is_program(depth)
