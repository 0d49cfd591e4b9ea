"""Decide what `--device` means on this machine, CPU or GPU, and describe what it has and what can run on it."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from emulate.devices.inventory import MIB, Inventory, about_compiling, find_gpus, why_not_compiled
from emulate.devices.lease import ask_until, is_leased, patience_now
from emulate.devices.plan import MOSTLY_FREE, distinct, is_short, mostly_free, share_out, usable
from emulate.errors import Unavailable, UsageError
from emulate.told import Told, counted, told
from emulate.topology import MAX_DEVICES_PER_HOST, MAX_HOSTS, Topology
from gpudist_core.installed import unsupported

DEVICES = ("cpu", "gpu", "auto")
_LIMIT_SECONDS = 120
_NOT_LOADED = re.compile(r"Could not load dynamic library '([^']+)'")
_OUR_FOLDER = str(Path(__file__).resolve().parents[2])
_WITH_OURS = "import sys; sys.path.append(sys.argv[1])\n"
_ASK_TENSORFLOW = """
import ctypes
import json
import tensorflow as tf
from gpudist_core.environments import load_cuda_libraries
load_cuda_libraries()
build = tf.sysconfig.get_build_info()
known = ctypes.c_int()
try:
    refused = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(known))
except (OSError, AttributeError):
    refused = True
gpus = [{"name": d.name, **{k: str(v) for k, v in tf.config.experimental.get_device_details(d).items()}}
        for d in tf.config.list_physical_devices("GPU")]
