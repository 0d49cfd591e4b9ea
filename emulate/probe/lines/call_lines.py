"""Record the user's line of calls that make what a step uses: datasets, strategies, optimizers, layers."""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emulate.probe import interventions, upstream
from emulate.probe import replica_call as bodies
from emulate.probe.lines import stack_lines, step
from emulate.probe.point import around, around_function, caller, when_imported
from emulate.probe.reports import averages, program_caller
from emulate.program import described, innermost

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

_PIPELINE = ("batch", "padded_batch", "shard", "shuffle", "map", "repeat", "take", "skip", "cache", "interleave")
_SOURCES = ("from_tensors", "from_tensor_slices", "from_generator")
_LAYERS = ("BatchNormalization", "Dropout")
"""Layers of which the line is told: what they do on replicas is their own."""


def install(probe: Probe) -> None:
    """Wrap TensorFlow's and NumPy's calls."""
    if not probe.lines.enabled:
        return
    stack_lines.install()
    step.own_operations()
    dataset, strategy = upstream.dataset_class(), upstream.strategy_class()
    for name in _PIPELINE:
        _wrap(probe, dataset, name, name, about=_seed_of if name == "shuffle" else None)
    for name in _SOURCES:
        _wrap(probe, dataset, name, name, static=True)
    _wrap(probe, strategy, "experimental_distribute_dataset", "distribute")
    _wrap_function_of_datasets(probe, strategy)
    _wrap(probe, strategy, "__init__", "strategy")
    for name in ("restore", "read"):
        _wrap(probe, upstream.checkpoint_class(), name, "restore")
    _wrap_collectives(probe)
    _wrap_options(probe)
    interventions.see_counts(lambda: note(probe, "num_replicas"))
    when_imported("numpy", lambda: _wrap_numpy(probe))


def install_keras(probe: Probe, package: str) -> None:
    """Wrap what makes the layers that are told of, in one Keras."""
    for cls in upstream.layer_classes_of(package) if probe.lines.enabled else ():
        signature = inspect.signature(cls.__init__)

        @around(cls, "__init__")
        def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            kind = next((kind for kind in _LAYERS if kind in type(self).__name__), None)
            if kind is not None:
                note(probe, kind)
            original(self, *args, **kwargs)

        # Keras 3 makes a layer's configuration of the arguments of `__init__`, and asks for them past `__wrapped__`.
        init.__signature__ = signature  # type: ignore[attr-defined]


def note(probe: Probe, kind: str, about: dict[str, Any] | None = None, made: stack_lines.Frames | None = None) -> None:
    """Write the line of a call, once; inside of a step as a point of it."""
    body = bodies.current()
    for listener in probe.lines.listeners:
        listener()
    stack = (stack_lines.here() if made is None else made) if probe.lines.enabled else ()
    place = innermost(list(stack))
    if place is not None:
        probe.lines.write(
            {"event": "made", "kind": kind, "in_step": body is not None, **(about or {}), "line": described(*place)}
        )


def _wrap(
    probe: Probe,
    cls: Any,
    name: str,
    kind: str,
    *,
    static: bool = False,
    about: Callable[[Any, Any], dict[str, Any]] | None = None,
) -> None:
    @around(cls, name, static=static)
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        note(probe, kind, _by_whom(caller()) | (about(args, kwargs) if about else {}))
        return original(*args, **kwargs)


def _by_whom(frame: Any) -> dict[str, Any]:
    """Return that a library calls, if it is no function of the program."""
    return {} if program_caller(frame) is not None else {"called": True}


def _seed_of(args: Any, kwargs: Any) -> dict[str, Any]:
    return _seeded(kwargs.get("seed", args[2] if len(args) > 2 else None))


def _seeded(seed: Any) -> dict[str, Any]:
    return {"seeded": seed is not None} | ({"seed": int(seed)} if isinstance(seed, numbers.Integral) else {})


def _wrap_function_of_datasets(probe: Probe, cls: Any) -> None:
    """Tell, of the function that makes each host's dataset, the line that returns it: the last one of its pipeline."""

    @around(cls, "distribute_datasets_from_function")
    def distribute(original: Any, self: Any, dataset_fn: Any, *args: Any, **kwargs: Any) -> Any:
        def made(dataset_fn: Any, context: Any) -> Any:
            before = len(stack_lines.here())
            stacks: list[stack_lines.Frames] = []
            probe.lines.listeners.append(lambda: stacks.append(stack_lines.here()))
            try:
                with probe.streams.building() if probe.streams is not None else contextlib.nullcontext():
                    return dataset_fn(context)
            finally:
                probe.lines.listeners.pop()
                if stacks and len(stacks[-1]) > before:
                    note(probe, "dataset function", made=[stacks[-1][before]])

        return original(self, around_function(dataset_fn, made, "the function of a dataset"), *args, **kwargs)


def _wrap_collectives(probe: Probe) -> None:
    for cls, name in upstream.replica_collectives():

        @around(cls, name)
        def call(original: Any, self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            body = bodies.current()
            if body is not None and body.lines is not None and program_caller(caller()) is not None:
                body.lines.call("sum", _name)
                if _name == "all_reduce" and averages(args[0] if args else kwargs.get("reduce_op")):
                    body.lines.call("sum", "averages")
            return original(self, *args, **kwargs)


def _wrap_options(probe: Probe) -> None:
    cls = upstream.options_class()

    @around(cls, "__setattr__")
    def set_option(original: Any, self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if name == "auto_shard_policy":
            note(probe, name, _by_whom(caller()) | {"value": str(getattr(value, "name", value))})


def _wrap_numpy(probe: Probe) -> None:
    import numpy as np

    @around(np.random, "default_rng")
    def default_rng(original: Any, seed: Any = None) -> Any:
        note(probe, "generator", _seeded(seed))
        return original(seed)
