"""Describe the devices that a host will have, and decide which host computes on which GPU. No GPU is touched.

The plan is fixed when the host starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from emulate.devices.inventory import MIB, Gpu, Inventory
from emulate.errors import Unavailable, UsageError
from emulate.grouping import grouped
from emulate.told import counted
from emulate.topology import Topology

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


LEAST_RESERVE, MOST_RESERVE = 768 * MIB, 2048 * MIB
GPU_RESERVE = 256 * MIB
LEAST_SLICE = 256 * MIB
MOSTLY_FREE = 0.8
_WITHOUT_NCCL = "NCCL, which refuses two ranks on one GPU, is not what ran"


@dataclass(frozen=True)
class GpuShare:
    """Describe the GPUs of one host.

    Attributes:
        visible: UUIDs of the physical ones, in the order in which TensorFlow will number them.
        slices: For each of them the MiB of every logical GPU that is made of it; empty: it stays whole.
        are_parts: Whether a host of the topology has a MIG instance, so that two may be on one physical GPU.
        kernels: The folder in which CUDA keeps the kernels that it compiles; empty: CUDA decides.
    """

    visible: tuple[str, ...]
    slices: tuple[tuple[int, ...], ...] = ()
    are_parts: bool = False
    kernels: str = ""

    @property
    def is_sliced(self) -> bool:
        """Return whether the devices are parts of GPUs."""
        return bool(self.slices)

    @property
    def may_share_gpus(self) -> bool:
        """Return whether two devices may be on one physical GPU, which NCCL refuses."""
        return self.is_sliced or self.are_parts

    @property
    def owners(self) -> tuple[int, ...]:
        """Return, for each device, the number of the visible GPU that it is, or is part of."""
        parts = self.slices or ((0,),) * len(self.visible)
        return tuple(number for number, slices in enumerate(parts) for _ in slices)


@dataclass(frozen=True)
class Allotment:
    """Describe which host gets which GPUs in a topology.

    Attributes:
        hosts: One share for each host that trains.
        text: What the user should know about it.
    """

    hosts: tuple[GpuShare, ...]
    text: str

    @property
    def is_sliced(self) -> bool:
        """Return whether devices are parts of GPUs."""
        return self.hosts[0].is_sliced


def process_reserve(gpu: Gpu) -> int:
    """Return the memory in bytes that a process needs besides TensorFlow's: CUDA's context, its libraries, NCCL's buffers.

    TensorFlow itself leaves 1.5 GiB to the libraries alone on compute capability 8 and later (MinSystemMemory in gpu_device.cc,
    2.21), but not where the memory of a device is given as a number, as that of a slice is.
    """
    return max(LEAST_RESERVE, min(MOST_RESERVE, gpu.total // 20))


def usable(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the GPUs with memory for one process and one slice."""
    return [gpu for gpu in gpus if gpu.free >= process_reserve(gpu) + GPU_RESERVE + LEAST_SLICE]


