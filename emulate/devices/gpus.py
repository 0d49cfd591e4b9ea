"""Keep the state of the GPUs that a program sees: which exist, which are visible, and how they are split."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from emulate.devices import upstream
from emulate.devices.plan import DevicePlan, Note
from emulate.imports import tf

VISIBLE = "CUDA_VISIBLE_DEVICES"
_T = TypeVar("_T")


class _Folded(list[_T]):
    """List the devices of the reference run, where an index past the end gives the last device."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(min(index, len(self) - 1) if isinstance(index, int) and self else index)


class EmulatedGpus:
    """Hold the state of one host's emulated GPUs, and of the CPU that they are made of.

    Emulated GPU number i is logical CPU number i. (`PhysicalGpus` are what the same topology has on a machine with GPUs.)

    Args:
        plan: What the host was given.
        note: Says something that the report shows.
        shown: CUDA_VISIBLE_DEVICES as it was before the program could write it.

    Attributes:
        plan: What the host was given.
        note: Says something that the report shows.
        cpu_split: Into how many devices the program itself split the CPU; None if it did not.
        version: Counts the changes, so that what was derived from an earlier state is known to be old.
        kind: What TensorFlow calls the devices that these GPUs are.
    """

    kind = "CPU"

    def __init__(self, plan: DevicePlan, note: Note, shown: str | None) -> None:
        self.plan = plan
        self.note = note
        self.cpu_split: int | None = None
        self.version = 0
        self._shown = shown
        self._visible: list[Any] | None = None
        self._splits: dict[Any, list[Any]] = {}
        self._growth: dict[Any, bool | None] = {}

    @property
    def physical(self) -> list[Any]:
        """Return all emulated physical GPUs."""
        return self._listed(list(self._all))

    @functools.cached_property
    def _all(self) -> list[Any]:
        """Return the GPUs, found at first use as in TensorFlow: until then the program may set CUDA_VISIBLE_DEVICES."""
        wanted, count = os.environ.get(VISIBLE), self.plan.num_devices
        if wanted is not None and wanted != self._shown:
            count = _count_cuda(wanted, self.plan.num_devices, self.plan.reference)
            if count < self.plan.num_devices:
                self._note_hidden(f"sets CUDA_VISIBLE_DEVICES={wanted!r}", count)
        names = [f"/physical_device:GPU:{i}" for i in range(count)]
        return [tf.config.PhysicalDevice(name=name, device_type="GPU") for name in names]

    @property
    def visible(self) -> list[Any]:
        """Return the physical GPUs that the program left visible."""
        return self._listed(list(self._all if self._visible is None else self._visible))

    @property
    def num_logical(self) -> int:
        """Return the number of logical GPUs, including the program's own splits."""
        count = sum(len(self._splits.get(device, [None])) for device in self.visible)
        return min(count, 1) if self.plan.reference else count

    @property
    def num_cpus(self) -> int:
        """Return the number of logical CPUs that there are, or that virtual replicas stand on."""
        return max(self.plan.num_in_process, self.num_logical)

    @property
    def num_for_strategies(self) -> int:
        """Return on how many devices a strategy without named devices trains.

        GPUs if there are any, else CPUs, as in TensorFlow.
        """
        return self.num_logical or (self.plan.num_devices if self.cpu_split else 1)

    def logical(self, real: Callable[[str], Sequence[Any]]) -> list[Any]:
        """Return the logical GPUs, under the names of the logical CPUs that they are.

        Args:
            real: Lists the true logical devices of a kind.

        Returns:
            One for each visible GPU, or for each part of a split one.
        """
        names = [cpu.name for cpu in real("CPU") if int(cpu.name.rsplit(":", 1)[1]) < self.num_logical]
        if self.plan.is_virtual:
            names = [f"{names[0].rpartition(':')[0]}:{number}" for number in range(self.num_logical)]
        return self._listed([tf.config.LogicalDevice(name.replace("CPU", "GPU"), "GPU") for name in names])

    def details(self, real: Callable[[Any], dict[str, Any]], device: Any) -> dict[str, Any]:
        """Return what a program learns about a GPU: the model and its compute capability."""
        # With tensor cores, for programs that ask before they choose mixed precision.
        return {"device_name": "gpudist emulated GPU", "compute_capability": (8, 0)}

    def show(self, devices: list[Any]) -> None:
        """Make only these GPUs visible."""
        self._check_known(devices)
        if devices == self.visible:
            return
        _refuse_late("Visible")
        self._visible = list(dict.fromkeys(devices))
        if len(self._visible) < self.plan.num_devices:
            self._note_hidden("calls set_visible_devices", len(self._visible))
        self.split_cpu()

    def split(self, device: Any, parts: list[Any]) -> None:
        """Split one GPU into logical ones."""
        self._check_known([device])
        if any(part.memory_limit is None for part in parts):
            raise ValueError("Setting memory limit is required for GPU virtual devices")
        if self._splits.get(device) == parts:
            return
        _refuse_late("Virtual")
        self._splits[device] = list(parts)
        self.note(
            "gpu-split", f"the program splits {device.name} into {len(parts)}: {self.num_logical} logical GPUs on this host"
        )
        self.split_cpu()

    def split_of(self, device: Any) -> list[Any] | None:
        """Return how the program split a GPU, or None."""
        self._check_known([device])
        return self._splits.get(device)

    def set_growth(self, device: Any, enable: bool) -> None:
        """Remember whether memory grows on demand, which has no meaning here."""
        self._check_known([device])
        if device in self._splits:
            raise ValueError("Cannot set memory growth on device when virtual devices configured")
        if self._growth.get(device) == enable:
            return
        _refuse_late("Physical")
        self._growth[device] = enable

    def growth_of(self, device: Any) -> bool | None:
        """Return the last value given to `set_growth`."""
        self._check_known([device])
        return self._growth.get(device)

    def split_cpu(self) -> None:
        """Have TensorFlow split the CPU anew after a change, which is possible until its runtime is up."""
        self.version += 1
        split_cpu(1 if self.plan.is_virtual else self.num_cpus)

    def split_cpu_as_program(self, parts: list[Any]) -> None:
        """Replace the program's own split of the CPU by the topology's number of devices, with a note."""
        if any(part.memory_limit is not None for part in parts):
            raise ValueError("Setting memory limit on CPU virtual devices is currently not supported")
        if self.cpu_split == len(parts):
            return
        _refuse_late("Virtual")
        self.cpu_split = len(parts)
        if len(parts) != self.plan.num_devices and not self.plan.reference:
            instead = f"it gets the topology's {self.plan.num_devices} devices instead"
            self.note("cpu-split", f"the program splits its CPU into {len(parts)}: {instead}")

    def _note_hidden(self, how: str, count: int) -> None:
        if not self.plan.reference:
            text = f"the program {how}: {count} of this host's {self.plan.num_devices} GPUs are visible to it"
            self.note("gpus-hidden", text)

    def _listed(self, devices: list[Any]) -> list[Any]:
        return _Folded(devices) if self.plan.reference else devices

    def _check_known(self, devices: Sequence[Any]) -> None:
        for device in devices:
            if device not in self._all:
                raise ValueError(f"Unrecognized device: {device!r}")


def split_cpu(number: int) -> None:
    """Have TensorFlow split the CPU into so many logical devices."""
    context = upstream.context()
    cpu = context.list_physical_devices("CPU")[0]
    context.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(number)])


def _refuse_late(kind: str) -> None:
    """Raise the error that TensorFlow raises for a change after its runtime has started."""
    if upstream.is_initialized():
        raise RuntimeError(f"{kind} devices cannot be modified after being initialized")


def _count_cuda(wanted: str, available: int, reference: bool) -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves. Like CUDA, ignore everything after an unknown index."""
    count = 0
    for entry in filter(None, (part.strip() for part in wanted.split(","))):
        if entry.removeprefix("-").isdecimal() and not (0 <= int(entry) < available or (reference and int(entry) >= 0)):
            break
        count += 1
    return min(count, available)
