"""Split the examples of a host into one part for each of its replicas, on the device of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.pipelines.sources.access import Rows


def placed(parts: Rows, cuts: list[int], devices: tuple[str, ...]) -> list[Rows]:
    """Place the examples of each replica on its device.

    Args:
        parts: The examples of the host, flattened, as arrays or tensors on the CPU.
        cuts: The boundaries between the replicas' examples.
        devices: The device of each replica.

    Returns:
        The tensors of each replica.
    """
    return [
        [_on(device, part, start, stop) for part in parts] for device, start, stop in zip(devices, cuts, cuts[1:], strict=False)
    ]


def _on(device: str, part: Any, start: int, stop: int) -> Any:
    if isinstance(part, np.ndarray):
        # Strings stay in the memory of the host: no device has them.
        with tf.device("CPU:0" if part.dtype.kind in "OSU" else device):
            return tf.convert_to_tensor(part[start:stop])
    with tf.device("CPU:0"):
        rows = part if stop - start == part.shape[0] else rows_between(part, start, stop)
    if rows.dtype == tf.string:
        return rows
    # Strategies copy no values: what is given to one replica stays on the device where it was made (TensorFlow 2.21).
    with tf.device(device):
        return tf.identity(rows)


def rows_between(part: Any, start: int, stop: int) -> Any:
    """Return some rows of an array or a tensor. Sparse tensors are supported.

    Args:
        part: An array or tensor of shape (rows, ...).
        start: The first row.
        stop: The first row after the last.

    Returns:
        The rows.
    """
    if isinstance(part, tf.SparseTensor):
        return tf.sparse.slice(part, [start, *[0] * (part.shape.rank - 1)], [stop - start, *part.dense_shape[1:]])
    return part[start:stop]
