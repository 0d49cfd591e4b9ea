"""Describe what this machine has and what can run on it, for `gpudist devices`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import psutil

from emulate.devices.choice import what_tensorflow_says, why_blind
from emulate.devices.inventory import MIB, Gpu, Inventory, about_compiling, find_gpus, why_not_compiled
from emulate.devices.plan import share_out
from emulate.errors import Unavailable
from emulate.topology import MAX_DEVICES_PER_HOST, MAX_HOSTS, Topology
from gpudist_core.installed import unsupported

# Measured: the first host of a cluster costs about 500 MB, each further one about 100 MB (pages are shared with the parent).
_FIRST_HOST_BYTES = 500 * MIB
_HOST_BYTES = 100 * MIB
SHOWN_TOPOLOGIES = tuple(map(Topology.parse, ["1x1", "1x2", "1x4", "1x8", "2x1", "2x2", "2x4", "4x1", "4x2", "8x1"]))


def describe_machine() -> dict[str, Any]:
    """Look at this machine; TensorFlow is asked in a process of its own.

    Returns:
        `system`, `python`, `cpus`, `memory_bytes` (`total`, `available`), `tensorflow` (version or None), `gpus` (see
        `describe_gpus`), and `emulation` (`devices_per_host`, `hosts` as far as memory goes).

    Example:
        >>> describe_machine()["emulation"]["devices_per_host"]
        256
    """
    memory, tensorflow = psutil.virtual_memory(), what_tensorflow_says()
    problem = unsupported() or tensorflow.get("tensorflow_error")
    error = {"tensorflow_error": problem} if problem else {}
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": {"total": memory.total, "available": memory.available},
        "tensorflow": tensorflow["tensorflow"],
        **error,
        "gpus": describe_gpus(find_gpus(), tensorflow),
        "emulation": {"devices_per_host": MAX_DEVICES_PER_HOST, "hosts": _hosts_in(memory.available)},
    }


def describe_gpus(inventory: Inventory, tensorflow: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the GPUs, and which topologies can run on them.

    Args:
        inventory: The GPUs.
        tensorflow: What `what_tensorflow_says` answered.

    Returns:
        `available` and, where there are none, `why`; else `driver`, `seen_by_tensorflow`, `found` (each with `name`,
        `memory_bytes`, `compute_capability`, `tf32`, `uuid`), `left_out` (those that cannot be used), `kernels` (where the
        driver has to compile them), `unusable` (why TensorFlow cannot use them), `topologies` (`one_gpu_each`, `slices`,
        `too_large`) and `nccl`.
    """
    if not inventory.gpus:
        return {"available": False, "why": inventory.why}
    cannot = why_not_compiled(inventory.gpus, tensorflow, inventory.driver)
    compiled = cannot or about_compiling(inventory.gpus, tensorflow)
    blind = "" if cannot else why_blind(inventory, lambda: tensorflow)
    topologies = _topologies(inventory)
    return {
        "driver": inventory.driver,
        "seen_by_tensorflow": len(tensorflow["gpus"]),
        "found": [_about(gpu) for gpu in inventory.gpus],
        **({"left_out": list(inventory.left_out)} if inventory.left_out else {}),
        **({"kernels": compiled} if compiled else {}),
        **({"unusable": blind} if blind else {}),
        "topologies": topologies,
        "nccl": _where_nccl_sums([topology for topology in SHOWN_TOPOLOGIES if _may_use_nccl(inventory, topology)]),
    }


def _may_use_nccl(inventory: Inventory, topology: Topology) -> bool:
    try:
        return not share_out(inventory, topology).hosts[0].may_share_gpus
    except Unavailable:
        return False


def _where_nccl_sums(whole: list[Topology]) -> str:
    """Return where NCCL sums: in MirroredStrategy, and in MultiWorkerMirroredStrategy on request (TensorFlow 2.21)."""
    one_host = [str(topology) for topology in whole if topology.num_replicas > 1 and not topology.has_several_hosts]
    hosts = [str(topology) for topology in whole if topology.has_several_hosts]
    if not one_host + hosts:
        return "refuses slices and MIG instances of one GPU"
    asked = [f"on {', '.join(hosts)} where MultiWorkerMirroredStrategy is told to use it"] if hosts else []
    by_itself = [f"on {', '.join(one_host)} with MirroredStrategy"] if one_host else []
    return f"sums {', '.join(by_itself + asked)}; parts of a GPU are summed without it"


def _about(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "memory_bytes": {"total": gpu.total, "free": gpu.free},
        "compute_capability": ".".join(map(str, gpu.capability)),
        "tf32": "yes, off when runs are compared" if gpu.has_tf32 else "no",
        "uuid": gpu.uuid,
    }


def _topologies(inventory: Inventory) -> dict[str, Any]:
    whole, sliced, too_large = [], {}, []
    for topology in SHOWN_TOPOLOGIES:
        try:
            shares = share_out(inventory, topology).hosts
        except Unavailable:
            too_large.append(str(topology))
            continue
        if shares[0].is_sliced:
            sliced[str(topology)] = f"{shares[0].slices[0][0] / 1024:.1f} GiB each"
        else:
            whole.append(str(topology))
    return {"one_gpu_each": whole, "slices": sliced, "too_large": too_large}


def _hosts_in(available: int) -> int:
    return min(MAX_HOSTS, max(1, 1 + (available - _FIRST_HOST_BYTES) // _HOST_BYTES))
