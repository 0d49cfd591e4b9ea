"""What a host's step holds besides its rows and its variables: the constants of its graph, and the tensors it closes over."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulate.probe import body as bodies
from emulate.probe import upstream

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

_FEWEST_WHOLE = 16
"""So many whole numbers are data; fewer are a shape, an axis, the number of a replica or a collective's key."""
_LARGEST = 64 << 20
"""Bytes from which on a tensor is not looked into."""
_MOST = 500
"""Places of which values are kept."""
_FIRST = 3
"""Numbers of an array that are told."""


def remember_constant(probe: Probe, tensor: Any) -> None:
    """A constant of a graph was made: where it belongs to a replica's step, its value is kept."""
    body = bodies.current()
    if body is None or not _is_looked_at(probe, body) or not _may_be_data(tensor):
        return
    import tensorflow as tf

    value = tf.get_static_value(tensor)
    if value is not None:
        _remember(probe, upstream.line_of(tensor.op), np.asarray(value))


def remember_captured(probe: Probe, body: bodies.Body) -> bool:
    """A replica's step is traced: the values of what it closes over are kept, but for variables.

    Args:
        probe: What records.
        body: The replica's call of the step.

    Returns:
        Whether it may have any: it is the first replica of one of several hosts, and in a graph.
    """
    import tensorflow as tf

    if body.graph is None or not _is_looked_at(probe, body):
        return False
    for tensor, _ in getattr(body.graph, "captures", ()):
        if isinstance(tensor, tf.__internal__.EagerTensor) and _may_be_data(tensor):
            _remember(probe, "", tensor.numpy())
    return True


def _is_looked_at(probe: Probe, body: bodies.Body) -> bool:
    return probe.several_hosts and body.replica == probe.first_replica


def _may_be_data(tensor: Any) -> bool:
    dtype, shape = tensor.dtype, tensor.shape
    if shape.rank is None or not (dtype.is_floating or dtype.is_integer) or dtype.is_quantized:
        return False
    count = math.prod(shape.as_list())
    return 0 < count * int(dtype.size or 1) <= _LARGEST and (bool(dtype.is_floating) or count >= _FEWEST_WHOLE)


def _remember(probe: Probe, where: str, value: NDArray[Any]) -> None:
    if value.size > 1 and bool(np.all(value == value.flat[0])):
        return  # zeros and ones in the shape of something, of which hosts may have other numbers of rows
    held = probe.facts["held"]
    place = f"{where}|{value.dtype.name}|{'x'.join(map(str, value.shape[1:])) if value.ndim else 'number'}"
    text = _told(value)
    if place in held or len(held) < _MOST:
        known = held.setdefault(place, [])
        known += [text] if text not in known else []


def _told(value: NDArray[Any]) -> str:
    first = ", ".join(f"{float(one):.6g}" for one in value.flat[:_FIRST])
    if value.ndim == 0:
        return f"{float(value)!r}"
    digest = hashlib.blake2b(value.tobytes(), digest_size=6).hexdigest()
    return f"{first}{', ...' if value.size > _FIRST else ''} (shape {list(value.shape)}, {digest})"
