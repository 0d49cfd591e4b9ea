"""Keep one resident copy of a tensor on each device.

Each copy is a plain `tf.Variable` on its device, and steps capture it by reference: nothing of it is in the graph, and nothing
is copied in a step. A mirrored variable costs the same in a step (64 MB on 1x4: both 0.2 ms). But it is not made under
CentralStorageStrategy, it is broadcast between hosts when it is made, and a `tf.data` map on the host cannot read it.

On a GPU this holds for floats, int64 and bool. TensorFlow keeps int32 variables in the host's memory, and gathers unsigned,
8-bit and 16-bit integers there: they are copied in each step. Replicate such values as int64.

Rows are gathered from the tensor, not from the variable: after the first sparse read of a variable, every whole read of it is a
copy (TensorFlow 2.21, 256 MB: 0.3 ms before, 50 ms after).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gpudist_core.errors import UsageError, is_whole
from gpudist_core.static import context, memory
from gpudist_core.static.sources import Source, exactly, source_of
from gpudist_core.upstream import strategies as upstream

_TOO_LARGE = "Use gd.shard, which keeps one slice on each device."


class Replicated:
    """Hold a tensor with one resident copy on each device of this host. Make it with `replicate`.

    Use it like a tensor: `tf.gather(table, ids)`, `x @ table`, `tf.convert_to_tensor(table)`. In a step (inside `Strategy.run`)
    that uses the replica's own copy, in a function of `tf.data` the host's copy, elsewhere the first copy.

    Args:
        source: The initial values.
        strategy: The strategy whose devices hold a copy.
        name: The name.

    Attributes:
        strategy: The strategy whose devices hold a copy.
        name: The name.
        copies: The copy on each device of this host, in the order of the replicas: plain `tf.Variable`s.
    """

    def __init__(self, source: Source, strategy: tf.distribute.Strategy, name: str) -> None:
        self.strategy = strategy
        self.name = name
        replicas = context.check_strategy(strategy, "gd.replicate")
        self._first, devices = replicas.first, replicas.devices
        size = int(np.prod(source.shape, dtype=np.int64)) * source.dtype.itemsize
        memory.check_room(dict.fromkeys(devices, size), _TOO_LARGE)
        self.copies = tuple(
            upstream.plain_variable(
                functools.partial(memory.zeros, source.shape, source.dtype, device), device=device, name=name
            )
            for device in devices
        )
        self._host: Any = None
        self._fill(source)

    def _fill(self, source: Source) -> None:
        for start, rows in source.pieces():
            self._write(start, rows)

    def _write(self, start: int, rows: NDArray[Any]) -> None:
        for copy in self._all():
            if not rows.ndim:
                copy.assign(rows)
            else:
                memory.write(copy, (start, *(0,) * (rows.ndim - 1)), rows)

    def _all(self) -> list[Any]:
        return [*self.copies, *([] if self._host is None else [self._host])]

    @property
    def shape(self) -> tf.TensorShape:
        """Return the tensor's shape."""
        return self.copies[0].shape

    @property
    def dtype(self) -> tf.DType:
        """Return the tensor's dtype."""
        return self.copies[0].dtype

    @property
    def variable(self) -> tf.Variable:
        """Return the copy to use here. It is the replica's own, in a function of `tf.data` the host's, elsewhere the first.

        Raises:
            UsageError: In a replica of another strategy.
        """
        if upstream.is_in_dataset_function():
            return self._on_host()
        here = tf.distribute.get_replica_context()
        if here is not None and here.strategy is not self.strategy and tf.distribute.has_strategy():
            raise UsageError(
                "A replicated tensor must be used in steps of its own strategy",
                "Replicate it for the strategy whose run() this is.",
                strategy=type(self.strategy).__name__,
                running=type(tf.distribute.get_strategy()).__name__,
            )
        replica = context.replica_in(self.strategy)
        return self.copies[0 if replica is None else replica - self._first]

    def _on_host(self) -> Any:
        """Return the copy that input pipelines read: the first on a CPU. Without one, make a CPU copy on first use."""
        on_cpu = next((copy for copy in self._all() if "CPU" in copy.device.upper()), None)
        if on_cpu is None:
            with tf.init_scope():
                spec = tf.DeviceSpec.from_string(self.copies[0].device).replace(device_type="CPU", device_index=0)
                on_cpu = self._host = upstream.plain_variable(
                    self.copies[0].read_value, device=spec.to_string(), name=f"{self.name}/host"
                )
        return on_cpu

    @property
    def value(self) -> tf.Tensor:
        """Return the tensor to use here, by reference. In a replica it is the replica's own copy."""
        return self.variable.value()

    def numpy(self) -> NDArray[Any]:
        """Return the whole tensor in host memory."""
        return np.asarray(self.copies[0].numpy())

    def assign(self, values: Any) -> None:
        """Replace every value in place on all devices of this host. Each host must pass the same values.

        Args:
            values: Values of the same shape, as for `replicate`.

        Raises:
            UsageError: If the shape differs, or inside a step.
        """
        context.check_eager("Replicated.assign")
        shape = tuple(self.shape) if callable(values) or hasattr(values, "__next__") else None
        source = source_of(values, shape, self.dtype, exact=True)
        if source.shape != tuple(self.shape):
            raise UsageError(
                "assign must keep the shape", "Replicate another tensor.", values=source.shape, shape=tuple(self.shape)
            )
        self._fill(source)

    def update_rows(self, start: int, values: Any) -> None:
        """Replace some rows in place on all devices of this host. Each host must pass the same values.

        Args:
            start: The first row.
            values: Rows of shape (rows, *shape[1:]).

        Raises:
            UsageError: If they are not rows of the tensor, or inside a step.
        """
        context.check_eager("Replicated.update_rows")
        rows = exactly(values, np.dtype(self.dtype.as_numpy_dtype))
        shape = tuple(self.shape)
        start = start.numpy() if isinstance(start, tf.Tensor) else start
        fits = bool(shape) and rows.shape[1:] == shape[1:] and rows.ndim == len(shape)
        if not fits or not is_whole(start, 0) or start > shape[0] - len(rows):
            raise UsageError(
                "Rows to update must be rows of the tensor",
                "Fix start or values.",
                start=start,
                values=rows.shape,
                shape=shape,
            )
        self._write(start, rows)

    def bytes_per_device(self) -> dict[str, int]:
        """Return the size in bytes of this host's copies, by the device's full name."""
        size = int(np.prod(self.shape, dtype=np.int64)) * int(self.dtype.size)
        sizes: dict[str, int] = {}
        for copy in self._all():
            sizes[copy.device] = sizes.get(copy.device, 0) + size
        return sizes

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"values": self.numpy()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned.

        Args:
            state: The state of a tensor of the same shape.

        Raises:
            UsageError: If it is not such a state.
        """
        if not isinstance(state, dict) or "values" not in state:
            raise UsageError("state must be a result of Replicated.state()", state=state)
        self.assign(state["values"])

    def __len__(self) -> int:
        return int(self.shape[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy().astype(dtype or self.dtype.as_numpy_dtype)

    def __repr__(self) -> str:
        return f"<Replicated {self.name!r} shape={tuple(self.shape)} dtype={self.dtype.name} copies={len(self.copies)}>"


def replicate(
    tensor: Any,
    strategy: tf.distribute.Strategy,
    *,
    name: str | None = None,
    dtype: Any = None,
    shape: Sequence[int] | None = None,
) -> Replicated:
    """Keep one copy of a tensor on each device for every step. It is neither stored in the graph nor copied in each step.

    Args:
        tensor: An array, a memory map or a tensor; or an iterator of chunks of rows (or a function that returns one), which are
            copied to the devices one after the other. Every host must pass the same values.
        strategy: A strategy, but no `ParameterServerStrategy`.
        name: A name. Default: `replicated`.
        dtype: The dtype on the devices. Default: the tensor's dtype. On GPUs use "int64" for integers: TensorFlow keeps or
            gathers other integers in the host's memory and copies them in each step.
        shape: The whole shape. Needed for chunks.

    Returns:
        The tensor, for use in steps and in functions of `tf.data`.

    Raises:
        UsageError: If the values are not numbers, or chunks do not fill the shape; inside `Strategy.run`.
        Unavailable: If it does not fit into memory. Then nothing was allocated.

    Example:
        >>> table = replicate(np.eye(3, dtype="float32"), tf.distribute.get_strategy())
        >>> tf.gather(table, [2]).numpy().tolist()
        [[0.0, 0.0, 1.0]]
    """
    context.check_not_in_a_step("A replicated tensor")
    return Replicated(source_of(tensor, shape, dtype), strategy, name or "replicated")


def _to_tensor(value: Replicated, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> Any:
    if dtype is not None and not dtype.is_compatible_with(value.dtype):
        raise ValueError(f"A conversion must keep the dtype. Received: dtype={dtype.name}, tensor={value!r}. Use tf.cast.")
    return tf.identity(value.value, name) if name else value.value


def _operator(name: str) -> Any:
    def operate(self: Replicated, *args: Any) -> Any:
        return getattr(self.value, name)(*args)

    operate.__name__ = name
    return operate


tf.register_tensor_conversion_function(Replicated, _to_tensor)
for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(Replicated, _name, _operator(_name))
