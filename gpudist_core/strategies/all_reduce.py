"""Choose how the replicas of a strategy are summed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gpudist_core.environments import shares_hardware
from gpudist_core.errors import Unavailable, UsageError
from gpudist_core.upstream import runtime as upstream
from gpudist_core.values import is_finite, is_whole

ALL_REDUCE = ("auto", "nccl", "ring", "hierarchical", "one-device")
_HOROVOD = (
    "Horovod is not supported: its last release, 0.28.1 of 2023, does not build against TensorFlow 2.21 "
    "(highwayhash/arch_specific.h, which xla/printer.h includes, is not among the headers TensorFlow installs), and it has no "
    "tf.distribute.Strategy. "
    'Use all_reduce="nccl", which Horovod also uses on GPUs, or "ring".'
)


def check_all_reduce(name: str) -> None:
    """Refuse an all-reduce that does not exist on any machine.

    Args:
        name: The `all_reduce` argument.

    Raises:
        UsageError: If there is no all-reduce of that name.
        Unavailable: For Horovod.
    """
    if name == "horovod":
        raise Unavailable(_HOROVOD)
    if name not in ALL_REDUCE:
        raise UsageError(f"all_reduce must be one of {', '.join(ALL_REDUCE)}", all_reduce=name)


def check_numbers(bytes_per_pack: Any, timeout_seconds: Any) -> None:
    """Refuse values that are not positive numbers.

    Args:
        bytes_per_pack: Size in bytes of the packs in which gradients are summed; None for one pack.
        timeout_seconds: How long to wait for other hosts, in seconds; None for no limit.

    Raises:
        UsageError: If a value is not a positive number.
    """
    if bytes_per_pack is not None and not is_whole(bytes_per_pack, 1):
        raise UsageError("bytes_per_pack must be a positive integer or None", "Leave it out.", bytes_per_pack=bytes_per_pack)
    if timeout_seconds is not None and not (is_finite(timeout_seconds) and timeout_seconds > 0):
        raise UsageError("timeout_seconds must be a positive number or None", "Leave it out.", timeout_seconds=timeout_seconds)


def check_flag(name: str, value: Any) -> None:
    """Refuse a value that is neither True nor False.

    Args:
        name: The argument's name.
        value: Its value.

    Raises:
        UsageError: If the value is not a bool.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False", "Leave it out.", **{name: value})


def on_one_host(name: str, devices: tuple[str, ...], options: Any, first_key: int) -> Any:
    """Return the cross-device operation for a MirroredStrategy.

    Args:
        name: One of `ALL_REDUCE`.
        devices: The devices whose values are summed.
        options: The `CommunicationOptions` of a ring.
        first_key: The first key of a ring's collectives.

    Returns:
        A `tf.distribute.CrossDeviceOps`.

    Raises:
        UsageError: If this all-reduce does not work on these devices.
    """
    # TensorFlow's own default, a collective, can lose its key inside `while` and `cond` (several steps in one call, or an
    # optimizer that is built while tracing), and one failed collective poisons the process. So only an explicit "ring" uses it.
    if len(devices) == 1:
        return tf.distribute.ReductionToOneDevice()
    shared = shares_hardware(devices)
    if name == "auto":
        # NCCL's older operations, unlike its collectives, work in loops; they refuse two ranks on one GPU.
        operation = tf.distribute.ReductionToOneDevice() if shared else tf.distribute.NcclAllReduce()
        operation.chosen_automatically = True  # for tools that put another in its place: nobody asked for this one
        return operation
    if name == "nccl" and shared:
        raise UsageError(
            "NCCL needs GPUs that are separate pieces of hardware",
            'Use all_reduce="auto", which reduces to one device here.',
            devices=devices,
        )
    if name == "hierarchical" and len(devices) % 2:
        # Two groups of half the devices, rounded down: 3 devices sum to 2 (TensorFlow 2.21).
        raise UsageError(
            "TensorFlow's HierarchicalCopyAllReduce needs an even number of devices: with an odd number it drops one",
            'Use all_reduce="one-device" or "auto", or an even number of devices.',
            devices=devices,
        )
    make = {"nccl": tf.distribute.NcclAllReduce, "hierarchical": tf.distribute.HierarchicalCopyAllReduce}
    return (
        upstream.ring(devices, options, first_key) if name == "ring" else make.get(name, tf.distribute.ReductionToOneDevice)()
    )


def between_hosts(name: str, bytes_per_pack: int | None, timeout_seconds: float | None) -> Any:
    """Return the options for collectives, also those between hosts.

    Args:
        name: `auto` and `ring` give a ring; `nccl` gives NCCL.
        bytes_per_pack: Size in bytes of the packs in which gradients are summed; None for one pack.
        timeout_seconds: A collective that waits longer for a peer raises an error; None for no limit.

    Returns:
        A `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        UsageError: If the all-reduce works on one host only.
    """
    kinds = tf.distribute.experimental.CommunicationImplementation
    implementation = {"auto": kinds.RING, "ring": kinds.RING, "nccl": kinds.NCCL}.get(name)
    if implementation is None:
        raise UsageError(
            "all_reduce between hosts must be a ring or NCCL", 'Use all_reduce="auto", "ring" or "nccl".', all_reduce=name
        )
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack or 0, timeout_seconds=timeout_seconds, implementation=implementation
    )
