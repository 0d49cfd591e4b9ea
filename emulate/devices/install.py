"""Turn this process into a host with the devices of its topology: emulated GPUs, or real ones."""

from __future__ import annotations

import os

from emulate.devices import upstream
from emulate.devices.all_reduce import AllReduceChoice
from emulate.devices.config import DeviceAnswers, answer_program
from emulate.devices.fixes import defer_past_control_flow, give_servers_their_gpus, leave_datasets_untuned, sum_in_one_order
from emulate.devices.gpus import VISIBLE, EmulatedGpus, split_cpu
from emulate.devices.names import DeviceNames, translate_placement
from emulate.devices.physical import PhysicalGpus, hide_gpus
from emulate.devices.plan import DevicePlan, Note
from emulate.devices.strategies import use_emulated_devices
from emulate.devices.virtual import install_virtual
from emulate.errors import UsageError
from emulate.imports import when_imported

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
    when_imported("tensorflow", lambda: _install(plan, _once(note), shown))


def _install(plan: DevicePlan, note: Note, shown: str | None) -> None:
    if upstream.is_initialized():
        raise UsageError(
            f"Devices are set up before TensorFlow's runtime. Received: num_devices={plan.num_devices} in a process that has "
            "run an operation. Start the host in a process that has not."
        )
    gpus = _gpus(plan, note, shown)
    names = DeviceNames(gpus)
    choice = AllReduceChoice(plan, note)
    answer_program(DeviceAnswers(gpus, names))
    translate_placement(names)
    use_emulated_devices(gpus, names, choice)
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


def _gpus(plan: DevicePlan, note: Note, shown: str | None) -> EmulatedGpus:
    if plan.gpus is not None:
        return PhysicalGpus(plan, note)
    hide_gpus()
    gpus = EmulatedGpus(plan, note, shown)
    split_cpu(plan.num_cpus)
    return gpus


def _once(note: Note) -> Note:
    def say(code: str, text: str) -> None:
        if (code, text) not in _said:
            _said.add((code, text))
            note(code, text)

    return say
