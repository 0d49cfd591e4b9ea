"""Hook into `Strategy.run`, the first probe point, which gets each replica's examples."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

from emulate import graph_functions
from emulate.probe import body as bodies
from emulate.probe import upstream
from emulate.probe.point import around

if TYPE_CHECKING:
    from emulate.probe.probe import Probe


_MOST_COMPILED = 8
"""A program that makes more functions than these makes another one in each step."""
_EMPTY = types.CellType()


def install(probe: Probe) -> None:
    """Wrap `run` of every class that defines it."""
    for cls in graph_functions.strategy_classes():
        _wrap(probe, cls)
    if probe.plan.functions:
        _wrap_functions(probe)
    _see_layers(probe)


def _wrap_functions(probe: Probe) -> None:
    """Take the inputs of the tf.function as examples, for a program that calls `Strategy.run` only on several devices."""
    cls = graph_functions.function_class()
    clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @around(cls, "__call__")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        module = str(getattr(self.python_function, "__module__", ""))
        is_theirs = module.partition(".")[0] in ("tensorflow", "keras", "tf_keras")
        if is_theirs or bodies.current() is not None or not tf.executing_eagerly():
            return original(self, *args, **kwargs)
        probe.lines.run_entered()
        result = original(_probed(probe, clones, self), *args, **kwargs)
        probe.recorder.hold_if_reached()
        return result


def _wrap(probe: Probe, cls: Any) -> None:
    clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    compiled: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}

    @around(cls, "run")
    def run(original: Any, self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        import tensorflow as tf

        if bodies.current() is not None:
            return original(self, fn, args, kwargs, options)
        probe.strategy_seen(self)
        probe.lines.run_entered()
        if probe.plan.compiled and tf.executing_eagerly() and not graph_functions.is_function(fn):
            fn = _compiled(compiled, fn)
        result = original(self, _probed(probe, clones, fn), args, kwargs, options)
        if tf.executing_eagerly():
            probe.recorder.hold_if_reached()
        return result


def _compiled(compiled: dict[tuple[int, ...], tuple[Any, list[Any]]], fn: Any) -> Any:
    """Return a function as a `tf.function`: the same one if it is defined anew in each step, itself if it is always another."""
    import tensorflow as tf

    parts = _parts_of(fn)
    key = tuple(map(id, parts))
    if key not in compiled and len(compiled) < _MOST_COMPILED:
        compiled[key] = tf.function(fn, reduce_retracing=True), parts  # with the parts, so that nothing else gets their numbers
    return compiled[key][0] if key in compiled else fn


def _parts_of(fn: Any) -> list[Any]:
    """Return the objects that make a function what it is: its code, and what it has from elsewhere."""
    if isinstance(fn, functools.partial):
        return [*_parts_of(fn.func), *fn.args, *fn.keywords.values()]
    if isinstance(fn, types.MethodType):
        return [*_parts_of(fn.__func__), fn.__self__]
    if not isinstance(fn, types.FunctionType):
        return [fn]
    return [fn.__code__, *(fn.__defaults__ or ()), *(cell.cell_contents for cell in fn.__closure__ or () if cell != _EMPTY)]


def _probed(probe: Probe, clones: Any, function: Any) -> Any:
    if not graph_functions.is_function(function):
        return bodies.wrap(probe, graph_functions.convert(function), converted=True, label=bodies.label_of(function))
    if function not in clones:
        label = bodies.label_of(function)
        body = bodies.wrap(probe, function.python_function, converted=False, label=label)
        clones[function] = graph_functions.clone_function(function, body)
    return clones[function]


def _see_layers(probe: Probe) -> None:
    """Record the outermost layers called in a step, of each imported Keras."""
    from emulate.imports import when_imported

    for package in ("keras", "tf_keras"):
        when_imported(package, functools.partial(_wrap_layers, probe))


def _wrap_layers(probe: Probe) -> None:
    for cls in upstream.layer_classes():
        if not hasattr(cls.__call__, "_gpudist"):
            _wrap_layer(probe, cls)


def _wrap_layer(probe: Probe, cls: Any) -> None:
    @around(cls, "__call__")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        body = bodies.current()
        if body is None or body.layer_depth:
            return original(self, *args, **kwargs)
        body.models[id(self)] = self
        body.layer_depth += 1
        rows = contextlib.nullcontext() if body.row_keys is None else body.row_keys.in_call(self, args, body.num_draws)
        try:
            with rows:
                return original(self, *args, **kwargs)
        finally:
            body.layer_depth -= 1
            _facts_of(probe, self)

    call._gpudist = True  # type: ignore[attr-defined]


def _facts_of(probe: Probe, model: Any) -> None:
    """Record which layers of a model may behave differently between topologies."""
    flatten = getattr(model, "_flatten_layers", None)
    probe.facts.compiled = probe.facts.compiled or upstream.has_compiled_loss(model)
    if hasattr(model, "_gpudist_draws"):
        probe.facts.note("distributed", model.name)
    for layer in list(flatten()) if flatten else [model]:
        kind = type(layer).__name__
        if "BatchNormalization" in kind and not getattr(layer, "synchronized", False):
            probe.facts.note("batchnorm", *(probe.names.of(v) for v in layer.non_trainable_variables))
        if "Dropout" in kind and getattr(layer, "rate", True):  # an attention layer has one of rate 0, which draws nothing
            probe.facts.note("dropout", layer.name)
        if getattr(layer, "compute_dtype", None) in ("bfloat16", "float16"):
            probe.facts.note(layer.compute_dtype, *(probe.names.of(v) for v in upstream.own_weights(layer)))
        for variable in getattr(layer, "trainable_variables", []):
            if getattr(variable, "regularizer", None) is not None:
                probe.facts.note("regularized", probe.names.of(variable))
