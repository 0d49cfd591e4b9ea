"""Hold one replica's call of the function given to `Strategy.run`: its examples, gradients, random draws."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, final

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.recorder.lines.step import StepLines
from emulate.recorder.row_keys import RowKeys
from gpudist_core.state import PerThread

_body: PerThread[Body | None] = PerThread(None)


def current_body() -> Body | None:
    """Return the body that this thread runs, or None."""
    return _body.value


@final
class Body:
    """Hold one replica's call of the function given to `Strategy.run`.

    In a graph it exists while the graph is built; in eager code at each step.

    Args:
        label: The program's function, the same in every run of the program.

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

    def __init__(self, label: str) -> None:
        context = tf.distribute.get_replica_context()
        self.replica = upstream.static_int(context.replica_id_in_sync_group) if context is not None else 0
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
        self.label = label
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

    def running(self) -> contextlib.AbstractContextManager[Body | None]:
        """Make this the body that this thread runs, until the block ends."""
        return _body.set(self)

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
        if tf.executing_eagerly():
            return self.graph is None
        return self.graph is upstream.control_flow_root(tf.compat.v1.get_default_graph())

    def reachable(self, tensors: list[Any]) -> list[Any]:
        """Return the tensors that can be used here: those made inside a `while` or a `cond` cannot leave it."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return [t for t in tensors if graph is None or getattr(t, "graph", graph) is graph]

    @property
    def drawn(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return the samples of draws that can be used here."""
        return [(key, sample) for key, sample in self.draws if self.reachable([sample])]

    def begin_pass(self, args: Any, kwargs: Any) -> None:
        """Begin a call of the function: the only one, or one of those that get one share after the other.

        Args:
            args: What enters. Each tensor is remembered under its position in the flattened arguments.
            kwargs: More of it.
        """
        self.num_draws = self.num_taped = 0
        self.last_tape = ([], 0)
        self.updates.clear()
        places = enumerate(tf.nest.flatten((args, kwargs)))
        entering = [part for position, value in places for part in tensors_of(position, value)]
        self.inputs += entering
        dense = [tensor for key, tensor in entering if key[2] == "dense" and tensor.dtype != tf.string]
        if dense:
            self.row_keys = RowKeys(dense)

    def taken(self) -> dict[int, Any]:
        """Return the tapes' gradients by the id of the variable."""
        pairs = (pair for gradients, variables in self.tape for pair in zip(gradients, variables, strict=True))
        return {id(upstream.tf_variable(variable)): gradient for gradient, variable in pairs}


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Exclude assignments in this block from the step's own."""
    body = current_body()
    if body is None:
        yield
        return
    before, body.assigns = body.assigns, True
    try:
        yield
    finally:
        body.assigns = before


def tensors_of(position: int, value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the tensors of one argument: dense ones with a leading dimension, and the parts of ragged and sparse ones."""
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
