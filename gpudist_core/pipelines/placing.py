"""The rows of a host, cut into one part for each of its replicas, on the device of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpudist_core.pipelines.sources.access import Rows


def placed(parts: Rows, cuts: list[int], devices: tuple[str, ...]) -> list[Rows]:
    """The rows of each replica, on its device.

    Args:
        parts: The rows of the host, flattened, arrays or tensors on the CPU.
        cuts: Where the rows of each replica begin and end.
        devices: The device of each replica.

    Returns:
        For each replica, its tensors.
    """
    return [
        [_on(device, part, start, stop) for part in parts] for device, start, stop in zip(devices, cuts, cuts[1:], strict=False)
    ]


def _on(device: str, part: Any, start: int, stop: int) -> Any:
    import tensorflow as tf

    if isinstance(part, np.ndarray):
        # Strings stay in the memory of the host: no device has them.
        with tf.device("CPU:0" if part.dtype.kind in "OSU" else device):
            return tf.convert_to_tensor(part[start:stop])
    with tf.device("CPU:0"):
        rows = part if stop - start == part.shape[0] else rows_between(part, start, stop)
    if rows.dtype == tf.string:
        return rows
    with tf.device(device):
        return tf.identity(rows)


def rows_between(part: Any, start: int, stop: int) -> Any:
    """Some rows of an array or a tensor, sparse ones included.

    Args:
        part: Of shape (rows, ...).
        start: The first.
        stop: The one after the last.

    Returns:
        The rows.
    """
    import tensorflow as tf

    if isinstance(part, tf.SparseTensor):
        return tf.sparse.slice(part, [start, *[0] * (part.shape.rank - 1)], [stop - start, *part.dense_shape[1:]])
    return part[start:stop]
