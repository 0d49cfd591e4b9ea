"""The first step on a GPU runner: does TensorFlow see every GPU that the driver has, and does each of them compute?

Ends with 5 where it does not: the tests after it would only say so one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from emulate.devices import Inventory, find_gpus

SIZE = 512


def complaints() -> list[str]:
    """What is wrong with this machine's GPUs; empty where they all compute."""
    inventory = find_gpus()
    if not inventory.gpus:
        return [f"A GPU runner must have a GPU. Received: none ({inventory.why})."]
    import tensorflow as tf

    for line in to_compile(inventory, tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])):
        print(line, flush=True)
    found = tf.config.list_physical_devices("GPU")
    wanted = 1 if any(gpu.is_part for gpu in inventory.gpus) else len(inventory.gpus)  # CUDA shows one MIG instance
    if len(found) != wanted:
        text = f"TensorFlow must see every GPU. Received: {len(found)} of the {wanted} that the driver has. "
        return [text + "Install tensorflow[and-cuda]; its log says which library is missing."]
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)
    return [text for number in range(wanted) if (text := _wrong_with(tf, number))]


def to_compile(inventory: Inventory, built: Sequence[str]) -> list[str]:
    """Which GPUs TensorFlow has no kernels for, so that the driver makes them: the wheel of 2.21 has PTX alone for Hopper.

    Args:
        inventory: The GPUs.
        built: What TensorFlow was built for: `sm_89`, and `compute_90` for PTX.

    Returns:
        A line for each model of GPU.
    """
    newest = max((_capability(one) for one in built if one.startswith("sm_")), default=(0, 0))
    newer = {gpu.name: gpu.capability for gpu in inventory.gpus if gpu.capability > newest}
    return [
        f"{name} (compute capability {major}.{minor}): TensorFlow has no kernels for it and the driver ({inventory.driver}) "
        "compiles them at the first start, which takes minutes; one older than TensorFlow's CUDA cannot (12.5 needs R555)"
        for name, (major, minor) in newer.items()
    ]


def _capability(built: str) -> tuple[int, int]:
    number = built.partition("_")[2].rstrip("af")
    return int(number[:-1]), int(number[-1])


def _wrong_with(tf: Any, number: int) -> str:
    with tf.device(f"GPU:{number}"):
        product = tf.matmul(tf.ones([SIZE, SIZE]), tf.ones([SIZE, SIZE]))
    if not product.device.endswith(f"GPU:{number}"):
        return f"GPU:{number} must compute what it is given. Received: a product made on {product.device}."
    wrong = int(tf.math.count_nonzero(product != SIZE))
    if wrong:
        return f"GPU:{number} must multiply right. Received: {wrong} wrong elements of {SIZE * SIZE}."
    print(f"GPU:{number} computes: {tf.config.experimental.get_device_details(tf.config.list_physical_devices('GPU')[number])}")
    return ""


if __name__ == "__main__":
    said = complaints()
    for line in said:
        print(line, file=sys.stderr)
    sys.exit(5 if said else 0)
