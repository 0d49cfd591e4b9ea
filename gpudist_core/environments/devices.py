"""List the devices of this machine without starting TensorFlow's runtime: a cluster's server must start first.

A CUDA library is opened before, which TensorFlow 2.21's wheel needs and does not find: without it TensorFlow sees no GPU. `pip
install tensorflow[and-cuda]` installs libcusolver. But the object that opens it (libtensorflow_framework.so.2) searches only
the folders of the other libraries: "Cannot dlopen some GPU libraries. Skipping registering GPU devices". A library that is
already open is not searched for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

from gpudist_core.environments.slurm import own_gpus


def local_devices() -> tuple[str, ...]:
    """Return the devices that replicas on this machine use: the visible GPUs, or the CPUs if there is no GPU.

    Split devices are listed as their logical devices.

    Returns:
        At least one name such as `GPU:0`.
    """
    return _named("GPU") or _named("CPU") or ("CPU:0",)


def num_gpus() -> int:
    """Return the number of visible GPUs on this machine. Each logical GPU counts."""
    return len(_named("GPU"))


def show_own_gpus() -> None:
    """Hide from TensorFlow the GPUs that belong to other tasks on this node. Outside Slurm nothing is hidden."""
    import tensorflow as tf

    own = _own("GPU")
    if len(own) < len(tf.config.get_visible_devices("GPU")):
        tf.config.set_visible_devices(own, "GPU")


def shares_hardware(devices: tuple[str, ...]) -> bool:
    """Return whether two of these devices are, or may be, on one piece of hardware: CPUs, or parts of one GPU.

    Args:
        devices: Names of this machine's devices.

    Returns:
        True if NCCL would refuse these devices.
    """
    owners = _owners("GPU")
    indices = [index_of(name) for name in devices if "GPU" in name.upper()]
    used = [owners[index] for index in indices if index < len(owners)]
    return len(used) < len(devices) or len(set(used)) < len(devices)


def index_of(name: str) -> int:
    """Return the number at the end of a device name."""
    return int(name.rpartition(":")[2])


def _named(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}:{i}" for i in range(len(_owners(kind))))


def _owners(kind: str) -> list[str]:
    """Return the name of the physical device that holds each logical device."""
    import tensorflow as tf

    def parts(device: Any) -> int:
        return len(tf.config.get_logical_device_configuration(device) or [None])

    return [device.name for device in _own(kind) for _ in range(parts(device))]


def _own(kind: str) -> list[Any]:
    import tensorflow as tf

    load_cuda_libraries()
    visible = tf.config.get_visible_devices(kind)
    return own_gpus(visible) if kind == "GPU" else list(visible)


CUDA_DRIVER = "libcuda.so.1"


@functools.cache
def load_cuda_libraries() -> tuple[str, ...]:
    """Open the library before TensorFlow first looks for GPUs. Without an NVIDIA driver nothing happens.

    It starts nothing on a GPU, so a process may fork after it.

    Returns:
        The paths of the opened libraries.
    """
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return ()
    return tuple(str(path) for path in _libraries("cusolver", "libcusolver.so.*") if _opens(path))


def _libraries(package: str, pattern: str) -> list[Path]:
    """Return libraries from one of NVIDIA's packages in this environment."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(f"nvidia.{package}")
        folders = (spec.submodule_search_locations if spec is not None else None) or []
        return sorted(path for folder in folders for path in (Path(folder) / "lib").glob(pattern))
    return []


def _opens(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path))
    except OSError:  # TensorFlow itself says so, and more
        return False
    return True
