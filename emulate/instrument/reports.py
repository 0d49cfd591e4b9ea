"""Record the numbers that a program reports itself: what it reduces over the replicas, Keras's logs, metrics."""

from __future__ import annotations

import functools
import numbers
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.point import PASSING, Caller, around, caller, program_caller
from emulate.recorder import Recorder, current_body
from emulate.recorder.lines import stack_lines
from emulate.trace import SO_FAR
from emulate.upstream import averages, is_floating, mark_of_metric

_OF_METRIC = "_gpudist_metric"
"""Attribute of tensors that a metric gives inside of a step."""
_HOOKS = (("on_train_batch_end", "batch"), ("on_epoch_end", "epoch"), ("on_test_end", "evaluate"))
"""Methods of callbacks that get logs, and what these are of."""
_SUMMED = (
    "Keras 2's fit logs the loss and metrics of a batch as the sum over the hosts (reduce_per_replica, tf_keras 2.21): "
    "those of batches were not compared; those of an epoch are right."
)


def install_reduce(recorder: Recorder) -> None:
    """Wrap `Strategy.reduce`: how custom loops get one loss out of their replicas."""
    cls = upstream.strategy_class()
    places = _Places()

    @around(cls, "reduce")
    def reduce(original: Any, self: Any, reduce_op: Any, value: Any, axis: Any) -> Any:
        result = original(self, reduce_op, value, axis)
        frame = caller()
        function = program_caller(frame)
        if function is not None:
            line = _line(frame)
            name = places.name(f"{function.name}/reduce", function, line)
            is_mean = axis is None and averages(reduce_op)
            more = {"line": line, **({"how": "mean"} if is_mean else {})}
            recorder.lines.reported(value, name, averages=is_mean)
            report_tensor(recorder, result, _kind_of_parts(value), name, more)
        return result


class _Places:
    """Distinguish calls of same-named functions in several places: a loss and an accuracy, training and evaluation."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[tuple[Any, ...], int]] = {}

    def name(self, name: str, caller: Caller, line: str = "") -> str:
        """Return the name, with the number of its place from the second place on.

        Args:
            name: Of the function and what it calls.
            caller: Where that is called.
            line: The program's own, where it is known.

        Returns:
            `name`, `name 2`, ...
        """
        places = self._seen.setdefault(name, {})
        number = places.setdefault((*caller.place, line), len(places) + 1)
        return name if number == 1 else f"{name} {number}"


def _line(frame: Any) -> str:
    """Return the program's line of a reduction: the result does not tell it, which on one device is what is reduced."""
    file, line = next(iter(stack_lines.here()[-1:]), (frame.f_code.co_filename, frame.f_lineno))
    return f"{os.path.basename(file)}:{line}"


def install_local_results(recorder: Recorder) -> None:
    """Wrap `Strategy.experimental_local_results`: a number that is taken of one replica alone is reported as it is."""
    cls = upstream.strategy_class()
    places = _Places()

    @around(cls, "experimental_local_results")
    def experimental_local_results(original: Any, self: Any, value: Any) -> Any:
        results = original(self, value)
        frame = caller()
        # gpudist_core reads the logs of a `fit` on the progress bar's schedule: the logs report them.
        reads_logs = str(frame.f_globals.get("__name__", "")).startswith("gpudist_core.keras_model.")
        function = None if reads_logs else program_caller(frame)
        if function is None or current_body() is not None or any(hasattr(result, "assign") for result in results):
            return results
        parts = _OfReplicas(results)
        parts.looked_at = functools.partial(_looked_at, recorder, places.name(f"{function.name}/local result", function), {})
        return parts


class _OfReplicas(tuple[Any, ...]):  # noqa: SLOT001 (a tuple can have no slots that hold something)
    """Hold the replicas' results, with which of them the program reads: None for all."""

    looked_at: Callable[[int | None, Any], None] | None = None

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if self.looked_at is not None:
            self.looked_at(key if isinstance(key, int) else None, value)
        return value

    def __iter__(self) -> Iterator[Any]:
        if self.looked_at is not None:
            self.looked_at(None, None)
        return super().__iter__()


def _looked_at(recorder: Recorder, name: str, keys: dict[int, None], key: int | None, value: Any) -> None:
    if key is None or (keys and key not in keys):
        recorder.trace.shared(name)
    elif not keys:
        keys[key] = None
        recorder.lines.reported(value, name)
        report_tensor(recorder, value, _kind_of_parts(value), name)


def _kind_of_parts(value: Any) -> str:
    """Return what the replicas' numbers are: read from a metric inside of the step, or a loss."""
    parts = getattr(value, "values", None)
    first = parts[0] if isinstance(parts, tuple) else value
    waiting, seen = [first] if tf.is_tensor(first) else [], set()
    while waiting:
        tensor = waiting.pop()
        if hasattr(tensor, _OF_METRIC):
            return "metric"
        if id(tensor) not in seen and not isinstance(tensor, tf.__internal__.EagerTensor):
            seen.add(id(tensor))
            waiting += [operand for operand in tensor.op.inputs if operand.shape.rank == 0]  # a factor of the program's own
    return "loss"


def report_tensor(recorder: Recorder, value: Any, kind: str, name: str, more: Mapping[str, Any] | None = None) -> None:
    """Record a number that the program reports, and what more is known of it: a floating scalar outside of a step."""
    if current_body() is not None or not tf.is_tensor(value) or value.shape.rank != 0 or not is_floating(value):
        return
    recorder.queue.hand_over("report", {"kind": kind, "name": name, **(more or {})}, [(("value",), value)])


