"""Split the examples of a global batch into one part for each replica, on the device of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.sources.access import Rows


def shares(rows: int, total: int) -> list[int]:
    """Return how many examples of a global batch each replica gets: contiguous shares, as equal as possible.

    The first `rows % total` replicas get one example more than the others. The shares, in the order of the replicas, are the
    global batch.

    Args:
        rows: Number of examples in the global batch, 0 or more.
        total: Number of replicas, 1 or more.

    Returns:
        The number of examples of each replica.

    Raises:
        UsageError: If `rows` is negative, or `total` is below 1.

    Examples:
        >>> from gpudist_core.pipelines import shares
        >>> shares(10, 4), shares(3, 4)
        ([3, 3, 2, 2], [1, 1, 1, 0])
    """
    if rows < 0 or total < 1:
        raise UsageError("shares needs rows >= 0 and total >= 1", rows=rows, total=total)
    each, more = divmod(rows, total)
    return [each + 1] * more + [each] * (total - more)


def cuts(rows: int, total: int, replicas: range) -> list[int]:
    """Return the boundaries between the shares of consecutive replicas: one number more than there are replicas."""
    each, more = divmod(rows, total)
    return [replica * each + min(replica, more) for replica in range(replicas.start, replicas.stop + 1)]


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
