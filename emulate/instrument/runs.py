"""Wrap `Strategy.run`, where a step begins: its function runs in each replica within a `Body`; and the layers that it calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.instrument import constants
from emulate.interventions import Interventions, put_back
from emulate.point import around, around_function, when_imported
from emulate.recorder import Body, Recorder, current_body


def label_of(function: Callable[..., Any]) -> str:
    """Return where the program's function is defined."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    code = getattr(function, "__code__", None)
    line = code.co_firstlineno if code is not None else 0
    name = getattr(getattr(function, "__self__", None), "name", None)  # one method may train and test
    of = f" of {name}" if isinstance(name, str) else ""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}:{line}{of}"


def wrap(
    recorder: Recorder, interventions: Interventions, function: Callable[..., Any], *, converted: bool, label: str
) -> Callable[..., Any]:
    """Return the function that runs in each replica in place of the program's, and calls it.

    Args:
        recorder: What records.
        interventions: What the call gets in place of its own.
        function: The program's function, already converted by autograph unless `converted` is False.
        converted: False for the Python function of a tf.function, which is converted when it is traced.
        label: Where the program's function stands.

    Returns:
        The function to hand to `Strategy.run`.
    """

    def replica_body(inner: Any, *args: Any, **kwargs: Any) -> Any:
        body = Body(label)
        with body.running():
            recorder.replica_seen(body.replica)
            recorder.coordinated.see_run()
            once = functools.partial(_call_once, recorder, interventions, body)
            with recorder.lines.of(body):
                result = interventions.call(body, once, inner, args, kwargs)
                if body.lines is not None:
                    body.lines.returned = result
                return result

    @graph_functions.do_not_convert
    def replica(*args: Any, **kwargs: Any) -> Any:
        inner = function if converted else graph_functions.convert(function, enabled=True)
        return around_function(inner, replica_body, "the function of Strategy.run")(*args, **kwargs)

    return replica


