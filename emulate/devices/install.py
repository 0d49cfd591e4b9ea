"""Turn this process into a host with the devices of its topology: emulated GPUs, or real ones.

Strategies use the emulated devices: all of them, or those that the program names.
"""

from __future__ import annotations

import os
from typing import Any

from emulate.devices import upstream
from emulate.devices.all_reduce import AllReduceChoice
from emulate.devices.config import DeviceAnswers, answer_program
from emulate.devices.fixes import defer_past_control_flow, give_servers_their_gpus, leave_datasets_untuned, sum_in_one_order
from emulate.devices.gpus import VISIBLE, EmulatedGpus, split_cpu
from emulate.devices.names import DeviceNames, translate_placement
from emulate.devices.physical import PhysicalGpus, hide_gpus
from emulate.devices.plan import DevicePlan, Note
from emulate.devices.virtual.hosts import OF_SEVERAL_HOSTS, install_virtual
from emulate.errors import UsageError
from emulate.imports import when_imported
from emulate.point import instead_of

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
