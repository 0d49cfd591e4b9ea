"""Record the user's line of calls that make what a step uses: datasets, strategies, optimizers, layers."""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Callable
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.interventions import see_counts
from emulate.point import around, around_function, caller, program_caller, when_imported
from emulate.recorder import Recorder, current_body
from emulate.recorder.lines import stack_lines
from emulate.recorder.lines.step import REPLICA
from emulate.upstream import averages

_PIPELINE = ("batch", "padded_batch", "shard", "shuffle", "map", "repeat", "take", "skip", "cache", "interleave")
_SOURCES = ("from_tensors", "from_tensor_slices", "from_generator")
_LAYERS = ("BatchNormalization", "Dropout")
"""Layers of which the line is told: what they do on replicas is their own."""


def install(recorder: Recorder) -> None:
    """Wrap TensorFlow's and NumPy's calls."""
    if not recorder.lines.enabled:
        return

    @around(*upstream.converter())
    def convert(original: Any, *args: Any, **kwargs: Any) -> Any:
        converted = original(*args, **kwargs)
        stack_lines.ORIGINS.update(upstream.origins_of(converted))  # what autograph makes of which lines
        return converted

    @around(upstream.function_graph_class(), "_create_op_internal")
    def create(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        operation = original(self, *args, **kwargs)
        body = current_body()
        if body is not None:  # replicas are traced one after the other by threads
            setattr(operation, REPLICA, body.replica)
        return operation

    dataset, strategy = upstream.dataset_class(), upstream.strategy_class()
    for name in _PIPELINE:
        _wrap(recorder, dataset, name, name, about=_ABOUT.get(name))
    for name in _SOURCES:
        _wrap(recorder, dataset, name, name, static=True)
    _wrap(recorder, strategy, "experimental_distribute_dataset", "distribute")
    _wrap(recorder, strategy, "run", "run")
    _wrap_function_of_datasets(recorder, strategy)
    _wrap(recorder, strategy, "__init__", "strategy")
    for name in ("restore", "read"):
        _wrap(recorder, upstream.checkpoint_class(), name, "restore")
    _wrap_collectives(recorder)

    @around(upstream.options_class(), "__setattr__")
    def set_option(original: Any, self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if name == "auto_shard_policy":
            recorder.lines.note_call(name, _by_whom(caller()) | {"value": str(getattr(value, "name", value))})

    see_counts(lambda: recorder.lines.note_call("num_replicas"))
    when_imported("numpy", lambda: _wrap_numpy(recorder))


def install_keras(recorder: Recorder, package: str) -> None:
    """Wrap what makes the layers that are told of, in one Keras."""
    for cls in upstream.layer_classes_of(package) if recorder.lines.enabled else ():
        signature = inspect.signature(cls.__init__)

        @around(cls, "__init__")
        def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            kind = next((kind for kind in _LAYERS if kind in type(self).__name__), None)
            if kind is not None:
                recorder.lines.note_call(kind)
            original(self, *args, **kwargs)

        # Keras 3 makes a layer's configuration of the arguments of `__init__`, and asks for them past `__wrapped__`.
        init.__signature__ = signature  # type: ignore[attr-defined]


def _wrap(
    recorder: Recorder,
    cls: Any,
    name: str,
    kind: str,
    *,
    static: bool = False,
    about: Callable[[Any, Any], dict[str, Any]] | None = None,
) -> None:
    @around(cls, name, static=static)
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.lines.note_call(kind, _by_whom(caller()) | (about(args, kwargs) if about else {}))
        return original(*args, **kwargs)


def _by_whom(frame: Any) -> dict[str, Any]:
    """Return that a library calls, if it is no function of the program."""
    return {} if program_caller(frame) is not None else {"called": True}


def _seed_of(args: Any, kwargs: Any) -> dict[str, Any]:
    return _seeded(kwargs.get("seed", args[2] if len(args) > 2 else None))


def _count_of(args: Any, kwargs: Any) -> dict[str, Any]:
    count = tf.get_static_value(kwargs.get("count", args[1] if len(args) > 1 else None))
    is_known = isinstance(count, numbers.Integral) or getattr(count, "shape", None) == ()
    return {"count": int(count)} if is_known else {}


_ABOUT = {"shuffle": _seed_of, "take": _count_of, "skip": _count_of}


def _seeded(seed: Any) -> dict[str, Any]:
    return {"seeded": seed is not None} | ({"seed": int(seed)} if isinstance(seed, numbers.Integral) else {})


def _wrap_function_of_datasets(recorder: Recorder, cls: Any) -> None:
    """Tell, of the function that makes each host's dataset, the line that returns it: the last one of its pipeline."""

    @around(cls, "distribute_datasets_from_function")
    def distribute(original: Any, self: Any, dataset_fn: Any, *args: Any, **kwargs: Any) -> Any:
        def made(dataset_fn: Any, context: Any) -> Any:
            before = len(stack_lines.here())
            stacks: list[stack_lines.Frames] = []
            recorder.lines.listeners.append(lambda: stacks.append(stack_lines.here()))
            try:
                with recorder.streams.building() if recorder.streams is not None else contextlib.nullcontext():
                    return dataset_fn(context)
            finally:
                recorder.lines.listeners.pop()
                if stacks and len(stacks[-1]) > before:
                    recorder.lines.note_call("dataset function", made=[stacks[-1][before]])

        return original(self, around_function(dataset_fn, made, "the function of a dataset"), *args, **kwargs)


def _wrap_collectives(recorder: Recorder) -> None:
    for cls, name in upstream.replica_collectives():

        @around(cls, name)
        def call(original: Any, self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            body = current_body()
            if body is not None and body.lines is not None and program_caller(caller()) is not None:
                body.lines.call("sum", _name)
                if _name == "all_reduce" and averages(args[0] if args else kwargs.get("reduce_op")):
                    body.lines.call("sum", "averages")
            return original(self, *args, **kwargs)


def _wrap_numpy(recorder: Recorder) -> None:
    import numpy as np

    @around(np.random, "default_rng")
    def default_rng(original: Any, seed: Any = None) -> Any:
        recorder.lines.note_call("generator", _seeded(seed))
        return original(seed)
