"""Check that TensorFlow sees every GPU of the driver, and that each GPU computes. The first step on a GPU runner.

Exit code 5 if not: without this step, each test would fail by itself for the same reason.
"""

from __future__ import annotations

import sys
from typing import Any

from emulate.devices import about_compiling, find_gpus, what_tensorflow_says, why_blind
from gpudist_core.environments import load_cuda_libraries

SIZE = 512


def complaints() -> list[str]:
    """Return what is wrong with this machine's GPUs. Empty: they all compute."""
    inventory = find_gpus()
    if not inventory.gpus:
        return [f"A GPU runner must have a GPU. Received: none ({inventory.why})."]
    answer = what_tensorflow_says()
    if blind := why_blind(inventory, lambda: answer):
        return [f"TensorFlow must see every GPU and have kernels for it. Received: {blind}."]
    for line in filter(None, (*inventory.left_out, about_compiling(inventory.gpus, answer))):
        print(line, flush=True)
    import tensorflow as tf

    load_cuda_libraries()
    found = tf.config.list_physical_devices("GPU")
    wanted = 1 if any(gpu.is_part for gpu in inventory.gpus) else len(inventory.gpus)  # CUDA shows one MIG instance
    if len(found) != wanted:
        return [f"TensorFlow must see every GPU. Received: {len(found)} of the {wanted} that the driver has."]
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)
    return [text for number in range(wanted) if (text := _wrong_with(tf, number))]


def _wrong_with(tf: Any, number: int) -> str:
    with tf.device(f"GPU:{number}"):
        product = tf.matmul(tf.ones([SIZE, SIZE]), tf.ones([SIZE, SIZE]))
    if not product.device.endswith(f"GPU:{number}"):
        return f"GPU:{number} must compute its own product. Received: a product from {product.device}."
    wrong = int(tf.math.count_nonzero(product != SIZE))
    if wrong:
        return f"GPU:{number} must multiply correctly. Received: {wrong} wrong elements of {SIZE * SIZE}."
    print(f"GPU:{number} computes: {tf.config.experimental.get_device_details(tf.config.list_physical_devices('GPU')[number])}")
    return ""


if __name__ == "__main__":
    said = complaints()
    for line in said:
        print(line, file=sys.stderr)
    sys.exit(5 if said else 0)
