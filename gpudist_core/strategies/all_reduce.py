"""How the replicas of a strategy are summed."""

from __future__ import annotations

from typing import Any

from gpudist_core.environments import shares_hardware
from gpudist_core.errors import Unavailable, WrongUse
from gpudist_core.upstream import strategies as upstream
from gpudist_core.values import is_finite, is_whole

ALL_REDUCE = ("auto", "nccl", "ring", "hierarchical", "one-device")
_HOROVOD = (
    "TensorFlow 2.21 trains without Horovod: its last release, 0.28.1 of 2023, does not build against TensorFlow 2.21 "
    "(highwayhash/arch_specific.h, which xla/printer.h includes, is not among the headers TensorFlow installs), and it has no "
    "tf.distribute.Strategy. It would take a Horovod that builds, and a training loop on hvd.DistributedGradientTape in place "
    'of a strategy. Use all_reduce="nccl", which is what Horovod sums by on GPUs, or "ring".'
)


def check_all_reduce(name: str) -> None:
    """Refuse what cannot be had anywhere.

    Args:
        name: What the user wants.

    Raises:
        WrongUse: When there is no such all-reduce.
        Unavailable: For Horovod.
    """
    if name == "horovod":
        raise Unavailable(_HOROVOD)
    if name not in ALL_REDUCE:
        raise WrongUse(f"The all-reduce is one of {', '.join(ALL_REDUCE)}", "Choose one of them.", all_reduce=name)


def check_numbers(bytes_per_pack: Any, timeout_seconds: Any) -> None:
    """Refuse numbers that cannot be.

    Args:
        bytes_per_pack: Gradients are summed in packs of so many bytes; None for all in one.
        timeout_seconds: How long to wait for other hosts; None for ever.

    Raises:
        WrongUse: For one that is no number, or not positive.
    """
    if bytes_per_pack is not None and not is_whole(bytes_per_pack, 1):
        raise WrongUse("bytes_per_pack is a positive whole number, or None", "Leave it out.", bytes_per_pack=bytes_per_pack)
    if timeout_seconds is not None and not (is_finite(timeout_seconds) and timeout_seconds > 0):
        raise WrongUse("timeout_seconds is a positive number, or None", "Leave it out.", timeout_seconds=timeout_seconds)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False.

    Args:
        name: The argument's name.
        value: Its value.

    Raises:
        WrongUse: It is something else.
    """
    if not isinstance(value, bool):
        raise WrongUse(f"{name} is True or False", "Leave it out.", **{name: value})


def on_one_host(name: str, devices: tuple[str, ...], options: Any, first_key: int) -> Any:
    """The cross-device operation of a MirroredStrategy.

    TensorFlow's own default, a collective, can lose its key inside `while` and `cond` (several steps in one call, an optimizer
    built while tracing), and one failed collective poisons the process; so it is never chosen here without a wish.

    Args:
        name: One of `ALL_REDUCE`.
        devices: The devices that sum.
        options: The `CommunicationOptions` of a ring.
        first_key: The first key of a ring's collectives.

    Returns:
        A `tf.distribute.CrossDeviceOps`.

    Raises:
        WrongUse: When these devices cannot be summed so.
    """
    import tensorflow as tf

    if len(devices) == 1:
        return tf.distribute.ReductionToOneDevice()
    shared = shares_hardware(devices)
    if name == "auto":
        # NCCL's older operations, unlike its collectives, work in loops; they refuse two ranks on one GPU.
        operation = tf.distribute.ReductionToOneDevice() if shared else tf.distribute.NcclAllReduce()
        operation.chosen_automatically = True  # for tools that put another in its place: nobody asked for this one
        return operation
    if name == "nccl" and shared:
        raise WrongUse(
            "NCCL sums over GPUs that are each a piece of hardware of their own",
            'Use all_reduce="auto", which reduces to one device here.',
            devices=devices,
        )
    if name == "hierarchical" and len(devices) % 2:
        # Two groups of half the devices, rounded down: 3 devices sum to 2 (TensorFlow 2.21).
        raise WrongUse(
            "TensorFlow's HierarchicalCopyAllReduce sums an even number of devices: of an odd one it loses a device",
            'Use all_reduce="one-device" or "auto", or an even number of devices.',
            devices=devices,
        )
    make = {"nccl": tf.distribute.NcclAllReduce, "hierarchical": tf.distribute.HierarchicalCopyAllReduce}
    return (
        upstream.ring(devices, options, first_key) if name == "ring" else make.get(name, tf.distribute.ReductionToOneDevice)()
    )


def between_hosts(name: str, bytes_per_pack: int | None, timeout_seconds: float | None) -> Any:
    """The options of collectives, those between hosts for one.

    Args:
        name: `auto` and `ring`: a ring; `nccl`.
        bytes_per_pack: Gradients are summed in packs of so many bytes; None for all in one.
        timeout_seconds: After so long a collective that lacks a peer is an error; None to wait for ever.

    Returns:
        A `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        WrongUse: For an all-reduce of one host.
    """
    import tensorflow as tf

    kinds = tf.distribute.experimental.CommunicationImplementation
    implementation = {"auto": kinds.RING, "ring": kinds.RING, "nccl": kinds.NCCL}.get(name)
    if implementation is None:
        raise WrongUse("Several hosts sum by a ring or by NCCL", 'Use all_reduce="auto", "ring" or "nccl".', all_reduce=name)
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack or 0, timeout_seconds=timeout_seconds, implementation=implementation
    )
