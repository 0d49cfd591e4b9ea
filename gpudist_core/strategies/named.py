"""Resolve the devices that a user names. TensorFlow does not check names: an unknown device silently becomes CPU:0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gpudist_core.environments import index_of
from gpudist_core.errors import UsageError
from gpudist_core.values import is_whole

Devices = int | str | Sequence[Any] | None


def chosen_devices(devices: Devices) -> tuple[str, ...]:
    """Return the devices of this machine that a strategy uses. The call starts TensorFlow's runtime.

    Args:
        devices: None for all GPUs (or all CPUs if there is no GPU), their number, or their names (`GPU:0`, `/gpu:0`) or entries
            of `tf.config` lists.

    Returns:
        Names such as `GPU:0`.

    Raises:
        UsageError: If a device does not exist or is named twice.
    """
    if isinstance(devices, str):
        devices = [devices]
    if devices is None or is_whole(devices):
        kind = "GPU" if _logical("GPU") else "CPU"
        number = len(_logical(kind)) if devices is None else devices
        if number < 1:
            raise UsageError("devices must hold at least one device", "Leave devices out for all.", devices=devices)
        asked = [f"{kind}:{i}" for i in range(number)]
    elif isinstance(devices, Sequence):
        asked = [_short(device) for device in devices]
    else:
        raise UsageError("devices must be a number or a list of names", 'Use devices=2 or devices=["GPU:0"].', devices=devices)
    if not asked or len(set(asked)) < len(asked):
        raise UsageError(
            "devices must hold at least one device, and each device once", "Leave devices out for all.", devices=devices
        )
    # Where one device stands for all (a reference run), several names find the same.
    return tuple(dict.fromkeys(_found(name, devices) for name in asked))


def _logical(kind: str) -> Any:
    return tf.config.list_logical_devices(kind)


def _short(device: Any) -> str:
    text = device if isinstance(device, str) else getattr(device, "name", None)
    try:
        spec = tf.DeviceSpec.from_string(text)
    except (ValueError, TypeError, AttributeError):
        spec = None
    if spec is None or spec.device_type not in ("CPU", "GPU"):
        raise UsageError('A device name must have the form "GPU:0"', "Name a GPU or a CPU of this machine.", device=device)
    return f"{spec.device_type}:{spec.device_index or 0}"


def _found(name: str, devices: Devices) -> str:
    kind, index = name.partition(":")[0], index_of(name)
    there = _logical(kind)
    try:
        return f"{kind}:{index_of(there[index].name)}"
    except IndexError:
        raise UsageError(
            "devices must exist on this machine",
            f"It has {len(_logical('GPU'))} GPUs and {len(_logical('CPU'))} CPU devices. Name these, or leave devices out.",
            devices=devices,
        ) from None
