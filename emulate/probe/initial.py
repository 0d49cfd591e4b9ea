"""Record the weights at the start of a run (also of layers built in the first step) and at its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from emulate import graph_functions
from emulate.probe import assignments, replay
from emulate.probe.point import around
from emulate.probe.recorder import Record
from emulate.probe.variables import copy_of, is_floating

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

Started = tuple[str, int, list[tuple[Any, Any]]]
"""(optimizer, replica, variables each with the replica's copy)"""


class InitialWeights:
    """Record each replica's weights before a step changes them for the first time.

    A variable that is made while a `tf.function` is traced gets its value after the trace and before the function runs: then it
    is recorded. On several replicas TensorFlow (2.21) makes the values inside the function's first call, where they are not
    seen: a copy's is made of the first one's.

    Args:
        probe: Whose run it is.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._started: set[tuple[str, int]] = set()
        self._begun: set[tuple[str, int]] = set()
        self._unborn: list[Started] = []
        self._held: dict[int, list[tuple[weakref.ref[Any], weakref.ref[Any]]]] = {}

    def install(self) -> None:
        """Wrap what gives the variables their values that a `tf.function` has made."""
        cls = graph_functions.function_class()
        name = graph_functions.INITIALIZES

        @around(cls, name)
        def initialize(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                with self._probe.functions.unchanged():
                    return original(function, *args, **kwargs)
            finally:
                self._born()

    def before_first(self, optimizer: str, replica: int, variables: list[Any]) -> None:
        """Note that a replica, or each of the virtual ones that a graph serves, is about to change these variables."""
        virtual = graph_functions.virtual_replicas()
        for number in [replica] if virtual is None else range(virtual[1]):
            self._before_first(optimizer, number, variables)

    def _before_first(self, optimizer: str, replica: int, variables: list[Any]) -> None:
        import tensorflow as tf

        if (optimizer, replica) in self._started:
            return
        self._started.add((optimizer, replica))
        names = self._probe.names
        with tf.init_scope(), graph_functions.device("CPU:0"):
            fresh = [v for v in variables if is_floating(v) and (names.of(v), replica) not in self._begun]
            # What another optimizer trains already does not begin anew with this one.
            self._begun |= {(names.of(variable), replica) for variable in fresh}
            started = (optimizer, replica, [(variable, copy_of(variable, replica)) for variable in fresh])
            held = [(weakref.ref(variable), weakref.ref(copy)) for variable, copy in started[2]]
            self._held.setdefault(replica, []).extend(held)
            if not self._record(started):
                self._unborn.append(started)

    def note_unseen(self) -> None:
        """Note at the end whether variables got their values in another way."""
        if self._unborn:
            text = "variables are made inside the step; their first values were not seen"
            self._probe.note("initial-weights-unseen", text)

    def now(self) -> Iterator[Record]:
        """Yield the values of each replica's trained variables, as far as the program still holds them."""
        import tensorflow as tf

        for replica, held in self._held.items():
            pairs = [(variable(), copy()) for variable, copy in held]
            there = [(variable, copy) for variable, copy in pairs if variable is not None and copy is not None]
            shards = self._probe.shards([variable for variable, _ in there])
            with tf.init_scope(), graph_functions.device("CPU:0"):
                values = [(self._key(variable), copy.read_value().numpy()) for variable, copy in there]
            yield Record("left", {"replica": replica, "shards": shards}, values)

    def _key(self, variable: Any) -> tuple[str, str, bool]:
        return "variable", self._probe.names.of(variable), bool(getattr(variable, "trainable", True))

    def _born(self) -> None:
        import tensorflow as tf

        with tf.init_scope(), graph_functions.device("CPU:0"):
            self._unborn = [started for started in self._unborn if not self._record(started)]
        self._probe.functions.born()

    def _record(self, started: Started) -> bool:
        """Hand the values over; False where there are none yet."""
        import tensorflow as tf

        optimizer, replica, copies = started
        probe = self._probe
        try:
            values = [copy.read_value() for _, copy in copies]
        except tf.errors.FailedPreconditionError:
            return False
        if any(value.shape != variable.shape for (variable, _), value in zip(copies, values, strict=True)):
            return False
        if probe.plan.initial is not None:
            with assignments.unseen():
                replay.assign_initial(probe.plan.initial, probe.names, copies, replica)
            values = [copy.read_value() for _, copy in copies]
        named = [(self._key(variable), value) for (variable, _), value in zip(copies, values, strict=True)]
        about = {"replica": replica, "optimizer": optimizer, "shards": probe.shards([v for v, _ in copies])}
        probe.recorder.hand_over("initial", about, named)
        return True
