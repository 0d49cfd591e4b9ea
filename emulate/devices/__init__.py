"""A host's CPU as emulated GPUs, so that a program that was written for GPUs just works."""

from emulate.devices.all_reduce import all_reduce_in_use, strategies_made
from emulate.devices.choice import DEVICES, DeviceChoice, check_device, choose_device
from emulate.devices.install import forget_program, install
from emulate.devices.inventory import Gpu, Inventory, find_gpus
from emulate.devices.lease import GpuLease
from emulate.devices.machine import describe_machine
from emulate.devices.plan import ALL_REDUCE, DevicePlan, Note
from emulate.devices.sharing import Allotment, GpuShare, share_out

__all__ = [
    "ALL_REDUCE",
    "DEVICES",
    "Allotment",
    "DeviceChoice",
    "DevicePlan",
    "Gpu",
    "GpuLease",
    "GpuShare",
    "Inventory",
    "Note",
    "all_reduce_in_use",
    "check_device",
    "choose_device",
    "describe_machine",
    "find_gpus",
    "forget_program",
    "install",
    "share_out",
    "strategies_made",
]
