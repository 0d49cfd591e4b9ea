"""The devices of this machine, counted without starting TensorFlow's runtime: a cluster's server must come first."""

from __future__ import annotations

from typing import Any

from gpudist_core.environments.slurm import own_gpus
from gpudist_core.upstream.cuda import load_cuda_libraries


def local_devices() -> tuple[str, ...]:
    """The devices that replicas of this machine compute on: its visible GPUs, or else its CPUs, split ones in their parts.

    Returns:
        Names as `GPU:0`; at least one.
    """
    return _named("GPU") or _named("CPU") or ("CPU:0",)


def num_gpus() -> int:
    """Visible GPUs of this machine, split ones counted in their parts."""
    return len(_named("GPU"))


def show_own_gpus() -> None:
    """Hide the GPUs that belong to other tasks on this node from TensorFlow; nothing to hide outside Slurm."""
    import tensorflow as tf

    own = _own("GPU")
    if len(own) < len(tf.config.get_visible_devices("GPU")):
        tf.config.set_visible_devices(own, "GPU")


def shares_hardware(devices: tuple[str, ...]) -> bool:
    """Whether two of these devices are, or may be, one piece of hardware: CPUs, or parts of one GPU.

    Args:
        devices: Names of this machine's devices.

    Returns:
        True where NCCL would refuse them.
    """
    owners = _owners("GPU")
    indices = [index_of(name) for name in devices if "GPU" in name.upper()]
    used = [owners[index] for index in indices if index < len(owners)]
    return len(used) < len(devices) or len(set(used)) < len(devices)


def index_of(name: str) -> int:
    """The number at the end of a device's name."""
    return int(name.rpartition(":")[2])


def _named(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}:{i}" for i in range(len(_owners(kind))))


def _owners(kind: str) -> list[str]:
    """For each logical device the name of the physical one it is part of."""
    import tensorflow as tf

    def parts(device: Any) -> int:
        return len(tf.config.get_logical_device_configuration(device) or [None])

    return [device.name for device in _own(kind) for _ in range(parts(device))]


def _own(kind: str) -> list[Any]:
    import tensorflow as tf

    load_cuda_libraries()
    visible = tf.config.get_visible_devices(kind)
    return own_gpus(visible) if kind == "GPU" else list(visible)
