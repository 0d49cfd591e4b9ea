"""Detect in a host which phase a step is in, by wrapping TensorFlow and Keras. The program is not edited.

Where a fault waits, a small Python call stands in the program's graph at its place: what comes after it waits for it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from emulate import graph_functions, upstream
from emulate.faults.triggers import Counter, HostFaults, Send, Site, Triggers
from emulate.imports import tf, when_imported
from emulate.point import instead_of

_SAVING, _ARRAYS = "gpudist_core.checkpoints.saving", "gpudist_core.checkpoints.files"


def install(known: HostFaults, send: Send) -> None:
    """Put the triggers of this host's faults in place, now or as soon as TensorFlow and Keras are imported.

    Args:
        known: What this host has to know.
        send: Sends an event to the supervisor.
    """
    if not known.own and not known.announces:
        return
    hooks = _Hooks(Triggers(known, send))
    when_imported("tensorflow", hooks.install_tensorflow)
    for name, package in upstream.KERAS_PACKAGES.items():
        when_imported(name, functools.partial(hooks.wrap_optimizers, package))
    if "checkpoint" in hooks.phases:
        when_imported("keras", hooks.wrap_keras_savers)
        when_imported(_SAVING, hooks.wrap_core_checkpoints)


class _Hooks:
    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers
        self.phases = triggers.phases
        self._counters: weakref.WeakKeyDictionary[Any, Counter] = weakref.WeakKeyDictionary()
        self._sites: list[Site] = []
        self._is_applying = False

    def install_tensorflow(self) -> None:
        self.wrap_optimizers("tensorflow")
        if "input" in self.phases:
            for cls in graph_functions.strategy_classes():
                self._wrap_run(cls)
        self._wrap_collectives()
        if "checkpoint" in self.phases:

            @instead_of(*upstream.merge_of_checkpoint())
            def merge(original: Any, *args: Any, **kwargs: Any) -> Any:
                return _after(self._triggers.writing, lambda: original(*args, **kwargs))

    # Where a step's data enters.

    def _wrap_run(self, cls: Any) -> None:
        clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        @instead_of(cls, "run")
        def run(original: Any, strategy: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
            if not graph_functions.is_function(fn):
                return original(strategy, self._body(graph_functions.convert(fn), True), args, kwargs, options)
            if fn not in clones:
                clones[fn] = graph_functions.clone_function(fn, self._body(fn.python_function, False))
            return original(strategy, clones[fn], args, kwargs, options)

    def _body(self, function: Callable[..., Any], is_converted: bool) -> Callable[..., Any]:
        @graph_functions.do_not_convert
        def body(*args: Any, **kwargs: Any) -> Any:
            inner = function if is_converted else graph_functions.convert(function, enabled=True)
            if not _is_first_replica():
                return inner(*args, **kwargs)
            return _after(self._triggers.input, lambda: inner(*args, **kwargs))

        return body

    # Where its gradients do.

    def wrap_optimizers(self, package: str) -> None:
        for cls, method in upstream.optimizers(package):

            @instead_of(cls, method)
            def apply(original: Any, optimizer: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
                if self._is_applying or not _is_first_replica():
                    return original(optimizer, gradients, *args, **kwargs)
                return self._apply(optimizer, list(gradients), lambda gated: original(optimizer, gated, *args, **kwargs))

    def _apply(self, optimizer: Any, gradients: list[Any], proceed: Callable[[list[Any]], Any]) -> Any:
        if optimizer not in self._counters:
            with tf.init_scope():
                self._counters[optimizer] = Counter(upstream.steps_made(optimizer))
        counter = self._counters[optimizer]
        gated = _gate(functools.partial(self._triggers.entering_apply, counter), gradients)
        sites_before = len(self._sites)
        self._is_applying = True
        try:
            result = proceed(gated)
        finally:
            self._is_applying = False
        if len(self._sites) == sites_before and self._sites:  # it was given the sum
            self._sites[-1].is_of_gradients = True
        _call(functools.partial(self._triggers.applied, counter), _updated(gated, optimizer))
        return result

    # Where they are summed.

    def _wrap_collectives(self) -> None:
        def collective(original: Any, launcher: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            site = Site(is_inside=self._is_applying, is_of_gradients=self._is_applying)
            self._sites.append(site)
            [gated] = _gate(functools.partial(self._triggers.entering, site), [tensor])
            [result] = _gate(functools.partial(self._triggers.leaving, site), [original(launcher, gated, *args, **kwargs)])
            return result

        for method in ("all_reduce", "_all_gather"):
            instead_of(graph_functions.collective_launcher(), method)(collective)

    # Where a checkpoint is written.

    def wrap_keras_savers(self) -> None:
        for cls, method in upstream.keras_savers():

            @instead_of(cls, method)
            def close(original: Any, store: Any) -> Any:
                if getattr(store, "mode", "w") != "r":
                    self._triggers.writing()
                return original(store)

    def wrap_core_checkpoints(self) -> None:
        writing: list[int] = []

        @instead_of(sys.modules[_SAVING], "_write_part")
        def note_step(write_part: Any, snapshot: Any, path: Any, host: int) -> int:
            writing[:] = [snapshot.step]
            return int(write_part(snapshot, path, host))

        @instead_of(sys.modules[_ARRAYS].DataFile, "close")
        def close_half(close: Any, file: Any) -> Any:
            self._triggers.writing(writing[0] if writing else None)
            return close(file)


def _is_first_replica() -> bool:
    """Return whether this is the first replica of this host, or code outside of replicas."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return True
    local = max(1, upstream.num_local_replicas(context.strategy))
    return upstream.static_int(context.replica_id_in_sync_group) % local == 0


def _call(act: Callable[[], None], after: Any = ()) -> Any:
    """Call it now, or each time this place of the graph is reached once what is given is there; returns the operation."""
    import numpy as np

    def acted() -> Any:
        act()
        return np.int64(0)

    if tf.executing_eagerly():
        act()
        return None
    with graph_functions.on_cpu(), tf.control_dependencies(list(after)):
        operation = tf.numpy_function(acted, [], tf.int64).op
    upstream.run_independently(operation)
    return operation


def _after(act: Callable[[], None], build: Callable[[], Any]) -> Any:
    """Return the result of `build`; all of its operations wait for the call."""
    operation = _call(act)
    if operation is None:
        return build()
    with tf.control_dependencies([operation]):
        return build()


def _gate(act: Callable[[], None], values: list[Any]) -> list[Any]:
    """Let users of tensors (or of pairs of gradient and variable) wait for a call, which runs when all tensors exist."""
    gradients = [value[0] if isinstance(value, tuple) else value for value in values]
    operation = _call(act, [t for t in tf.nest.flatten(gradients, expand_composites=True) if tf.is_tensor(t)])
    if operation is None:
        return values
    with tf.control_dependencies([operation]):
        passed = tf.nest.map_structure(_identity, gradients, expand_composites=True)
    return [(new, *old[1:]) if isinstance(old, tuple) else new for new, old in zip(passed, values, strict=True)]


def _identity(value: Any) -> Any:
    if not tf.is_tensor(value):
        return value
    with graph_functions.device(value.device):
        return tf.identity(value)


def _updated(gradients: list[Any], optimizer: Any) -> list[Any]:
    """Return what exists after an optimizer's update: one variable, read again, and the gradients."""
    values = [value[0] if isinstance(value, tuple) else value for value in gradients]
    variables = [value[1] for value in gradients if isinstance(value, tuple)] or getattr(optimizer, "_trainable_variables", [])
    there = [t for t in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(t)]
    return there + [tf.convert_to_tensor(variable) for variable in list(variables)[-1:]]
