"""Evaluate parts of the forward pass of a recorded step, with some tensors given, and derive them again.

A recorded graph has its backward pass, which was derived from the forward pass as it stands. Where a tensor of the forward
pass is given in place of the graph's own, gradients are other ones, and the recorded backward pass knows nothing of them. So
the forward pass alone is imported, up to what the tape takes gradients of, and TensorFlow derives it again. That this gives
what was recorded is checked before anything is concluded from it (`joins.py`): a loss that depends on gradients does not.

A mean is written as a sum divided by a number, each with a name of its own, since replicas may need one of them alone from the
others. A variable that is read after the step has assigned it is written as what was assigned: so examples that meet in it are
seen to meet.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emulate import upstream
from emulate.evaluate.parts import State, described, graph_of, node_of, tensor_name
from emulate.evaluate.step_function import Key, StepFunction
from emulate.imports import tf
from emulate.trace import Array, entries_of_examples

LOSS = "the loss"
"""The name of the sum of what a tape takes gradients of, among the gradients."""
Gradients = dict[str, Any]
Rows = dict[Key, Array]
_IMPORTS = itertools.count()


class Forward:
    """Hold the forward pass of one optimizer's record.

    Args:
        trace: The folder of the run that has kept the function.
        number: The function's number.
        optimizer: Whose record.

    Attributes:
        function: The whole step.
        objectives: The names of the tensors that gradients are taken of.
        own_sums: Those of the tensors that the step itself has summed over the replicas.
        own_gathers: Those of the tensors that the step itself has gathered from them.
        kind: Of what the gradients are compared with: `taped`, or `gradient` where optimizers are given the tapes' own.
        variables: The numbers of the variables that have such gradients.
        rows: The names of the tensors of examples, by key.
        nodes: All nodes of the graph by name.
        order: The names of the nodes of the forward pass, each after those that it takes.
        assigned: The names of the tensors that the step assigns to variables before it reads these.
    """

    def __init__(self, trace: Path, number: int, optimizer: str) -> None:
        self.state = State(trace)
        self.function = StepFunction(trace, number, self.state)
        records = self.function.records
        self._place = next(place for place, record in enumerate(records) if record.about.get("optimizer") == optimizer)
        record, about = records[self._place], described(trace, number)
        self.objectives = [name for key, name in record.tensors.items() if key[0] == "objective"]
        self.own_sums = [after for r in about["reductions"] if not r["backward"] for _, after, *_ in r["tensors"]]
        self.own_gathers: list[str] = about["gathers"]
        self.kind = "taped" if any(key[0] == "taped" for key in record.tensors) else "gradient"
        names = {key[1] for key in record.tensors if key[0] in (self.kind, "sparse-gradient")}
        self.variables = {key[1]: n for key, n in self.function.variables.items() if key[1] in names}
        self._graph, constants = graph_of(trace, number)
        self._captures = {name: (n, constants.get(place)) for place, (name, n) in enumerate(about["captures"])}
        inputs = {key: name for each in records for key, name in each.tensors.items() if key[0] == "input"}
        self.rows = {key: f"rows_{key[1]}:0" for key in inputs}  # two runs have other names for them
        self._switched: Mapping[str, str] = {}
        renamed = {tensor_name(name): self.rows[key] for key, name in inputs.items()}
        self.assigned = self._read_what_is_assigned()
        for node in self._graph.node:
            node.device = ""
            for name in ("_class", "_gradient_op_type"):  # functions of custom gradients live in the program's process
                node.attr.pop(name, None)
            _take(node, [renamed.get(tensor_name(entry), entry) for entry in node.input if not entry.startswith("^")])
        self._without_identities()
        for mean in [node for node in self._graph.node if node.op == "Mean"]:
            self._split(mean)
        self.nodes = {node.name: node for node in self._graph.node}
        self.order = self._in_order(self.objectives, set(self.rows.values()))

    def _read_what_is_assigned(self) -> list[str]:
        """Let what reads a variable after the step has assigned it take what was assigned; return the names of that."""
        from tensorflow.core.framework import attr_value_pb2

        by_name, values = {node.name: node for node in self._graph.node}, dict[str, str]()
        for node in [node for node in self._graph.node if node.op == "ReadVariableOp"]:
            resource, *controls = node.input
            before = (by_name[entry[1:]] for entry in controls if entry[1:] in by_name)
            write = next((one for one in before if one.op in _WRITES and one.input[0] == resource), None)
            if write is None:
                continue
            dtype = attr_value_pb2.AttrValue(type=node.attr["dtype"].type)
            if write.name not in values:
                values[write.name] = tensor_name(write.input[1])
                if _WRITES[write.op]:
                    own = f"{write.name}/before"
                    self._graph.node.add(name=own, op="ReadVariableOp", input=[resource], attr={"dtype": dtype})
                    made = f"{write.name}/after"
                    self._graph.node.add(name=made, op=_WRITES[write.op], input=[own, write.input[1]], attr={"T": dtype})
                    values[write.name] = f"{made}:0"
            node.op = "StopGradient"  # no gradient passes through a variable
            node.attr.clear()
            node.attr["T"].CopyFrom(dtype)
            _take(node, [values[write.name]])
        return list(dict.fromkeys(values.values()))

    def _without_identities(self) -> None:
        """Leave out what has its input as its result: runs have other numbers of them, and so other names.

        What the step itself sums over the replicas or gathers, which are such operations on one device, is numbered.
        """
        own = {"sum": self.own_sums, "gathered": self.own_gathers}
        sums = {name: f"{kind}_{place}:0" for kind, names in own.items() for place, name in enumerate(names)}
        same = {f"{node.name}:0": tensor_name(node.input[0]) for node in self._graph.node if node.op == "Identity"}

        def shown(name: str) -> str:
            while name in same and name not in sums:
                name = same[name]
            return sums.get(name, name)

        for node in self._graph.node:
            _take(node, [shown(tensor_name(entry)) for entry in node.input])
            node.name = node_of(sums.get(f"{node.name}:0", node.name))
        self.objectives, self.own_sums = list(map(shown, self.objectives)), list(map(shown, self.own_sums))
        self.own_gathers = list(map(shown, self.own_gathers))
        self.assigned = list(map(shown, self.assigned))

    def inputs(self, node: str) -> list[str]:
        """Return the names of the tensors that a node takes."""
        return [tensor_name(entry) for entry in self.nodes[node].input]

    def after(self, tensors: Collection[str], stops: Collection[str] = ()) -> set[str]:
        """Return the nodes of the forward pass that depend on tensors, other than through those of `stops`."""
        found: set[str] = set()
        for node in self.order:
            if any(i not in stops and (i in tensors or node_of(i) in found) for i in self.inputs(node)):
                found.add(node)
        return found

    def before(self, tensor: str, *, with_sizes: bool = True) -> set[str]:
        """Return the nodes that a tensor is computed from; without what only gives its shape, unless that counts, too."""
        sizes = [] if with_sizes else [f"{node.name}:0" for node in self.nodes.values() if node.op in SIZES]
        return set(self._in_order([tensor], {*self.rows.values(), *sizes}))

    def with_switches(self, values: Mapping[str, Any]) -> Forward:
        """Return the same with switches: where that of a tensor is on, what is given stands in the tensor's place.

        Args:
            values: Values of the tensors' types, by name. `imported` is given tensors by these names, and a switch for each of
                them: `switch of NAME`.

        Returns:
            The forward pass, whose graph is a copy.
        """
        from tensorflow.core.framework import attr_value_pb2, graph_pb2

        other, graph = copy.copy(self), graph_pb2.GraphDef()
        graph.node.extend(self.nodes.values())
        switched = {name: f"switched_{place}:0" for place, name in enumerate(values)}
        for node in graph.node:
            _take(node, [switched.get(tensor_name(entry), entry) for entry in node.input])
        for name, chosen in switched.items():
            dtype = attr_value_pb2.AttrValue(type=tf.as_dtype(np.asarray(values[name]).dtype).as_datatype_enum)
            inputs = [f"switch_{chosen}", f"given_{chosen}", name]
            graph.node.add(name=node_of(chosen), op="SelectV2", input=inputs, attr={"T": dtype})
        other.nodes = {node.name: node for node in graph.node}
        other.objectives = [switched.get(name, name) for name in self.objectives]
        other._switched = switched
        return other

    def imported(self, given: Mapping[str, Any], fetched: Sequence[str], nodes: Collection[str] | None = None) -> list[Any]:
        """Return tensors, or operations, in the graph of the moment.

        Args:
            given: Tensors by the names of those in whose place they stand.
            fetched: The names of what is returned.
            nodes: Those to import; unless given all that it takes.

        Returns:
            The tensors, in this order.
        """
        for name, chosen in self._switched.items():
            given = {**given, f"switch_{chosen}": given[f"switch of {name}"], f"given_{chosen}": given[name]}
        given = {name: value for name, value in given.items() if name not in self._switched}
        others = [name for name in dict.fromkeys(fetched) if name not in given]
        nodes = self._in_order(others, given) if nodes is None else nodes
        cut = type(self._graph)(library=self._graph.library, versions=self._graph.versions)
        cut.node.extend(self.nodes[name] for name in nodes if self.nodes[name].op != "Placeholder")
        _rename_functions(cut)
        used = {tensor_name(entry) for node in cut.node for entry in node.input}
        here, mapped = tf.compat.v1.get_default_graph(), {name: value for name, value in given.items() if name in used}
        for name, (number, value) in self._captures.items():
            if name in used and name not in given:
                mapped[name] = tf.constant(value) if number is None else here.capture(self.state.variables[number].handle)
        made = dict(given) | dict(zip(others, tf.graph_util.import_graph_def(cut, mapped, others, name=""), strict=True))
        return [made[name] for name in fetched]

    def derived(self, ends: Sequence[Any], others: Sequence[Any], weights: Sequence[Any] | None = None) -> list[Any]:
        """Return gradients in the graph of the moment.

        Args:
            ends: Tensors, whose sum is derived.
            others: Tensors with regard to which it is, besides the variables.
            weights: The gradient with regard to each of `ends`; 1 unless given.

        Returns:
            The gradients of the variables, then those of the others; zeros where nothing depends on them.
        """
        here, variables = tf.compat.v1.get_default_graph(), [self.state.variables[n] for n in self.variables.values()]
        made = tf.gradients(ends, [*(here.capture(v.handle) for v in variables), *others], grad_ys=weights)
        dense = zip(made, [*variables, *others], strict=True)
        return [tf.zeros_like(of) if g is None else tf.convert_to_tensor(g) for g, of in dense]

    def recorded(self, rows: Rows) -> Gradients:
        """Return one device's gradients by variable, and its loss, with the backward pass of the recorded graph."""
        (made,) = self.function.gradients(self._place, [rows], [], rows)
        found = {name: np.asarray(made[self.kind, name], float) for name in self.variables if (self.kind, name) in made}
        for name in (key[1] for key in made if key[0] == "sparse-gradient"):
            slices = tf.IndexedSlices(*(made[kind, name] for kind in ("sparse-gradient", "sparse-rows", "sparse-shape")))
            found[name] = np.asarray(tf.convert_to_tensor(slices), float)
        return found | {LOSS: np.array(sum(np.sum(value, dtype=float) for key, value in made.items() if key[0] == "objective"))}

    def go_to(self, weights: Mapping[str, Array]) -> None:
        """Assign values to variables, by name."""
        for key, number in self.function.variables.items():
            if key[1] in weights:
                variable = self.state.variables[number]
                variable.assign(np.reshape(weights[key[1]], variable.shape))

    def _in_order(self, fetched: Sequence[str], stops: Collection[str]) -> list[str]:
        done: dict[str, None] = {}
        waiting = [(node_of(name), False) for name in reversed(fetched)]
        while waiting:
            name, is_ready = waiting.pop()
            if is_ready:
                done[name] = None
            elif name not in done:
                waiting.append((name, True))
                waiting += [(node_of(i), False) for i in self.inputs(name) if i not in stops and node_of(i) not in done]
        return list(done)

    def _split(self, mean: Any) -> None:
        from tensorflow import int32
        from tensorflow.core.framework import attr_value_pb2, graph_pb2

        name, (source, axes), whole = str(mean.name), mean.input[:2], attr_value_pb2.AttrValue(type=int32.as_datatype_enum)
        dtype, index, keeps = (mean.attr[key] for key in ("T", "Tidx", "keep_dims"))
        parts: list[tuple[str, str, list[str], dict[str, Any]]] = [
            (f"{name}{TOTAL}", "Sum", [source, axes], {"T": dtype, "Tidx": index, "keep_dims": keeps}),
            (f"{name}/all", "Size", [source], {"T": dtype, "out_type": whole}),
            (f"{name}/left", "Size", [f"{name}{TOTAL}"], {"T": dtype, "out_type": whole}),
            (f"{name}/each", "FloorDiv", [f"{name}/all", f"{name}/left"], {"T": whole}),
            (f"{name}{NUMBER}", "Cast", [f"{name}/each"], {"SrcT": whole, "DstT": dtype}),
            (name, "RealDiv", [f"{name}{TOTAL}", f"{name}{NUMBER}"], {"T": dtype}),
        ]
        made = [graph_pb2.GraphDef().node.add(name=n, op=op, input=inputs, attr=attrs) for n, op, inputs, attrs in parts]
        self._graph.node.remove(mean)
        self._graph.node.extend(made)


