"""Describe the devices that a host will have. The plan is fixed when the host starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emulate.devices.sharing import GpuShare
from emulate.errors import UsageError

ALL_REDUCE = ("auto", "ring", "hierarchical", "one-device")

Note = Callable[[str, str], None]


@dataclass(frozen=True)
class DevicePlan:
    """Describe the devices of one host.

    Attributes:
        num_devices: Emulated GPUs of this host.
        num_hosts: Hosts of the topology that train.
        all_reduce: How replicas sum, one of `ALL_REDUCE`.
        reference: Whether this is the run on one device that others are compared with. There, a device that does not exist
            is folded onto the first, so that the same program runs.
        gpus: The physical GPUs that the devices are, or are slices of; None where they are made of the CPU.
        is_virtual: Whether the replicas take turns, all on one logical device.

    Raises:
        UsageError: When a number is below 1 or the all-reduce is unknown.
    """

    num_devices: int
    num_hosts: int = 1
    all_reduce: str = "auto"
    reference: bool = False
    gpus: GpuShare | None = None
    is_virtual: bool = False

    @property
    def num_cpus(self) -> int:
        """Return into how many logical devices the CPU is split.

        Virtual replicas are all on CPU:0, where TensorFlow places what names a device that is not there.
        """
        return 1 if self.is_virtual else self.num_devices

    @property
    def num_in_process(self) -> int:
        """Return how many devices the strategies of this process have: those of all virtual hosts."""
        return self.num_devices * (self.num_hosts if self.is_virtual else 1)

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise UsageError(f"A host has at least one device. Received: num_devices={self.num_devices}. Ask for 1 or more.")
        if self.all_reduce not in ALL_REDUCE:
            choices = ", ".join(ALL_REDUCE)
            raise UsageError(
                f"The all-reduce is one of {choices}. Received: all_reduce={self.all_reduce!r}. Choose one of them."
            )