def _call_once(
    recorder: Recorder, interventions: Interventions, body: Body, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run the program's function once over one batch."""
    plan = recorder.plan
    args, kwargs, order = interventions.examples(body.label, args, kwargs)
    args, kwargs = recorder.functions.apart(args, kwargs)
    body.begin_pass(args, kwargs)
    result = function(*args, **kwargs)
    if order is not None:
        result = put_back(body, order, result)
    # Where tapes join the shares, the last one gets all that the step makes of its gradients.
    if body.share is None or (body.share == -1 and plan.replay is not None and plan.replay.taped):
        constants.remember_captured(recorder, body)
        recorder.call_ended(body, result)
    return result


_MOST_COMPILED = 8
"""A program that makes more functions than these makes another one in each step."""
_EMPTY = types.CellType()


def install(recorder: Recorder, interventions: Interventions) -> None:
    """Wrap `run` of every class that defines it."""
    for cls in graph_functions.strategy_classes():
        _wrap_run(recorder, interventions, cls)
    if recorder.plan.functions:
        _wrap_functions(recorder, interventions)
    for name, package in upstream.KERAS_PACKAGES.items():
        when_imported(name, functools.partial(_wrap_layers, recorder))
        if package == upstream.KERAS_3:
            when_imported(name, functools.partial(_see_masks, recorder))
            when_imported(name, functools.partial(_see_surprises, recorder))


def _wrap_functions(recorder: Recorder, interventions: Interventions) -> None:
    """Take the inputs of the tf.function as examples, for a program that calls `Strategy.run` only on several devices."""
    cls = graph_functions.function_class()
    clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @around(cls, "__call__")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        module = str(getattr(self.python_function, "__module__", ""))
        is_theirs = module.partition(".")[0] in ("tensorflow", "keras", "tf_keras")
        if is_theirs or current_body() is not None or not tf.executing_eagerly():
            return original(self, *args, **kwargs)
        recorder.lines.run_entered()
        result = original(_recorded(recorder, interventions, clones, self), *args, **kwargs)
        recorder.queue.hold_if_reached()
        return result


def _wrap_run(recorder: Recorder, interventions: Interventions, cls: Any) -> None:
    clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    compiled: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}

    @around(cls, "run")
    def run(original: Any, self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        if current_body() is not None:
            return original(self, fn, args, kwargs, options)
        recorder.strategy_seen(self)
        recorder.lines.run_entered()
        if recorder.plan.compiled and tf.executing_eagerly() and not graph_functions.is_function(fn):
            fn = _compiled(compiled, fn)
        result = original(self, _recorded(recorder, interventions, clones, fn), args, kwargs, options)
        if tf.executing_eagerly():
            recorder.queue.hold_if_reached()
        return result


def _compiled(compiled: dict[tuple[int, ...], tuple[Any, list[Any]]], fn: Any) -> Any:
    """Return a function as a `tf.function`: the same one if it is defined anew in each step, itself if it is always another."""
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


def _recorded(recorder: Recorder, interventions: Interventions, clones: Any, function: Any) -> Any:
    if not graph_functions.is_function(function):
        return wrap(recorder, interventions, graph_functions.convert(function), converted=True, label=label_of(function))
    if function not in clones:
        label = label_of(function)
        body = wrap(recorder, interventions, function.python_function, converted=False, label=label)
        clones[function] = graph_functions.clone_function(function, body)
    return clones[function]


def _see_masks(recorder: Recorder) -> None:
    """Record the layers of Keras 3 that are not synchronized, whatever they say, because their input has a mask."""
    cls = upstream.batchnorm_class(upstream.KERAS_3)
    signature = inspect.signature(cls.call)

    @around(cls, "call")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if signature.bind(self, *args, **kwargs).arguments.get("mask") is not None:
            for name in ("batchnorm", "masked"):
                recorder.facts.add(name, *(recorder.names.of(variable) for variable in self.non_trainable_variables))
        return original(self, *args, **kwargs)


def _see_surprises(recorder: Recorder) -> None:
    """Record what Keras 3 does otherwise than a program seems to say: with generators and with masks."""
    facts, (merging, iterator) = recorder.facts, upstream.surprising_classes()

    @around(merging, "compute_mask")
    def compute_mask(original: Any, self: Any, inputs: Any, mask: Any = None) -> Any:
        masks = mask if isinstance(mask, (list, tuple)) else ()
        if 0 < sum(one is None for one in masks) < len(masks):
            facts.add("unmasked", self.name)
        return original(self, inputs, mask)

    @around(iterator, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        facts.distributes_generator |= upstream.reads_generator(self)


def _wrap_layers(recorder: Recorder) -> None:
    """Record the outermost layers called in a step, of the imported Keras versions."""
    for cls in upstream.layer_classes():
        if hasattr(cls.__call__, "_gpudist"):
            continue

        @around(cls, "__call__")
        def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            body = current_body()
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
                _facts_of(recorder, self)

        call._gpudist = True  # type: ignore[attr-defined]


def _facts_of(recorder: Recorder, model: Any) -> None:
    """Record which layers of a model may behave differently between topologies."""
    flatten = getattr(model, "_flatten_layers", None)
    recorder.facts.compiled = recorder.facts.compiled or upstream.has_compiled_loss(model)
    if hasattr(model, "_gpudist_draws"):
        recorder.facts.add("distributed", model.name)
    for layer in list(flatten()) if flatten else [model]:
        kind = type(layer).__name__
        if "BatchNormalization" in kind and not getattr(layer, "synchronized", False):
            recorder.facts.add("batchnorm", *(recorder.names.of(v) for v in layer.non_trainable_variables))
        if "Dropout" in kind and getattr(layer, "rate", True):  # an attention layer has one of rate 0, which draws nothing
            recorder.facts.add("dropout", layer.name)
        if getattr(layer, "compute_dtype", None) in ("bfloat16", "float16"):
            recorder.facts.add(layer.compute_dtype, *(recorder.names.of(v) for v in upstream.own_weights(layer)))
        for variable in getattr(layer, "trainable_variables", []):
            if getattr(variable, "regularizer", None) is not None:
                recorder.facts.add("regularized", recorder.names.of(variable))