_WRITES = {"AssignVariableOp": "", "AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
"""Operations that assign a variable, with what makes the new value of the old one; nothing where it replaces that."""
SIZES = ("Shape", "ShapeN", "Size")
TOTAL, NUMBER = "/total", "/number"
"""Ends of the names of a mean's sum and of its divisor."""


def _take(node: Any, entries: Sequence[str]) -> None:
    del node.input[:]
    node.input.extend(entries)


def _rename_functions(graph: Any) -> None:
    """Give the functions of a graph names of their own: the process may know others by the same names."""
    suffix, names = f"_{next(_IMPORTS)}", {function.signature.name for function in graph.library.function}
    for node in [*graph.node, *(node for function in graph.library.function for node in function.node_def)]:
        node.op += suffix if node.op in names else ""
        for value in node.attr.values():
            for called in [*([value.func] if value.HasField("func") else []), *value.list.func]:
                called.name += suffix if called.name in names else ""
    for function in graph.library.function:
        function.signature.name += suffix
    del graph.library.gradient[:]
    upstream.register_functions(graph)


def function_of(make: Callable[[dict[str, Any]], Any], like: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], list[Array]]:
    """Return what evaluates tensors of a graph from others, given by name.

    Args:
        make: Makes them in a graph, from the tensors that stand for the given ones.
        like: Values of the types and numbers of dimensions of those.

    Returns:
        The function; values of any shape may be given to it.
    """
    names = list(like)
    specs = [tf.TensorSpec([None] * np.ndim(like[name]), tf.convert_to_tensor(like[name]).dtype) for name in names]
    made = tf.function(lambda *values: make(dict(zip(names, values, strict=True))), input_signature=specs, autograph=False)
    return lambda given: [tensor.numpy() for tensor in made(*(tf.constant(given[name]) for name in names))]


def is_float(value: Any) -> bool:
    """Return whether gradients pass through a tensor: bfloat16 is a number for TensorFlow, and none for NumPy."""
    return np.asarray(value).dtype != object and bool(tf.as_dtype(np.asarray(value).dtype).is_floating)


def num_rows(rows: Rows) -> int:
    """Return the number of examples: the most frequent length of what has one."""
    return Counter(len(value) for value in rows.values() if np.ndim(value)).most_common(1)[0][0]


def times_of_rows(shares: Sequence[Rows]) -> dict[Key, int]:
    """Return which inputs have entries for each example, and how many."""
    return entries_of_examples(
        shares, list(map(num_rows, shares)), lambda key: all(np.array_equal(shares[0][key], share[key]) for share in shares)
    )


def of_all(shares: Sequence[Rows]) -> Rows:
    """Return the examples of all shares as one batch; what has no entry for each of them is the first share's."""
    together = times_of_rows(shares)
    return {k: np.concatenate([s[k] for s in shares]) if k in together else shares[0][k] for k in shares[0]}