def mostly_free(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the GPUs that other programs do not fill: most of their memory is free."""
    return [gpu for gpu in usable(gpus) if gpu.free >= MOSTLY_FREE * gpu.total]


def share_out(inventory: Inventory, topology: Topology) -> Allotment:
    """Give each device of a topology a GPU of its own where there are enough, else an equal slice of one.

    GPUs that other programs do not fill are preferred, then those of one model, then those with the most free memory.

    Args:
        inventory: What there is.
        topology: What is asked for.

    Returns:
        The shares of the hosts that train; a chief and parameter servers get none.

    Raises:
        Unavailable: When there is too little.
    """
    enough = usable(inventory.gpus)
    chosen = distinct(mostly_free(enough), topology) or distinct(enough, topology)
    if chosen:
        return _of_whole_gpus(chosen, topology)
    cuts = (_sliced(group, topology) for group in _prefixes(enough))
    cut = max(cuts, key=lambda cut: (cut.size, len(cut.gpus)), default=None)
    if cut is None or cut.size < LEAST_SLICE:
        raise Unavailable(_too_little(inventory, topology))
    return _of_slices(cut, topology)


def _of_whole_gpus(gpus: Sequence[Gpu], topology: Topology) -> Allotment:
    each, are_parts = topology.num_devices, any(gpu.is_part for gpu in gpus)
    uuids = [gpu.uuid for gpu in gpus]
    shares = tuple(GpuShare(tuple(uuids[at : at + each]), are_parts=are_parts) for at in range(0, len(gpus), each))
    mixed = " They are of several models, which round differently." if len({gpu.name for gpu in gpus}) > 1 else ""
    without = f": {_WITHOUT_NCCL}" if topology.num_replicas > 1 and are_parts else ""
    ran_on = f"{topology} ran on {counted(len(gpus), 'GPU')} ({_models(gpus)})"
    return Allotment(shares, f"{ran_on}, one for each device{without}.{mixed}")


def _of_slices(cut: _Cut, topology: Topology) -> Allotment:
    each, size = topology.num_devices, cut.size // MIB
    shares = []
    for at in range(0, topology.num_replicas, each):
        owned = [(owner, len(list(same))) for owner, same in groupby(cut.owners[at : at + each])]
        uuids, slices = tuple(cut.gpus[owner].uuid for owner, _ in owned), tuple((size,) * n for _, n in owned)
        shares.append(GpuShare(uuids, slices, any(gpu.is_part for gpu in cut.gpus)))
    text = (
        f"{topology} ran on {counted(len(cut.gpus), 'GPU')} ({_models(cut.gpus)}) in {topology.num_replicas} slices of "
        f"{cut.size / (1 << 30):.1f} GiB, one for each device: {_WITHOUT_NCCL}, and times say nothing."
    )
    return Allotment(tuple(shares), text)


def is_short(inventory: Inventory, topology: Topology) -> bool:
    """Return whether a topology is refused, or gets slices, only because GPUs are in use."""
    return _grade(inventory, topology) < _grade(inventory.idle(), topology)


def _grade(inventory: Inventory, topology: Topology) -> int:
    try:
        return 1 if share_out(inventory, topology).is_sliced else 2
    except Unavailable:
        return 0


def distinct(gpus: Sequence[Gpu], topology: Topology) -> list[Gpu]:
    """Return a GPU for each device, hosts one after the other; empty if there are too few."""
    if topology.num_devices > 1:  # CUDA shows a process one MIG instance, and no whole GPU beside it
        gpus = [gpu for gpu in gpus if not gpu.is_part]
    number = topology.num_replicas
    groups = [*_alike(gpus), list(gpus)]  # of several models only where none suffices
    enough = [sorted(group, key=_most_free)[:number] for group in groups if len(group) >= number]
    return sorted(enough[0], key=gpus.index) if enough else []


@dataclass(frozen=True)
class _Cut:
    """Describe a way to slice GPUs: the GPU of each device, and the memory of each device."""

    gpus: tuple[Gpu, ...]
    owners: tuple[int, ...]
    size: int


def _sliced(gpus: Sequence[Gpu], topology: Topology) -> _Cut:
    owners = _owners(gpus, topology)
    used = sorted(set(owners))
    size = min(_size(gpus[number], number, owners, topology) for number in used)
    return _Cut(tuple(gpus[number] for number in used), tuple(used.index(number) for number in owners), size)


def _owners(gpus: Sequence[Gpu], topology: Topology) -> tuple[int, ...]:
    """Return the number of the GPU that each device is part of, in turn, as evenly as possible."""
    devices = range(topology.num_replicas)
    if any(gpu.is_part for gpu in gpus):
        number = min(len(gpus), topology.num_hosts)
        return tuple(device // topology.num_devices * number // topology.num_hosts for device in devices)
    number = min(len(gpus), topology.num_replicas)
    return tuple(device * number // topology.num_replicas for device in devices)


def _size(gpu: Gpu, number: int, owners: Sequence[int], topology: Topology) -> int:
    """Return the size of each slice of one GPU in bytes, whole MiB."""
    here = [device for device, owner in enumerate(owners) if owner == number]
    processes = len({device // topology.num_devices for device in here})
    if gpu.is_exclusive and processes > 1:
        return 0
    return (gpu.free - GPU_RESERVE - processes * process_reserve(gpu)) // len(here) // MIB * MIB


def _alike(gpus: Iterable[Gpu]) -> list[list[Gpu]]:
    """Group GPUs by model, the larger groups first."""
    models = grouped(((gpu.name, gpu.capability, gpu.is_part), gpu) for gpu in gpus)
    return sorted(models.values(), key=lambda group: -sum(gpu.free for gpu in group))


def _prefixes(gpus: Iterable[Gpu]) -> Iterable[list[Gpu]]:
    """Yield, for each model, the GPU with the most free memory, the two with the most, and so on."""
    for group in _alike(gpus):
        ordered = sorted(group, key=_most_free)
        yield from (sorted(ordered[:number], key=group.index) for number in range(1, len(ordered) + 1))


def _most_free(gpu: Gpu) -> tuple[int, int]:
    return -gpu.free, gpu.index


def _too_little(inventory: Inventory, topology: Topology) -> str:
    there = [
        f"{gpu.name} with {gpu.free // MIB} MiB free{', for one process at a time' if gpu.is_exclusive else ''}"
        for gpu in inventory.gpus
    ]
    has = f"{counted(len(there), 'GPU')} ({', '.join(there)}{inventory.beside})" if there else f"no GPU ({inventory.why})"
    return (
        f"Each device is a GPU, or a slice of one with at least {LEAST_SLICE // MIB} MiB beside {GPU_RESERVE // MIB} MiB and, "
        f"by the GPU's size, {LEAST_RESERVE // MIB} to {MOST_RESERVE // MIB} MiB for each process. "
        f"Received: device='gpu', topology='{topology}' with {topology.num_replicas} devices, where this machine has {has}. "
        "Ask for fewer devices, free the GPUs, or use --device cpu."
    )


def _models(gpus: Sequence[Gpu]) -> str:
    return ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