print("\\n" + json.dumps({
    "tensorflow": tf.__version__,
    "with_cuda": tf.test.is_built_with_cuda(),
    "gpus": gpus,
    "built_for": list(build.get("cuda_compute_capabilities", [])),
    "cuda": build.get("cuda_version"),
    "driver_cuda": None if refused else f"{known.value // 1000}.{known.value % 1000 // 10}",
}))
"""


@dataclass(frozen=True)
class DeviceChoice:
    """Describe the devices that compute.

    Attributes:
        kind: `cpu` or `gpu`.
        why: Why `auto` chose it; empty where it was asked for, and where there was nothing to choose.
        lacking: Why a topology cannot be had, for each of which that is so, while others can.
    """

    kind: str
    why: str = ""
    lacking: dict[Topology, Told] = field(default_factory=dict)


def choose_device(device: str, topologies: Sequence[Topology]) -> DeviceChoice:
    """Decide what computes on this machine: one kind for all topologies, and for the reference.

    Args:
        device: `cpu`, `gpu`, or `auto`: GPUs where each device of every topology can have one of its own, with 80 % of its
            memory free.
        topologies: What is to run, at least one.

    Returns:
        The choice.

    Raises:
        UsageError: For another word, and where no supported TensorFlow is installed.
        Unavailable: When `gpu` is asked for, and no topology can be had on this machine's GPUs.

    Example:
        >>> choose_device("cpu", [Topology.parse("1x4")]).kind
        'cpu'
    """
    if device not in DEVICES:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}. Received: device={device!r}. Choose one of them.")
    check_tensorflow()
    if device == "cpu":
        return DeviceChoice("cpu")
    there = ask_until(_to_be_had, lambda inventory: not _is_short(device, topologies, inventory), patience_now())
    return decide(device, topologies, there, what_tensorflow_says)


def _to_be_had() -> Inventory:
    """Return the GPUs that a cluster can get. GPUs used by other clusters count, because clusters wait for each other."""
    there = find_gpus()
    return there.idle({gpu.uuid for gpu in there.gpus if is_leased(gpu.uuid)})


def decide(
    device: str, topologies: Sequence[Topology], inventory: Inventory, ask: Callable[[], dict[str, Any]]
) -> DeviceChoice:
    """Decide between `gpu` and `cpu`.

    Args:
        device: `gpu` or `auto`.
        topologies: What is to run.
        inventory: The GPUs of this machine, as if no cluster used them.
        ask: Says what TensorFlow sees; called where there are GPUs, since it takes seconds.

    Returns:
        The choice.

    Raises:
        Unavailable: When `gpu` is asked for and cannot be had.
    """
    blind = why_blind(inventory, ask) if inventory.gpus else inventory.why
    if device == "auto":
        why = blind or _why_too_few(inventory, topologies)
        if why:
            are_there = bool(inventory.gpus or inventory.left_out)
            return DeviceChoice("cpu", f"--device auto chose the CPU, because {why}." if are_there else "")
        has = f"{len(inventory.gpus)}{inventory.beside}"
        return DeviceChoice("gpu", f"--device auto chose this machine's GPUs: it has {has}.")
    if blind:
        numbers = ", ".join(f"{topology} ({counted(topology.num_replicas, 'device')})" for topology in topologies)
        raise Unavailable(
            f"--device gpu needs GPUs that TensorFlow can use. Received: device='gpu' for {numbers}, and {blind}. "
            "Use --device cpu, or a machine with GPUs: `gpudist devices` says what this one has."
        )
    lacking = {}
    for topology in topologies:
        try:
            share_out(inventory, topology)
        except Unavailable as error:
            lacking[topology] = told("lack-of-gpus")(str(error))
    if len(lacking) == len(topologies):
        raise Unavailable(next(iter(lacking.values())))
    return DeviceChoice("gpu", lacking=lacking)


def why_blind(inventory: Inventory, ask: Callable[[], Mapping[str, Any]]) -> str:
    """Return why TensorFlow cannot use the GPUs that the driver has; empty if it can.

    Args:
        inventory: The GPUs, one or more.
        ask: Says what `what_tensorflow_says` does.

    Returns:
        The reason, a clause.
    """
    answer = ask()
    if answer["tensorflow"] is None:
        return f"TensorFlow cannot be asked ({answer['tensorflow_error']})"
    number, parts = len(inventory.gpus), any(gpu.is_part for gpu in inventory.gpus)
    if len(answer["gpus"]) >= (1 if parts else number):
        return why_not_compiled(inventory.gpus, answer, inventory.driver)
    advice = "install tensorflow[and-cuda]" if answer.get("with_cuda") else "this TensorFlow was built without CUDA"
    if answer.get("missing"):
        missing = ", ".join(answer["missing"])
        advice = f"it cannot load {missing}: {advice}, or name in LD_LIBRARY_PATH the folders where these are"
    clause = f"TensorFlow sees {len(answer['gpus'])} of them ({advice})"
    return f"the driver has {counted(number, 'GPU')} and {clause}{inventory.beside}"


def _why_too_few(inventory: Inventory, topologies: Sequence[Topology]) -> str:
    there = mostly_free(inventory.gpus)
    for topology in topologies:
        if not distinct(there, topology):
            free = f"{'there is' if len(there) == 1 else 'there are'} {counted(len(there), 'GPU')}"
            if len(there) < len(inventory.gpus):
                free += f" of {len(inventory.gpus)} with {MOSTLY_FREE:.0%} of the memory free"
            if parts := sum(gpu.is_part for gpu in there):
                free += f", {parts} of them MIG instances, of which a host has one"
            hint = " (--device gpu takes and splits what there is)" if usable(inventory.gpus) else ""
            return f"{topology} has {counted(topology.num_replicas, 'device')}, and {free}{hint}{inventory.beside}"
    return ""


def _is_short(device: str, topologies: Sequence[Topology], inventory: Inventory) -> bool:
    """Return whether the answer would differ if nobody used the GPUs."""
    if device == "auto":
        return bool(_why_too_few(inventory, topologies)) and not _why_too_few(inventory.idle(), topologies)
    return any(is_short(inventory, topology) for topology in topologies)


def what_tensorflow_says() -> dict[str, Any]:
    """Return TensorFlow's version and the GPUs it sees, asked in a separate process; or why it could not be asked.

    Returns:
        `tensorflow` (its version, or None with `tensorflow_error`), `with_cuda`, `gpus` (dictionaries with a name), `built_for`
        (`sm_89`, and `compute_90` for PTX), `cuda` (the version it was built with), `driver_cuda` (that of the driver) and
        `missing` (libraries that it looked for in vain).
    """
    return dict(_ask(os.environ.get("CUDA_VISIBLE_DEVICES")))


@functools.cache
def _ask(_visible: str | None) -> dict[str, Any]:
    talking = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1"}
    nothing: dict[str, Any] = {"tensorflow": None, "gpus": []}
    try:
        command = [sys.executable, "-c", _WITH_OURS + _ASK_TENSORFLOW, _OUR_FOLDER]
        # In a folder of nobody's: a json.py or keras.py where the user works is the program's affair.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, env=talking, check=False, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return {**nothing, "tensorflow_error": f"import tensorflow took more than {_LIMIT_SECONDS} s"}
    if done.returncode:
        return {**nothing, "tensorflow_error": (done.stderr.strip().splitlines() or ["it ended"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer | {"missing": sorted(set(_NOT_LOADED.findall(done.stderr)))}


def check_tensorflow() -> None:
    """Refuse an environment without a supported TensorFlow and Keras.

    Raises:
        UsageError: When one of them is missing or too old; the text says what to install.
    """
    if text := unsupported(with_keras_2=True):
        raise UsageError(text)


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
    problem = unsupported(with_keras_2=True) or tensorflow.get("tensorflow_error")
    error = {"tensorflow_error": problem} if problem else {}
    # Measured: the first host of a cluster costs about 500 MB, each further one about 100 MB (it shares pages with the parent).
    hosts = min(MAX_HOSTS, max(1, 1 + (memory.available - 500 * MIB) // (100 * MIB)))
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": {"total": memory.total, "available": memory.available},
        "tensorflow": tensorflow["tensorflow"],
        **error,
        "gpus": describe_gpus(find_gpus(), tensorflow),
        "emulation": {"devices_per_host": MAX_DEVICES_PER_HOST, "hosts": hosts},
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
    whole, sliced, too_large, with_nccl = [], {}, [], []
    for topology in SHOWN_TOPOLOGIES:
        try:
            share = share_out(inventory, topology).hosts[0]
        except Unavailable:
            too_large.append(str(topology))
            continue
        if share.is_sliced:
            sliced[str(topology)] = f"{share.slices[0][0] / 1024:.1f} GiB each"
        else:
            whole.append(str(topology))
        if not share.may_share_gpus:
            with_nccl.append(topology)
    found = [
        {
            "name": gpu.name,
            "memory_bytes": {"total": gpu.total, "free": gpu.free},
            "compute_capability": ".".join(map(str, gpu.capability)),
            "tf32": "yes, off when runs are compared" if gpu.has_tf32 else "no",
            "uuid": gpu.uuid,
        }
        for gpu in inventory.gpus
    ]
    return {
        "driver": inventory.driver,
        "seen_by_tensorflow": len(tensorflow["gpus"]),
        "found": found,
        **({"left_out": list(inventory.left_out)} if inventory.left_out else {}),
        **({"kernels": compiled} if compiled else {}),
        **({"unusable": blind} if blind else {}),
        "topologies": {"one_gpu_each": whole, "slices": sliced, "too_large": too_large},
        "nccl": _where_nccl_sums(with_nccl),
    }


def _where_nccl_sums(whole: list[Topology]) -> str:
    """Return where NCCL sums: in MirroredStrategy, and in MultiWorkerMirroredStrategy on request (TensorFlow 2.21)."""
    one_host = [str(topology) for topology in whole if topology.num_replicas > 1 and not topology.has_several_hosts]
    hosts = [str(topology) for topology in whole if topology.has_several_hosts]
    if not one_host + hosts:
        return "refuses slices and MIG instances of one GPU"
    asked = [f"on {', '.join(hosts)} where MultiWorkerMirroredStrategy is told to use it"] if hosts else []
    by_itself = [f"on {', '.join(one_host)} with MirroredStrategy"] if one_host else []
    return f"sums {', '.join(by_itself + asked)}; parts of a GPU are summed without it"
