"""Present a host's CPU as emulated GPUs, so that a program written for GPUs runs unchanged."""

from emulate.devices.all_reduce import all_reduce_in_use
from emulate.devices.install import install
from emulate.devices.inventory import Gpu, Inventory, about_compiling, find_gpus, kernel_folder
from emulate.devices.lease import PATIENCE, GpuLease, ask_until, take_name
from emulate.devices.machine import (
    DeviceChoice,
    check_tensorflow,
    choose_device,
    describe_machine,
    what_tensorflow_says,
    why_blind,
)
from emulate.devices.plan import ALL_REDUCE, Allotment, DevicePlan, GpuShare, is_short, share_out
from emulate.devices.virtual.hosts import ASKED_FOR_HOST

__all__ = [
    "ALL_REDUCE",
    "ASKED_FOR_HOST",
    "PATIENCE",
    "Allotment",
    "DeviceChoice",
    "DevicePlan",
    "Gpu",
    "GpuLease",
    "GpuShare",
    "Inventory",
    "about_compiling",
    "all_reduce_in_use",
    "ask_until",
    "check_tensorflow",
    "choose_device",
    "describe_machine",
    "find_gpus",
    "install",
    "is_short",
    "kernel_folder",
    "share_out",
    "take_name",
    "what_tensorflow_says",
    "why_blind",
]