def _is_asked_by_the_program(frame: Any) -> bool:
    """Return whether the program itself reads a metric's result: the bar of a `fit` reads it on its own schedule."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(PASSING):
        frame = frame.f_back
    is_ours = frame is not None and frame.f_globals.get("__name__", "").startswith("gpudist_core.")
    return not is_ours and program_caller(frame) is not None


def install_keras(recorder: Recorder, package: str) -> None:
    """Wrap the callbacks of `fit` and `evaluate`, and `Metric.result`, of one Keras."""
    for cls in upstream.callback_list_classes():
        if cls.__module__.startswith(package):
            for method, where in _HOOKS:
                _wrap_hook(recorder, cls, method, where)
    for cls in upstream.metric_classes():
        if cls.__module__.startswith(package):
            _wrap_result(recorder, cls)
    if package == upstream.KERAS_3 and (mirrored := upstream.mirrored_metric_class()) is not None:

        @around(mirrored, "add_variable")
        def add_variable(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            variable = original(self, *args, **kwargs)
            mark_of_metric(variable)  # it is no state of the step, and a wrong number of it is Keras's fault
            return variable

        recorder.facts.mirrored_metrics = True


def _wrap_hook(recorder: Recorder, cls: Any, method: str, where: str) -> None:
    takes_number = where != "evaluate"
    steps: Counter[int] = Counter()
    sums_over_hosts = recorder.several_hosts and cls.__module__.startswith(upstream.LEGACY_KERAS)

    @around(cls, method)
    def hook(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if where == "batch" and sums_over_hosts:
            recorder.note_once("batch-logs", _SUMMED)
            return original(self, *args, **kwargs)
        position = 1 if takes_number else 0
        logs = kwargs.get("logs", args[position] if len(args) > position else None)
        for name, value in logs.items() if isinstance(logs, Mapping) else ():  # none yet where a worker has them
            _report_log(recorder, f"{where}/{name}", value)
        if where == "batch" and isinstance(logs, Mapping):
            theirs = (upstream.KERAS_3, *upstream.LEGACY_KERAS, "gpudist_core.")
            owners = [cls for cls in type(self.model).__mro__ if "train_step" in vars(cls)]
            if "train_step" in vars(self.model) or any(not cls.__module__.startswith(theirs) for cls in owners):
                recorder.facts.own_train_step = True
                recorder.write_facts()
            _report_so_far(recorder, self.model, logs, steps)
        return original(self, *args, **kwargs)


def see_epochs_so_far(recorder: Recorder, cls: Any) -> None:
    """Report what an epoch would log, of callbacks that are called only where they have something to do.

    And the losses that a certificate may check: reading logs costs time there, so that others are not read.
    """
    from gpudist_core.certificates import STEPS, checks

    steps = Counter[int]()

    @around(cls, "on_train_batch_end")
    def on_train_batch_end(original: Any, self: Any, batch: int, logs: Any = None) -> None:
        if isinstance(logs, Mapping):
            _report_so_far(recorder, self.model, logs, steps)
            if batch < STEPS and "loss" in logs and any(isinstance(callback, checks.Check) for callback in self.callbacks):
                _report_log(recorder, "batch/loss", logs["loss"])
        original(self, batch, logs)


def _report_so_far(recorder: Recorder, model: Any, logs: Mapping[str, Any], steps: Counter[int]) -> None:
    """Report the logs of an epoch that ended before the run stops, with metrics over all replicas.

    In a batch's logs they are the mean of the replicas'.
    """
    each = getattr(model, "steps_per_execution", 1)
    each = each if isinstance(each, int) else 1
    steps[id(model)] += each
    looks_from = recorder.plan.looks_from or recorder.plan.steps
    if recorder.several_hosts or looks_from is None or steps[id(model)] + each < looks_from:
        return  # between hosts to read a metric is a collective
    try:
        metrics = model.get_metrics_result()
    except Exception:  # a metric of the program's own that cannot tell yet must not end it
        return
    for name, value in (metrics if metrics.keys() == logs.keys() else logs).items():
        _report_log(recorder, f"{SO_FAR}/{name}", value)


def _report_log(recorder: Recorder, name: str, value: Any) -> None:
    if recorder.plan.replay is not None and recorder.plan.replay.has_no_log(name):
        return
    if isinstance(value, numbers.Real):
        value = tf.constant(float(value), tf.float64)
    report_tensor(recorder, value, _kind(name), name)


def _kind(name: str) -> str:
    return "loss" if name.endswith("loss") else "metric"


def _wrap_result(recorder: Recorder, cls: Any) -> None:
    """Report a metric's result that the program reads outside of a step. Keras wraps `result` in each subclass."""
    if cls.__new__ is object.__new__:  # which takes no arguments, once it is no longer a class's own
        cls.__new__ = staticmethod(lambda klass, *_, **__: object.__new__(klass))

    @around(cls, "__new__", static=True)
    def new(original: Any, klass: Any, *args: Any, **kwargs: Any) -> Any:
        _wrap_class_result(recorder, klass)
        return original(klass, *args, **kwargs)


def _wrap_class_result(recorder: Recorder, cls: Any) -> None:
    if getattr(cls.result, "_gpudist", False):
        return

    @around(cls, "result")
    def result(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(self, *args, **kwargs)
        if current_body() is not None and tf.is_tensor(value):
            setattr(value, _OF_METRIC, True)
        elif current_body() is None and _is_asked_by_the_program(caller()):
            report_tensor(recorder, value, _kind(self.name), f"metric/{self.name}")
        return value

    result._gpudist = True  # type: ignore[attr-defined]
