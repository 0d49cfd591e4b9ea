"""See what assigns variables: a step, which leaves averages, counters and statistics, and the program between steps."""

from __future__ import annotations

from typing import Any

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.instrument import optimizers
from emulate.point import around, caller, program_caller
from emulate.recorder import Body, Recorder, current_body, unseen
from emulate.trace.format import STATE_OF
from emulate.upstream import is_of_metric

_NUMBERS = ("float", "bfloat", "int")  # an unsigned one is the state of a random generator


def install(recorder: Recorder) -> None:
    """Wrap what assigns a variable, of one device or of several."""
    for cls in upstream.variable_classes():
        for name in [name for name in vars(cls) if name.startswith(("assign", "scatter_"))]:
            _wrap_assign(recorder, cls, name)

    @around(graph_functions.function_class(), graph_functions.INITIALIZES)
    def initialize(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with recorder.functions.unchanged():
                return original(function, *args, **kwargs)
        except Exception:
            recorder.initial.missed()
            raise
        finally:
            recorder.initial.born()
            recorder.functions.born()


def _wrap_assign(recorder: Recorder, cls: Any, name: str) -> None:
    @around(cls, name)
    def assign(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        body = current_body()
        if body is None:
            result = original(self, *args, **kwargs)
            recorder.assigned_between_steps(self, by_program=_is_by_program(caller()))
            return result
        if body.assigns or optimizers.is_applying(body.replica):
            return original(self, *args, **kwargs)
        body.keeps = True
        of_metric, of_layer = _is_of_metric(self, caller()), bool(body.layer_depth)
        if body.lines is not None:
            body.lines.assign(recorder.names.of(self), [*args, *kwargs.values()], of_metric=of_metric, of_layer=of_layer)
        if not of_metric:  # Keras counts in the same metrics for training and validation, and begins them anew
            recorder.functions.changes(self)
        if recorder.plan.replay is not None and body.share not in (None, -1) and _is_left_to_the_last(recorder, body, self):
            return self
        if id(self) not in body.assigned and _is_shared_number(self):
            body.assigned[id(self)] = self
            if not body.layer_depth:
                body.by_hand.add(id(self))
            name = recorder.names.of(self)
            if self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA and self.shape.rank == 0:  # perhaps only shown
                recorder.facts.add("of_first", name)
            else:
                recorder.initial.before_first(f"{STATE_OF}{body.label}: {name}", body.replica, [self])
        with unseen():  # one of several copies is assigned within
            return original(self, *args, **kwargs)


def _is_by_program(frame: Any) -> bool:
    """Return whether the program itself assigns, not a library, gpudist_core included."""
    return not str(frame.f_globals.get("__name__", "")).startswith("gpudist_core.") and program_caller(frame) is not None


def _is_of_metric(variable: Any, frame: Any) -> bool:
    """Return whether a library, not the program itself, counts something on each replica."""
    is_own = variable.synchronization == tf.VariableSynchronization.ON_READ and program_caller(frame) is None
    return is_own or is_of_metric(variable)


def _is_left_to_the_last(recorder: Recorder, body: Body, variable: Any) -> bool:
    """Return whether only the last share of a batch assigns a variable, because it has the update made.

    Where tapes join the shares it has all gradients too. What layers and metrics count of their rows each share adds to.
    """
    if recorder.plan.replay is not None and recorder.plan.replay.taped:
        return True
    of_layers = {id(upstream.tf_variable(v)) for v in recorder.untrained(body)}
    return _is_shared_number(variable) and id(variable) not in of_layers


def _is_shared_number(variable: Any) -> bool:
    """Return whether each replica holds the same value, unlike a count of each replica (`ON_READ`, a metric)."""
    is_own = variable.synchronization == tf.VariableSynchronization.ON_READ or is_of_metric(variable)
    return bool(variable.dtype.name.startswith(_NUMBERS)) and not is_own
