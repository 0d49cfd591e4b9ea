"""A host's CPU as emulated GPUs, so that a program that was written for GPUs just works."""

from emulate.devices.all_reduce import all_reduce_in_use
from emulate.devices.install import install
from emulate.devices.machine import describe_machine
from emulate.devices.plan import ALL_REDUCE, DevicePlan, Note

__all__ = ["ALL_REDUCE", "DevicePlan", "Note", "all_reduce_in_use", "describe_machine", "install"]
