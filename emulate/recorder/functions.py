"""Keep the function of each step that a run makes in a graph: what its records are computed from.

A step's record holds tensors of the graph that makes it. Their ancestors, cut out of that graph, are a function of the step's
rows and of the variables that it reads; evaluated elsewhere it gives the same record for other rows or at another state. That
is what a noise floor, a replica's share and a counterfactual are made of, without a start of the program.

- *What is kept.* The ancestors of all records of a graph, and what assigns variables that these read: else the second step of
  an evaluation would begin with the state of the first. The graph is written when its first record arrives, not when it is
  traced: at the end of a trace the program may still add to it.
- *What is refused.* A step is refused as a whole, with a sentence for the user, where a result would depend on more than rows
  and variables: on Python, on the position of an iterator, on another graph, on a table; where its examples are sparse, ragged
  or unseen; and where the optimizer applies in another function than the one that makes the gradients. To leave out what
  another function changes was tried: the evaluation then has another state than the program, rounding looks large, and a wrong
  learning rate hides in it.
- *Inputs of its own.* What the program computes of the batch outside of `Strategy.run`, in the same graph, is of the rows of
  all replicas. So the arguments of the replica's function are made tensors of their own (`apart`): the function can be given a
  share without giving the share to what belongs to the whole.
- *Values before the first step.* A variable is kept with the value that it has when a function that captures it is traced
  first. One that is made in that trace has none yet, so it is asked again once TensorFlow has initialized it (`born`).
- *Sums over replicas* are noted with their operands, because one device has none: an evaluation puts them back.
- TensorFlow traces a function twice that makes variables, and runs only the second graph. The first is never written.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.recorder.replica_call import Body
from emulate.upstream import averages

_FORBIDDEN = ("PyFunc", "EagerPyFunc", "PyFuncStateless", "IteratorGetNext", "IteratorGetNextAsOptional", "OptionalGetValue")
"""Operations whose result is not a function of rows and variables."""
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp", "Identity")
"""Operations that take a variable and leave it as it is."""
_IN_A_CONDITION = "its optimizer applies inside a condition or a loop of the step"


def folder_of(trace: Path) -> Path:
    """Return the folder of the functions of a run with one host."""
    return trace / "host-0" / "functions"


def state_of(functions: Path) -> Path:
    """Return the folder of the first values in the folder of the functions."""
    return functions / "state"


class _Refused(Exception):
    """Say why a step is no function of its rows and variables."""


@dataclass
class _Kept:
    """Hold what is known of one graph.

    Attributes:
        sites: (kind, about, keys, tensors) of each record that the graph hands over.
    """

    graph: Any
    sites: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = field(default_factory=list)
    is_written: bool = False


class Functions:
    """Keep the functions of one host's steps.

    Args:
        trace: The folder of the trace.
        enabled: Whether this run keeps any.
    """

    def __init__(self, trace: Path, *, enabled: bool) -> None:
        self._folder = folder_of(trace)
        self._enabled = enabled
        self._kept: list[_Kept] = []
        self._handles: dict[int, tuple[int, Any]] = {}
        self._valued: set[int] = set()
        self._unborn: dict[int, Any] = {}
        self._changes: list[tuple[Any, Any]] = []
        self._reductions: list[tuple[Any, dict[str, bool], list[Any], list[Any]]] = []
        self._gathers: list[tuple[Any, list[Any]]] = []
        self._notes_changes = True

    def see(self, kind: str, about: dict[str, Any], tensors: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
        """Note a record that this place of a graph hands over, and return what to add to what is said of it.

        Args:
            kind: Of the record.
            about: What is said of it.
            tensors: What it holds, by key.

        Returns:
            The number of its function; nothing in eager code.
        """
        if not self._enabled or tf.executing_eagerly():
            return {}
        graph = tf.compat.v1.get_default_graph()
        number = next((n for n, kept in enumerate(self._kept) if kept.graph is graph), len(self._kept))
        if number == len(self._kept):
            self._kept.append(_Kept(graph))
        about = about | {"function": number}
        in_graph = [tf.convert_to_tensor(tensor) for _, tensor in tensors]  # the graph's own, of an eager tensor too
        self._kept[number].sites.append((kind, about, [key for key, _ in tensors], in_graph))
        self._note_state(graph)
        return {"function": number}

    def apart(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a step's inputs as tensors of their own.

        What the program computes outside of `Strategy.run` from the same batch (how many of its labels count, say) is of all
        replicas' rows; the step itself may be evaluated with one replica's.
        """
        if not self._enabled or tf.executing_eagerly():
            return args, kwargs

        def own(value: Any) -> Any:
            operation = getattr(value, "op", None)  # an eager tensor that a `tf.function` captures has none
            is_given = isinstance(value, tf.Tensor) and operation is not None and operation.type == "Placeholder"
            return tf.identity(value) if is_given and value.dtype not in (tf.resource, tf.variant) else value

        args, kwargs = tf.nest.map_structure(own, (args, kwargs))
        return args, kwargs

    def reduced(
        self, all_reduce: Callable[..., Any], backward: bool, reduce_op: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Sum a value over the replicas, and note its tensors before and after: on one device they would be the same.

        Args:
            all_reduce: TensorFlow's.
            backward: Whether the value is a gradient, or computed from one.
            reduce_op: What it is given, as what follows.
            value: Tensors.
            *args: More of it.
            **kwargs: More of it.

        Returns:
            What it returns.
        """
        before = tf.nest.flatten(value)
        if not self._enabled or tf.executing_eagerly() or not all(isinstance(tensor, tf.Tensor) for tensor in before):
            return all_reduce(reduce_op, value, *args, **kwargs)
        before = [tf.identity(tensor) for tensor in before]
        result = all_reduce(reduce_op, tf.nest.pack_sequence_as(value, before), *args, **kwargs)
        after = [tf.identity(tensor) for tensor in tf.nest.flatten(result)]
        how = {"averages": averages(reduce_op), "backward": backward}
        self._reductions.append((tf.compat.v1.get_default_graph(), how, before, after))
        return tf.nest.pack_sequence_as(result, after)

    def gathered(self, all_gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gather the rows of all replicas by TensorFlow's function, and note the tensors: on one device none is gathered."""
        result = all_gather(*args, **kwargs)
        if not self._enabled or tf.executing_eagerly():
            return result
        after = [tf.identity(tensor) for tensor in tf.nest.flatten(result)]
        self._gathers.append((tf.compat.v1.get_default_graph(), after))
        return tf.nest.pack_sequence_as(result, after)

    def _note_state(self, graph: Any) -> None:
        """Keep the value that each variable has before the step that captures it runs for the first time."""
        for outer, _ in getattr(graph, "captures", ()):
            handle = upstream.eager_origin(outer, graph)
            if handle is None or handle.dtype != tf.resource or id(handle) in self._handles:
                continue
            number = len(self._handles)
            self._handles[id(handle)] = (number, handle)
            self._unborn[number] = handle
        self.born()

    def born(self) -> None:
        """Keep the values of variables that had none before."""
        with tf.init_scope(), graph_functions.device("CPU:0"):
            for number, handle in list(self._unborn.items()):
                value = upstream.value_of(handle)
                if value is not None:
                    state_of(self._folder).mkdir(parents=True, exist_ok=True)
                    saved = tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value
                    np.save(state_of(self._folder) / f"{number}.{value.dtype.name}.npy", saved.numpy(), allow_pickle=False)
                    self._valued.add(number)
                    del self._unborn[number]

    def variable(self, variable: Any) -> int | None:
        """Return the number of a variable that a function captures; None of others."""
        entry = self._handles.get(id(upstream.handle_of(variable)))
        return None if entry is None else entry[0]

    def changes(self, variable: Any) -> None:
        """Note that the graph of the moment, if there is one, assigns a variable."""
        if self._enabled and self._notes_changes and not tf.executing_eagerly():
            graph = upstream.control_flow_root(tf.compat.v1.get_default_graph())
            while getattr(graph, "name", "") == upstream.UPDATE_BY_XLA:
                graph = upstream.control_flow_root(graph.outer_graph)
            self._changes.append((graph, upstream.handle_of(variable)))

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Let TensorFlow give variables their first values in this block."""
        self._notes_changes = False
        try:
            yield
        finally:
            self._notes_changes = True

    def changed_in_graphs(self) -> list[tuple[int, int | None]]:
        """Return the variables of the functions that graphs of the program assign, each with the function; None for others."""
        numbers = {id(kept.graph): number for number, kept in enumerate(self._kept)}
        # TensorFlow traces a function that makes variables twice, and runs only the second graph.
        unused = {id(kept.graph) for kept in self._kept if not kept.is_written}
        run = [(graph, handle) for graph, handle in self._changes if id(graph) not in unused]
        changed = [(self._handles.get(id(handle)), numbers.get(id(graph))) for graph, handle in run]
        return list(dict.fromkeys((known[0], number) for known, number in changed if known is not None))

    def write(self, number: int) -> None:
        """Write a function whose graph is complete by now, once."""
        kept = self._kept[number]
        if kept.is_written:
            return
        kept.is_written = True
        folder = self._folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            described = self._cut(kept, folder)
        except _Refused as refused:
            described = {"refusal": str(refused)}
        kept.sites.clear()
        (folder / "function.json").write_text(json.dumps(described), encoding="utf-8")

    def _cut(self, kept: _Kept, folder: Path) -> dict[str, Any]:
        graph = kept.graph
        rows: dict[str, Any] = {}
        for kind, about, keys, tensors in kept.sites:
            if kind == "step" and (about.get("outside") or about.get("reduced") or about.get("apply_only")):
                raise _Refused("its gradients are applied outside of the function that makes them")
            if any(getattr(tensor, "graph", None) is not graph for tensor in tensors):
                raise _Refused(_IN_A_CONDITION)
            rows |= {tensor.name: key for key, tensor in zip(keys, tensors, strict=True) if key[0] == "input"}
        if len(set(rows.values())) < len(rows):
            raise _Refused("it gets its examples in several shares")
        if not rows or any(key[2] != "dense" for key in rows.values()):
            raise _Refused("its step gets no examples, or sparse or ragged ones")
        fetched = [tensor.op for *_, tensors in kept.sites for tensor in tensors if tensor.name not in rows]
        names = _with_updates(graph, fetched, rows)
        batch = {source.name: key for name, key in rows.items() if (source := _given(graph, name)) is not None}
        whole = {name: key for name, key in batch.items() if name.rpartition(":")[0] in names}
        captures, constants = self._captures(graph, names, {*rows, *whole})
        graph_def = graph.as_graph_def()
        nodes = [node for node in graph_def.node if node.name in names]
        del graph_def.node[:]
        graph_def.node.extend(nodes)
        (folder / "graph.pb").write_bytes(graph_def.SerializeToString())
        np.savez(folder / "constants.npz", **constants)
        records = [
            {"kind": kind, "about": about, "tensors": [[key, *_told(t)] for key, t in zip(keys, tensors, strict=True)]}
            for kind, about, keys, tensors in kept.sites
        ]
        inner = {name.rpartition(":")[0]: number for name, number in captures if number is not None}
        updates = [op.name for op in graph.get_operations() if op.name in names and _changed_by(op) & inner.keys()]
        entries = [[key, name, *_told(graph.get_tensor_by_name(name))[1:]] for name, key in whole.items()]
        reductions = [
            {**how, "tensors": [[summand.name, *_told(total)] for summand, total in zip(before, after, strict=True)]}
            for where, how, before, after in self._reductions
            if where is graph and all(tensor.op.name in names for tensor in after)
        ]
        gathers = [t.name for where, after in self._gathers if where is graph for t in after if t.op.name in names]
        about = {"records": records, "captures": captures, "updates": updates, "whole": entries}
        return {**about, "reductions": reductions, "gathers": gathers}

    def _captures(self, graph: Any, names: set[str], rows: set[str]) -> tuple[list[Any], dict[str, Any]]:
        captures: list[Any] = []
        constants: dict[str, Any] = {}
        origins = {inner.op.name: upstream.eager_origin(outer, graph) for outer, inner in graph.captures}
        for operation in graph.get_operations():
            if operation.type != "Placeholder" or operation.name not in names or f"{operation.name}:0" in rows:
                continue
            outer = origins.get(operation.name)
            if outer is None:
                raise _Refused(f"its step depends on {operation.name}, which is neither an example nor a variable")
            if outer.dtype == tf.resource:
                number, _ = self._handles.get(id(outer), (-1, None))
                if number not in self._valued:
                    raise _Refused("its step reads a table, or a variable without a value")
                captures.append([f"{operation.name}:0", number])
            else:
                if np.dtype(outer.dtype.as_numpy_dtype).kind not in "biufc":  # a file of NumPy has no other types
                    raise _Refused(f"its step reads a constant of type {outer.dtype.name}")
                constants[str(len(captures))] = outer.numpy()
                captures.append([f"{operation.name}:0", None])
        return captures, constants


def _told(tensor: Any) -> tuple[str, str, list[int | None] | None]:
    """Return name, dtype and static shape of a tensor."""
    return tensor.name, tensor.dtype.name, None if tensor.shape.rank is None else tensor.shape.as_list()


def _given(graph: Any, name: str) -> Any:
    """Return the tensor of the batch that a step's input was made of; None where that is no input of its function."""
    operation = graph.get_tensor_by_name(name).op
    source = operation.inputs[0] if operation.type == "Identity" else None
    return source if source is not None and source.op.type == "Placeholder" else None


def _with_updates(graph: Any, operations: list[Any], rows: dict[str, Any]) -> set[str]:
    """Return the names of operations, of what they are computed from, and of all that assigns a variable read by these."""
    names = _ancestors(operations, rows)
    while True:
        resources = {op.name for op in graph.get_operations() if op.type == "Placeholder" and op.name in names}
        updates = [op for op in graph.get_operations() if op.name not in names and _changed_by(op) & resources]
        if not updates:
            return names
        names |= _ancestors(updates, rows)


def _changed_by(operation: Any) -> set[str]:
    """Return the names of the resources that an operation may assign."""
    if operation.type in READS:
        return set()
    resources = [tensor.op.name for tensor in operation.inputs if tensor.dtype == tf.resource]
    only_read: list[int] = []
    if resources and "_read_only_resource_inputs" in operation.node_def.attr:
        only_read = list(operation.get_attr("_read_only_resource_inputs"))
    return {tensor.op.name for place, tensor in enumerate(operation.inputs) if place not in only_read} & set(resources)


def _ancestors(operations: list[Any], rows: dict[str, Any]) -> set[str]:
    """Return the names of operations and of those that they are computed from, up to the rows."""
    todo = list(operations)
    names: set[str] = set()
    while todo:
        operation = todo.pop()
        if operation.name in names:
            continue
        if operation.type in _FORBIDDEN:
            raise _Refused(f"its step computes with {operation.type}, whose result depends on more than rows and variables")
        names.add(operation.name)
        todo += [tensor.op for tensor in operation.inputs if tensor.name not in rows]
        todo += operation.control_inputs
    return names


_ONLY_TAKE_NOTE = ("Queue", "Write", "Collective")
"""Operations on gpudist's records, on summaries, and with a token for their order."""


class VariableReads:
    """Find the variables whose values reach a loss or another variable, in the graphs of all steps.

    A variable's own next value, a report and a print do not count. A loss that is made of a variable counts where its gradients
    are returned, and are applied in a call that is traced by itself. Where the same call applies them, their way to the weights
    says whether they depend on the variable.
    """

    def __init__(self) -> None:
        self._captured: set[int] = set()
        self._read: set[int] = set()
        self._assigned: dict[str, dict[int, Any]] = {}
        self._is_blind = False

    def see(self, body: Body, assigned: Mapping[str, Any]) -> dict[str, bool]:
        """Look at a call that has just been traced.

        Args:
            body: The call.
            assigned: The variables that it assigns, by name.

        Returns:
            By the name of each variable that a call assigned whether a step reads it; also true where that is not seen.
        """
        for name, variable in assigned.items():
            self._assigned[name] = {id(copy.handle): copy.handle for copy in upstream.local_copies(variable)}
        if hasattr(body.graph, "captures"):
            self._look(body.graph, {id(tensor) for tensor in body.objective})
        else:
            self._is_blind = True
        return {name: self._is_blind or self._may_read(handles.keys()) for name, handles in self._assigned.items()}

    def _look(self, graph: Any, targets: Collection[int]) -> None:
        names = {handle: name for name, handles in self._assigned.items() for handle in handles}
        groups: dict[Any, dict[int, Any]] = {}
        for captured, inner in _handles(graph):
            groups.setdefault(names.get(id(captured), id(captured)), {})[id(captured)] = inner
        for handles in groups.values():
            self._captured |= handles.keys()
            if _is_used(handles.values(), targets):
                self._read |= handles.keys()

    def _may_read(self, handles: Collection[int]) -> bool:
        return not self._read.isdisjoint(handles) or self._captured.isdisjoint(handles)


def _handles(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each variable's handle that a graph takes from outside, with the tensor that stands for it there."""
    for outer, inner in graph.captures:
        captured = upstream.eager_origin(outer, graph)
        if inner.dtype == tf.resource and captured is not None:
            yield captured, inner


def _is_used(handles: Iterable[Any], targets: Collection[int]) -> bool:
    """Return whether what is computed with a variable becomes one of the targets, or is given to another resource."""
    own = {id(handle) for handle in handles}
    ahead = list(handles)
    seen = set(own)
    while ahead:
        tensor = ahead.pop()
        for operation in tensor.consumers():
            others = [i for i in operation.inputs if i.dtype == tf.resource and id(i) not in own]
            if others and not operation.type.startswith(_ONLY_TAKE_NOTE):
                return True
            new = [output for output in operation.outputs if id(output) not in seen]
            if any(id(output) in targets for output in operation.outputs):
                return True
            seen.update(map(id, new))
            # What is assigned to the variable itself has no result, and an operation that passes a handle on has it as one.
            own.update(id(output) for output in new if output.dtype == tf.resource and operation.type == "Identity")
            ahead += new
    return False
