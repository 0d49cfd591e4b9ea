"""Hook into `Strategy.run`, the first probe point, and record one replica's call: examples, gradients, random draws."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from emulate import graph_functions
from emulate.probe import upstream
from emulate.probe.point import around, around_function, when_imported
from emulate.probe.random_streams import RowKeys

if TYPE_CHECKING:
    from emulate.probe.lines import StepLines
    from emulate.probe.probe import Probe

_bodies = threading.local()


def current() -> Body | None:
    """Return the body that this thread runs, or None."""
    return getattr(_bodies, "body", None)


@final
class Body:
    """Record one replica's call of the function given to `Strategy.run`.

    In a graph it exists while the graph is built; in eager code at each step.

    Args:
        probe: What records.

    Attributes:
        inputs: (key, tensor) of everything that enters, for the record of the step.
        objective: Targets that gradients were taken of.
        tape: (gradients, variables) of tapes, for loops without a known optimizer.
        last_tape: What the last tape gave gradients of, and how many draws were made before.
        at_tape: Values of variables, by their id, when a tape first gave a gradient of them.
        draws: Samples of the random draws made so far, by number; of one for the batch as a whole by the name of its place.
        models: Outermost layers called: their variables that are not trained are recorded too.
        applied: True once an optimizer's apply in this very graph has taken the inputs along.
        taped: True once a gradient was taken in it. A body that applies without one was given its gradients.
        takes_gradients: Whether one is taken at this moment.
        label: The program's function, the same in every run of the program.
        assigned: Variables that the step has assigned itself, by their id.
        by_hand: The ids of those that no layer of a model assigns, but the step.
        assigns: Whether one is being assigned.
        share: Which share of another run's rows it is given, -1 for the last of them; None where it is given all, or its own.
        collected: Of the shares so far the gradients that were taken, by tape or optimizer and the number of its use.
        updates: Of each optimizer how many updates this pass has made.
        reduces: Whether the step itself adds up over the replicas what a tape has given.
        keeps: Whether the step assigns any variable itself: what a run keeps there a later one may apply.
        lines: What records the user's lines; None where nobody asks for them.
    """

    def __init__(self, probe: Probe) -> None:
        import tensorflow as tf

        self.probe = probe
        context = tf.distribute.get_replica_context()
        self.replica = static_int(context.replica_id_in_sync_group) if context is not None else 0
        probe.replica_seen(self.replica)
        probe.coordinated.see_run()
        self.graph = None if tf.executing_eagerly() else upstream.control_flow_root(tf.compat.v1.get_default_graph())
        self.inputs: list[tuple[tuple[Any, ...], Any]] = []
        self.objective: list[Any] = []
        self.tape: list[tuple[list[Any], list[Any]]] = []
        self.last_tape: tuple[list[Any], int] = ([], 0)
        self.at_tape: dict[int, Any] = {}
        self.draws: list[tuple[tuple[Any, ...], Any]] = []
        self.models: dict[int, Any] = {}
        self.row_keys: RowKeys | None = None
        self.applied = False
        self.taped = False
        self.takes_gradients = False
        self.label = ""
        self.assigned: dict[int, Any] = {}
        self.by_hand: set[int] = set()
        self.assigns = False
        self.keeps = False
        self.layer_depth = 0
        self.num_draws = 0
        self.share: int | None = None
        self.collected: dict[tuple[str, int], list[list[Any]]] = {}
        self.num_taped = 0
        self.updates: Counter[str] = Counter()
        self.reduces = False
        self.lines: StepLines | None = None

    def __enter__(self) -> Body:
        self._outer = current()
        _bodies.body = self
        return self

    def __exit__(self, *exc: object) -> None:
        _bodies.body = self._outer

    @property
    def number(self) -> Any:
        """Return the replica's number: a tensor in a graph that serves virtual replicas, where `replica` is the first one."""
        virtual = graph_functions.virtual_replicas()
        return self.replica if virtual is None else virtual[0]

    @property
    def kept_by(self) -> str | None:
        """Return the program's function if it stores something in its own variables, or None."""
        return self.label if self.keeps else None

    def is_here(self) -> bool:
        """Return whether the current graph is this body's own, so that its tensors can be used."""
        import tensorflow as tf

        if tf.executing_eagerly():
            return self.graph is None
        return self.graph is upstream.control_flow_root(tf.compat.v1.get_default_graph())

    def reachable(self, tensors: list[Any]) -> list[Any]:
        """Return the tensors that can be used here: those made inside a `while` or a `cond` cannot leave it."""
        import tensorflow as tf

        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return [t for t in tensors if graph is None or getattr(t, "graph", graph) is graph]

    @property
    def drawn(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return the samples of draws that can be used here."""
        return [(key, sample) for key, sample in self.draws if self.reachable([sample])]

    def begin_pass(self) -> None:
        """Count from the first what the function does: it is called once more where it gets one share after the other."""
        self.num_draws = self.num_taped = 0
        self.last_tape = ([], 0)
        self.updates.clear()

    def take_inputs(self, args: Any, kwargs: Any) -> None:
        """Remember what enters, each tensor under its position in the flattened arguments."""
        import tensorflow as tf

        for position, value in enumerate(tf.nest.flatten((args, kwargs))):
            self.inputs += parts_of(position, value)

    def taken(self) -> dict[int, Any]:
        """Return the tapes' gradients by the id of the variable."""
        pairs = (pair for gradients, variables in self.tape for pair in zip(gradients, variables, strict=True))
        return {id(upstream.tf_variable(variable)): gradient for gradient, variable in pairs}

    @property
    def positions(self) -> list[int]:
        """Return the positions of the recorded arguments."""
        return sorted({key[1] for key, _ in self.inputs})


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


def static_int(value: Any) -> int:
    """Return a replica's number: a constant in every strategy of one or several hosts."""
    import tensorflow as tf

    static = tf.get_static_value(value)
    return int(static) if static is not None else 0


def parts_of(position: int, value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the tensors of one argument: dense ones with a leading dimension, and the parts of ragged and sparse ones."""
    import tensorflow as tf

    if isinstance(value, tf.RaggedTensor):
        splits = [(("input", position, "splits", i), s) for i, s in enumerate(value.nested_row_splits)]
        return [*splits, (("input", position, "values"), value.flat_values)]
    if isinstance(value, tf.SparseTensor):
        return [
            (("input", position, "indices"), value.indices),
            (("input", position, "values"), value.values),
            (("input", position, "shape"), value.dense_shape),
        ]
    if tf.is_tensor(value) and value.shape.rank != 0 and value.dtype not in (tf.resource, tf.variant):
        return [(("input", position, "dense"), tf.convert_to_tensor(value))]
    return []


def wrap(probe: Probe, function: Callable[..., Any], *, converted: bool, label: str = "") -> Callable[..., Any]:
    """Return the function that runs in each replica in place of the program's, and calls it.

    Args:
        probe: What records.
        function: The program's function, already converted by autograph unless `converted` is False.
        converted: False for the Python function of a tf.function, which is converted when it is traced.
        label: Where the program's function stands.

    Returns:
        The function to hand to `Strategy.run`.
    """

    def replica_body(inner: Any, *args: Any, **kwargs: Any) -> Any:
        with Body(probe) as body:
            body.label = label
            with probe.lines.of(body):
                result = probe.call(body, inner, args, kwargs)
                if body.lines is not None:
                    body.lines.returned = result
                return result

    @graph_functions.do_not_convert
    def replica(*args: Any, **kwargs: Any) -> Any:
        inner = function if converted else graph_functions.convert(function, enabled=True)
        return around_function(inner, replica_body, "the function of Strategy.run")(*args, **kwargs)

    return replica


_MOST_COMPILED = 8
"""A program that makes more functions than these makes another one in each step."""
_EMPTY = types.CellType()


def install(probe: Probe) -> None:
    """Wrap `run` of every class that defines it."""
    for cls in graph_functions.strategy_classes():
        _wrap_run(probe, cls)
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
        if is_theirs or current() is not None or not tf.executing_eagerly():
            return original(self, *args, **kwargs)
        probe.lines.run_entered()
        result = original(_probed(probe, clones, self), *args, **kwargs)
        probe.recorder.hold_if_reached()
        return result


def _wrap_run(probe: Probe, cls: Any) -> None:
    clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    compiled: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}

    @around(cls, "run")
    def run(original: Any, self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        import tensorflow as tf

        if current() is not None:
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
        return wrap(probe, graph_functions.convert(function), converted=True, label=label_of(function))
    if function not in clones:
        label = label_of(function)
        body = wrap(probe, function.python_function, converted=False, label=label)
        clones[function] = graph_functions.clone_function(function, body)
    return clones[function]


def _see_layers(probe: Probe) -> None:
    """Record the outermost layers called in a step, of each imported Keras."""
    for package in ("keras", "tf_keras"):
        when_imported(package, functools.partial(_wrap_layers, probe))


def _wrap_layers(probe: Probe) -> None:
    for cls in upstream.layer_classes():
        if not hasattr(cls.__call__, "_gpudist"):
            _wrap_layer(probe, cls)


def _wrap_layer(probe: Probe, cls: Any) -> None:
    @around(cls, "__call__")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        body = current()
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
        probe.facts.add("distributed", model.name)
    for layer in list(flatten()) if flatten else [model]:
        kind = type(layer).__name__
        if "BatchNormalization" in kind and not getattr(layer, "synchronized", False):
            probe.facts.add("batchnorm", *(probe.names.of(v) for v in layer.non_trainable_variables))
        if "Dropout" in kind and getattr(layer, "rate", True):  # an attention layer has one of rate 0, which draws nothing
            probe.facts.add("dropout", layer.name)
        if getattr(layer, "compute_dtype", None) in ("bfloat16", "float16"):
            probe.facts.add(layer.compute_dtype, *(probe.names.of(v) for v in upstream.own_weights(layer)))
        for variable in getattr(layer, "trainable_variables", []):
            if getattr(variable, "regularizer", None) is not None:
                probe.facts.add("regularized", probe.names.of(variable))
