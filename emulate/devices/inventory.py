"""List the GPUs of this machine as the driver (NVML) reports them. This starts no CUDA, so that the process can still fork."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

MIB = 1 << 20
_TF32_SINCE = (8, 0)
_PROHIBITED = ", whose compute mode is prohibited: `nvidia-smi -c DEFAULT` as root changes that"
_NO_INSTANCE = (
    ", in MIG mode without an instance: `nvidia-smi mig -cgi PROFILE -C` as root makes one, `nvidia-smi -mig 0` ends the mode"
)


@dataclass(frozen=True)
class Gpu:
    """Describe one GPU, or one MIG instance of a GPU.

    Attributes:
        index: The number of the GPU in the driver's order, that of the PCI bus.
        uuid: What CUDA_VISIBLE_DEVICES takes.
        name: The model.
        total: Bytes of memory.
        free: Bytes that nobody uses now.
        capability: CUDA's compute capability.
        is_part: Whether it is a MIG instance, of which CUDA shows one to a process.
        is_exclusive: Whether it takes one process at a time (compute mode EXCLUSIVE_PROCESS, which many clusters set).
        unusable: Why nothing can run on it; empty where it can.
    """

    index: int
    uuid: str
    name: str
    total: int
    free: int
    capability: tuple[int, int] = (0, 0)
    is_part: bool = False
    is_exclusive: bool = False
    unusable: str = ""

    @property
    def has_tf32(self) -> bool:
        """Return whether float32 matrix products may be rounded to TF32 (Ampere and later)."""
        return self.capability >= _TF32_SINCE


@dataclass(frozen=True)
class Inventory:
    """List the GPUs that this process may use.

    Attributes:
        gpus: In the order of CUDA_VISIBLE_DEVICES, else of the driver.
        driver: The driver's version; None where there is none.
        why: Why there is no GPU; empty where there is one.
        left_out: Each GPU that is there and cannot be used, with the reason.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    why: str = ""
    left_out: tuple[str, ...] = ()

    def idle(self, uuids: Collection[str] | None = None) -> Inventory:
        """Return the inventory as if nobody used these GPUs. None means all GPUs."""
        freed = [replace(gpu, free=gpu.total) if uuids is None or gpu.uuid in uuids else gpu for gpu in self.gpus]
        return replace(self, gpus=tuple(freed))

    @property
    def beside(self) -> str:
        """Return the text about GPUs that are left out beside usable ones; empty if there are none."""
        return f"; left out: {', '.join(self.left_out)}" if self.gpus and self.left_out else ""


def find_gpus() -> Inventory:
    """Ask the driver, and leave out what CUDA_VISIBLE_DEVICES hides and what nothing can run on.

    Returns:
        The GPUs, or why there is none.

    Example:
        >>> inventory = find_gpus()
        >>> bool(inventory.gpus) != bool(inventory.why)
        True
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Inventory(why=f"no NVIDIA driver answers: {error}")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        all_gpus = [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _told(pynvml, index)]
    except pynvml.NVMLError as error:
        return Inventory(why=f"the NVIDIA driver cannot say which GPUs there are: {error}")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return _shown(all_gpus, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _shown(all_gpus: Sequence[Gpu], driver: str, wanted: str | None) -> Inventory:
    shown = visible(all_gpus, wanted)
    if not all_gpus:
        return Inventory((), driver, "the NVIDIA driver finds no GPU")
    if not shown:
        return Inventory((), driver, f"CUDA_VISIBLE_DEVICES={wanted!r} hides all {len(all_gpus)}")
    gpus = tuple(gpu for gpu in shown if not gpu.unusable)
    left_out = tuple(f"GPU {gpu.index} ({gpu.name}{gpu.unusable})" for gpu in shown if gpu.unusable)
    return Inventory(gpus, driver, "" if gpus else f"no GPU can be used: {', '.join(left_out)}", left_out)


def visible(gpus: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves. Like CUDA, ignore everything after an entry that matches none.

    Args:
        gpus: All GPUs.
        wanted: The variable; None where it is not set.

    Returns:
        Those it names, in its order: by number, or by the beginning of a UUID. Numbers count in the order of the PCI bus.
    """
    if wanted is None:
        return tuple(gpus)
    named: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None:
            break
        if gpu in named:  # CUDA then shows none at all
            return ()
        named.append(gpu)
    return tuple(named)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    matching = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _told(nvml: Any, index: int) -> list[Gpu]:
    """Return what the driver reports about one GPU.

    A GPU that it cannot report (it fell off the bus) does not affect others.
    """
    try:
        return list(_gpus_at(nvml, index))
    except nvml.NVMLError as error:
        return [Gpu(index, "", "", 0, 0, unusable=f"of which the driver cannot tell more: {error}")]


def _gpus_at(nvml: Any, index: int) -> Iterator[Gpu]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name, capability = _text(nvml.nvmlDeviceGetName(device)), tuple(nvml.nvmlDeviceGetCudaComputeCapability(device))
    mode, is_split = _compute_mode(nvml, device), _is_in_mig_mode(nvml, device)
    parts = list(_mig_instances(nvml, device)) if is_split else [device]
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED or not parts:
        why = _NO_INSTANCE if is_split else _PROHIBITED
        yield Gpu(index, _text(nvml.nvmlDeviceGetUUID(device)), name, 0, 0, capability, unusable=why)
        return
    exclusive = mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    for part in parts:
        total, free = _memory(nvml, part)
        shown = f"{name} (MIG)" if is_split else name
        yield Gpu(index, _text(nvml.nvmlDeviceGetUUID(part)), shown, total, free, capability, is_split, exclusive)


def _compute_mode(nvml: Any, device: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetComputeMode(device))
    except nvml.NVMLError_NotSupported:  # a GPU of a virtual machine
        return int(nvml.NVML_COMPUTEMODE_DEFAULT)


def _is_in_mig_mode(nvml: Any, device: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(device)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _mig_instances(nvml: Any, device: Any) -> Iterator[Any]:
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        with contextlib.suppress(nvml.NVMLError_NotFound):
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, i)


def _memory(nvml: Any, device: Any) -> tuple[int, int]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
    except nvml.NVMLError_NotSupported:  # a GPU that shares the processor's memory
        shared = psutil.virtual_memory()
        return int(shared.total), int(shared.available)
    return int(memory.total), int(memory.free)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
