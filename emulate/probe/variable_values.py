"""Record values of variables: those that a step itself assigns, the weights at the start of a run, and those at its end.

A step assigns averages of weights, counters and statistics. At the start come also the weights of layers built in the first
step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from emulate import graph_functions
from emulate.probe import optimizers, replay, upstream
from emulate.probe import replica_call as bodies
from emulate.probe.point import around, caller
from emulate.probe.recorder import Record
from emulate.probe.reports import program_caller
from emulate.probe.upstream import copy_of, is_floating, is_of_metric

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

_NUMBERS = ("float", "bfloat", "int")  # an unsigned one is the state of a random generator


def install(probe: Probe) -> None:
    """Wrap what assigns a variable, of one device or of several."""
    for cls in upstream.variable_classes():
        for name in [name for name in vars(cls) if name.startswith(("assign", "scatter_"))]:
            _wrap_assign(probe, cls, name)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Exclude assignments in this block from the step's own."""
    body = bodies.current()
    if body is None:
        yield
        return
    before, body.assigns = body.assigns, True
    try:
        yield
    finally:
        body.assigns = before


def _wrap_assign(probe: Probe, cls: Any, name: str) -> None:
    @around(cls, name)
    def assign(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        body = bodies.current()
        if body is None:
            result = original(self, *args, **kwargs)
            probe.assigned_between_steps(self, by_program=_is_by_program(caller()))
            return result
        if body.assigns or optimizers.is_applying(body.replica):
            return original(self, *args, **kwargs)
        body.keeps = True
        of_metric, of_layer = _is_of_metric(self, caller()), bool(body.layer_depth)
        if body.lines is not None:
            body.lines.assign(probe.names.of(self), [*args, *kwargs.values()], of_metric=of_metric, of_layer=of_layer)
        if not of_metric:  # Keras counts in the same metrics for training and validation, and begins them anew
            probe.functions.changes(self)
        if probe.plan.replay is not None and body.share not in (None, -1) and _is_left_to_the_last(probe, body, self):
            return self
        if id(self) not in body.assigned and _is_shared_number(self):
            body.assigned[id(self)] = self
            if not body.layer_depth:
                body.by_hand.add(id(self))
            name = probe.names.of(self)
            if _is_number_of_first(self):
                probe.facts.add("of_first", name)
            else:
                probe.initial.before_first(f"state of {body.label}: {name}", body.replica, [self])
        with unseen():  # one of several copies is assigned within
            return original(self, *args, **kwargs)


def _is_by_program(frame: Any) -> bool:
    """Return whether the program itself assigns, not a library, gpudist_core included."""
    return not str(frame.f_globals.get("__name__", "")).startswith("gpudist_core.") and program_caller(frame) is not None


def _is_of_metric(variable: Any, frame: Any) -> bool:
    """Return whether a library, not the program itself, counts something on each replica."""
    import tensorflow as tf

    is_own = variable.synchronization == tf.VariableSynchronization.ON_READ and program_caller(frame) is None
    return is_own or is_of_metric(variable)


def _is_left_to_the_last(probe: Probe, body: bodies.Body, variable: Any) -> bool:
    """Return whether only the last share of a batch assigns a variable, because it has the update made.

    Where tapes join the shares it has all gradients too. What layers and metrics count of their rows each share adds to.
    """
    if probe.plan.replay is not None and probe.plan.replay.taped:
        return True
    of_layers = {id(upstream.tf_variable(v)) for v in probe.untrained(body)}
    return _is_shared_number(variable) and id(variable) not in of_layers


def _is_number_of_first(variable: Any) -> bool:
    """Return whether it is one number of the first replica, perhaps only a loss to display."""
    import tensorflow as tf

    return bool(variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA and variable.shape.rank == 0)


def _is_shared_number(variable: Any) -> bool:
    """Return whether each replica holds the same value, unlike a count of each replica (`ON_READ`, a metric)."""
    import tensorflow as tf

    is_own = variable.synchronization == tf.VariableSynchronization.ON_READ or is_of_metric(variable)
    return bool(variable.dtype.name.startswith(_NUMBERS)) and not is_own


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
            with unseen():
                replay.assign_initial(probe.plan.initial, probe.names, copies, replica)
            values = [copy.read_value() for _, copy in copies]
        named = [(self._key(variable), value) for (variable, _), value in zip(copies, values, strict=True)]
        about = {"replica": replica, "optimizer": optimizer, "shards": probe.shards([v for v, _ in copies])}
        probe.recorder.hand_over("initial", about, named)
        return True
