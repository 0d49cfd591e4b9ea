"""Record the weights that a run starts from, and those that it still holds at its end.

At the start come also the weights of layers built in the first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.recorder.queue import Record, RecordQueue
from emulate.recorder.replica_call import current_body
from emulate.trace import Shard
from emulate.trace.format import STATE_OF
from emulate.upstream import Names, copy_of, is_floating
from gpudist_core.state import of_variable

Copies = list[tuple[Any, Any]]
"""Variables, each with a replica's copy."""
Started = tuple[str, int, Copies]
"""(optimizer, replica, its variables)"""


class InitialWeights:
    """Record each replica's weights before a step changes them for the first time.

    A variable that is made while a `tf.function` is traced gets its value after the trace and before the function runs: then it
    is recorded. On several replicas TensorFlow (2.21) makes the values inside the function's first call, where they are not
    seen: a copy's is made of the first one's.

    Args:
        names: The variables' names.
        queue: Takes the records.

    Attributes:
        replace: Gives a replica's variables other values before they are recorded; None where they keep their own.
    """

    def __init__(self, names: Names, queue: RecordQueue) -> None:
        self._names = names
        self._queue = queue
        self.replace: Callable[[Copies, int], None] | None = None
        self._started: set[tuple[str, int]] = set()
        self._begun: dict[tuple[str, int], str] = {}
        self._unborn: list[Started] = []
        self._is_missed = False
        self._held: dict[int, list[tuple[weakref.ref[Any], weakref.ref[Any]]]] = {}

    def before_first(self, optimizer: str, replica: int, variables: list[Any]) -> None:
        """Note that a replica, or each of the virtual ones that a graph serves, is about to change these variables."""
        virtual = graph_functions.virtual_replicas()
        for number in [replica] if virtual is None else range(virtual[1]):
            self._before_first(optimizer, number, variables)

    def _before_first(self, optimizer: str, replica: int, variables: list[Any]) -> None:
        if (optimizer, replica) in self._started:
            return
        self._started.add((optimizer, replica))
        names = self._names
        with tf.init_scope(), graph_functions.device("CPU:0"):
            fresh = [v for v in variables if is_floating(v) and self._begins(v, optimizer, replica)]
            # What another optimizer trains already does not begin anew with this one.
            self._begun |= {(names.of(variable), replica): optimizer for variable in fresh}
            started = (optimizer, replica, [(variable, copy_of(variable, replica)) for variable in fresh])
            held = [(weakref.ref(variable), weakref.ref(copy)) for variable, copy in started[2]]
            self._held.setdefault(replica, []).extend(held)
            if not self._record(started):
                self._unborn.append(started)

    def _begins(self, variable: Any, optimizer: str, replica: int) -> bool:
        """Return whether training begins with the value that a variable has now: also if another function has assigned it."""
        assigned_by, body = self._begun.get((self._names.of(variable), replica)), current_body()
        if assigned_by is None or body is None:
            return assigned_by is None
        is_assigned_before = assigned_by.startswith(STATE_OF) and not assigned_by.startswith(f"{STATE_OF}{body.label}: ")
        return is_assigned_before and not optimizer.startswith(STATE_OF) and bool(getattr(variable, "trainable", False))

    @property
    def has_unseen(self) -> bool:
        """Return whether variables got their first values in another way, unseen."""
        return self._is_missed or bool(self._unborn)

    def now(self) -> Iterator[Record]:
        """Yield the values of each replica's trained variables, as far as the program still holds them."""
        for replica, held in self._held.items():
            pairs = [(variable(), copy()) for variable, copy in held]
            there = [(variable, copy) for variable, copy in pairs if variable is not None and copy is not None]
            shards = shards_of(self._names, [variable for variable, _ in there])
            with tf.init_scope(), graph_functions.device("CPU:0"):
                values = [(self._key(variable), copy.read_value().numpy()) for variable, copy in there]
            yield Record("left", {"replica": replica, "shards": shards}, values)

    def _key(self, variable: Any) -> tuple[str, str, bool]:
        return "variable", self._names.of(variable), bool(getattr(variable, "trainable", True))

    def born(self) -> None:
        """Record the first values of variables that have them now."""
        with tf.init_scope(), graph_functions.device("CPU:0"):
            self._unborn = [started for started in self._unborn if not self._record(started)]

    def missed(self) -> None:
        """Give up variables whose values TensorFlow makes inside the function's first call, where a step changes them too."""
        self._is_missed |= bool(self._unborn)
        self._unborn = []

    def _record(self, started: Started) -> bool:
        """Hand the values over; False where there are none yet."""
        optimizer, replica, copies = started
        try:
            values = [copy.read_value() for _, copy in copies]
        except tf.errors.FailedPreconditionError:
            return False
        if any(value.shape != variable.shape for (variable, _), value in zip(copies, values, strict=True)):
            return False
        if self.replace is not None:
            self.replace(copies, replica)
            values = [copy.read_value() for _, copy in copies]
        named = [(self._key(variable), value) for (variable, _), value in zip(copies, values, strict=True)]
        about = {"replica": replica, "optimizer": optimizer, "shards": shards_of(self._names, [v for v, _ in copies])}
        self._queue.hand_over("initial", about, named)
        return True


def shard_of(variable: Any) -> Shard | None:
    """Return a variable's shard, None for a whole variable."""
    entry = of_variable.known(upstream.tf_variable(variable))
    return None if entry is None else Shard(entry.shard.axis, entry.shard.rows, entry.shard.total_replicas)


def shards_of(names: Names, variables: list[Any]) -> dict[str, tuple[int, ...]]:
    """Return the shards of the variables of which each replica holds another slice."""
    shards = {names.of(variable): shard_of(variable) for variable in variables}
    return {name: tuple(shard) for name, shard in shards.items() if shard is not None}
