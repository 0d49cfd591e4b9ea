"""Tell a program on one device other numbers of replicas and workers, and another replica's number."""

from __future__ import annotations

import contextlib
import json
import numbers
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.point import instead_of
from emulate.recorder import Replay
from gpudist_core.state import PerThread

_NO_HOST = "no-worker.invalid"
_KNOWS_BETTER = ("tensorflow.", "keras.", "tf_keras.", "emulate.", "gpudist_core.")

_number: PerThread[int | None] = PerThread(None)


def tell_numbers(replay: Replay) -> None:
    """Tell the program, and what scales losses for it, how many replicas there are; TensorFlow itself knows better.

    Where TF_CONFIG is set, it has so many workers for the program.
    """
    if replay.workers > 1 and "TF_CONFIG" in os.environ:
        _tell_of_workers(replay.workers)
    for cls in upstream.replica_counters():
        if replay.told > 1:
            _wrap_counter(cls, replay.told, scales_losses=True)
        elif replay.batch_of > 1:
            _wrap_counter(cls, ReplicaCount(replay.batch_of), scales_losses=False)


def see_numbers(asked: Callable[[], None]) -> None:
    """Answer the program when it asks for its replica's number.

    Args:
        asked: Called when it does.
    """

    @instead_of(upstream.numbered(), "replica_id_in_sync_group")
    def replica_id_in_sync_group(original: Any, self: Any) -> Any:
        if _module_above().startswith(_KNOWS_BETTER):
            return original(self)
        asked()
        return original(self) if _number.value is None else tf.constant(_number.value, tf.int32)


def see_counts(asked: Callable[[], None]) -> None:
    """Have it seen when the program asks for the number of replicas.

    Args:
        asked: Called when it does.
    """
    for cls in upstream.replica_counters():

        @instead_of(cls, "num_replicas_in_sync")
        def num_replicas_in_sync(original: Any, self: Any) -> Any:
            if not _module_above().startswith(_KNOWS_BETTER):
                asked()
            return original(self)


def numbered(number: int | None) -> contextlib.AbstractContextManager[int | None]:
    """Set the number that this thread's replica step reads; None for its own."""
    return _number.set(number)


def _module_above() -> str:
    """Return the module that reads the property which asks. Between them is the function that `instead_of` has put there."""
    return str(sys._getframe(3).f_globals.get("__name__", ""))


def _wrap_counter(cls: Any, told: Any, *, scales_losses: bool) -> None:
    @instead_of(cls, "num_replicas_in_sync")
    def num_replicas_in_sync(original: Any, self: Any) -> Any:
        caller = _module_above()
        is_told = scales_losses and caller.startswith(upstream.LOSS_SCALERS)
        return original(self) if caller.startswith(_KNOWS_BETTER) and not is_told else told


def _tell_of_workers(number: int) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config.get("cluster", {}).get("worker", [])
    config["cluster"]["worker"] = [*workers, *(f"{_NO_HOST}:{k}" for k in range(1, number - len(workers) + 1))]
    text = json.dumps(config)
    base: Any = type(os.environ)

    class Told(base):
        __slots__ = ()  # else Python refuses to change the class of os.environ

        def __getitem__(self, name: Any) -> Any:
            if name == "TF_CONFIG" and not _module_that_asks().startswith(_KNOWS_BETTER):
                return text
            return super().__getitem__(name)

    os.environ.__class__ = Told

    @instead_of(tf.train.ClusterSpec, "__init__")
    def init(original: Any, self: Any, cluster: Any) -> None:
        if _NO_HOST in str(cluster):  # the program would wait for it
            raise RuntimeError("The program makes a cluster of TF_CONFIG itself, so it cannot be told of other workers.")
        original(self, cluster)


def _module_that_asks() -> str:
    """Return the module that reads the environment, also through Python's own modules."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


class ReplicaCount:
    """Represent a number of replicas that only enlarges a batch.

    A program asks for the number for two ends: what it multiplies grows with the batch (its rows, a learning rate), and what it
    divides makes up for the replicas that are added up. One device that has the rows of all needs the former alone. So this is
    the number wherever Python computes with it, but for a division by it; there, and where it becomes a tensor, it is 1.

    Args:
        number: The number of replicas.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __rtruediv__(self, other: Any) -> Any:
        return other / 1

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return tf.constant(1, dtype or tf.int32, name=name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        divides = ufunc.__name__ in ("divide", "true_divide")
        plain = [(1 if divides and at else int(value)) if value is self else value for at, value in enumerate(inputs)]
        return getattr(ufunc, method)(*plain, **options)

    def __array__(self, *args: Any, **options: Any) -> Any:
        import numpy as np

        return np.array(self._number, *args, **options)

    def __index__(self) -> int:
        return self._number

    def __format__(self, spec: str) -> str:
        return format(self._number, spec)

    def _beside(self, other: Any) -> int:
        return 1 if tf.is_tensor(other) or isinstance(other, tf.Variable) else self._number


def _left(name: str) -> Callable[[ReplicaCount, Any], Any]:
    apply = getattr(operator, name)
    return lambda self, other: apply(self._beside(other), other)


def _right(name: str) -> Callable[[ReplicaCount, Any], Any]:
    apply = getattr(operator, name)
    return lambda self, other: apply(other, self._beside(other))


def _of_number(convert: Callable[[int], Any]) -> Callable[[ReplicaCount], Any]:
    return lambda self: convert(self._number)


for _convert in (int, float, bool, hash, repr):
    setattr(ReplicaCount, f"__{_convert.__name__}__", _of_number(_convert))
for _operator in ("add", "sub", "mul", "floordiv", "mod", "pow"):
    setattr(ReplicaCount, f"__{_operator}__", _left(_operator))
    setattr(ReplicaCount, f"__r{_operator}__", _right(_operator))
for _operator in ("truediv", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ReplicaCount, f"__{_operator}__", _left(_operator))
numbers.Integral.register(ReplicaCount)
