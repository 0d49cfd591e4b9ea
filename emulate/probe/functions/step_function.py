"""Evaluate the function of a step: what it records for given rows and given gradients, at a given state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from emulate.probe import upstream
from emulate.probe.functions.files import described, folder_of, state_of

Key = tuple[Any, ...]
Values = dict[Key, Any]
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp", "Identity")
"""Operations that take a variable and leave it as it is."""
GIVEN = ("gradient", "sparse-gradient", "sparse-rows")
"""Kinds of tensors that an optimizer is given, and that can be given to it in place of the step's own."""
_CYCLE = 509
"""After so many elements their changes by units in the last place come again."""
_MOST_REDUCED = 16
"""With more sums over the replicas (of each normalization of a deep network) shares are evaluated without them."""
OF_THE_FORWARD_PASS = (*GIVEN, "sparse-shape", "taped", "objective", "draw")


@dataclass(frozen=True)
class Fetched:
    """Describe one record that a function makes: its kind, what is said of it, and the name of the tensor of each key."""

    kind: str
    about: dict[str, Any]
    tensors: Mapping[Key, str]

    @property
    def is_of_forward_pass(self) -> bool:
        """Return whether anything of it is made before an optimizer's update."""
        return any(key[0] in OF_THE_FORWARD_PASS for key in self.tensors)

    @property
    def inputs(self) -> list[Key]:
        """Return the keys of the examples, in the order of the step's arguments."""
        return sorted(key for key in self.tensors if key[0] == "input")


@dataclass(frozen=True)
class _Part:
    """Hold a part of a function: what it is given, the keys of what it gives, and which variables it may assign."""

    function: Any
    inputs: list[str]
    keys: list[list[Key]]
    assigns: Sequence[int]


@dataclass(frozen=True)
class _Reduction:
    """Hold a sum, or a mean, over the replicas inside of a step: the names of its tensors before and after it."""

    averages: bool
    tensors: list[list[str]]


class State:
    """Hold the variables of a run's functions, whose values are the state of a step.

    Args:
        trace: The folder of the run's trace.
    """

    def __init__(self, trace: Path) -> None:
        import tensorflow as tf

        self.variables: dict[int, Any] = {}
        for file in state_of(folder_of(trace)).glob("*.npy"):
            number, dtype, _ = file.name.split(".")
            self.variables[int(number)] = tf.Variable(tf.cast(np.load(file, allow_pickle=False), dtype), trainable=False)

    def read(self, numbers: Iterable[int]) -> Mapping[int, Any]:
        """Return the values of some variables, by their number."""
        return {number: self.variables[number].read_value() for number in numbers}

    def assign(self, values: Mapping[int, Any]) -> None:
        """Go back to values that `read` has returned."""
        for number, value in values.items():
            self.variables[number].assign(value)

    def shift(self, numbers: Sequence[int], units: float, seed: int) -> None:
        """Change each element of some variables by up to so many units in the last place.

        Args:
            numbers: The variables.
            units: By how many, at most.
            seed: Which change.
        """
        generator = np.random.default_rng(seed)
        for variable in (self.variables[number] for number in numbers):
            if variable.dtype.is_floating:
                value = variable.numpy()
                size = np.finfo(np.float64 if value.dtype == np.float64 else np.float32).eps
                factors = (1 + units * size * generator.uniform(-1, 1, _CYCLE)).astype(value.dtype)
                factors = np.tile(factors, -(-value.size // _CYCLE))[: value.size]
                variable.assign(value * factors.reshape(value.shape))


class StepFunction:
    """Evaluate one function of a run.

    Args:
        trace: The folder of the run's trace.
        number: The function's number.
        state: Its variables.
    """

    def __init__(self, trace: Path, number: int, state: State) -> None:
        from tensorflow.core.framework import graph_pb2

        about = described(trace, number)
        folder = folder_of(trace) / str(number)
        by_record = [[(tuple(key), *rest) for key, *rest in record["tensors"]] for record in about["records"]]
        self.records = [
            Fetched(record["kind"], record["about"], {key: name for key, name, *_ in tensors})
            for record, tensors in zip(about["records"], by_record, strict=True)
        ]
        whole = [(tuple(key), *rest) for key, *rest in about["whole"]]
        self._specs = {name: (dtype, _of_any_rows(key, shape)) for tensors in by_record for key, name, dtype, shape in tensors}
        self._specs |= {name: (dtype, shape and [None, *shape[1:]]) for _, name, dtype, shape in whole}
        self._whole = {name: key for key, name, *_ in whole}
        self._reductions = [_Reduction(r["averages"], [pair[:2] for pair in r["tensors"]]) for r in about["reductions"]]
        self._specs |= {name: (dtype, shape) for r in about["reductions"] for _, name, dtype, shape in r["tensors"]}
        self._rows = {key: name for record in self.records for key, name in record.tensors.items() if key[0] == "input"}
        self._captures, self._updates = about["captures"], about["updates"]
        self._state = state
        self._before: dict[tuple[int, tuple[str, ...]], _Part] = {}
        self._summands: dict[int, _Part] = {}
        self._graph = graph_pb2.GraphDef.FromString((folder / "graph.pb").read_bytes())
        for node in [*self._graph.node, *(node for function in self._graph.library.function for node in function.node_def)]:
            node.device = ""  # they name the job of a cluster that is not there
            node.attr.pop("_class", None)  # to be placed with operations that may have been left out
        upstream.register_functions(self._graph)
        with np.load(folder / "constants.npz", allow_pickle=False) as values:
            self._constants = {int(place): values[place] for place in values.files}

    def fits(self, rows: Mapping[Key, Any]) -> bool:
        """Return whether the function takes rows of these shapes: in some graphs the size of the batch is fixed."""
        import tensorflow as tf

        shapes = {name: np.shape(rows[key]) for key, name in self._rows.items()}
        return all(tf.TensorShape(self._specs[name][1]).is_compatible_with(shape) for name, shape in shapes.items())

    def graph(self, shapes: Sequence[Sequence[int]], *, is_whole: bool = False) -> Any:
        """Return the graph of all that is made before the optimizers' updates, or of the whole step.

        Args:
            shapes: Those of the examples, in the order of the step's arguments.
            is_whole: With the updates. What the step gives is then left out: it lives on after the step.

        Returns:
            A graph in which TensorFlow knows the shapes, as far as it can.
        """
        keys = next(record.inputs for record in self.records if record.inputs)
        fixed = {self._rows[key]: shape for key, shape in zip(keys, shapes, strict=True)}
        self._specs |= {name: (self._specs[name][0], list(shape)) for name, shape in fixed.items()}
        part = self._part((), (), updates=self._updates) if is_whole else self._part(OF_THE_FORWARD_PASS, ())
        return part.function.get_concrete_function().graph

    @property
    def gradient_names(self) -> frozenset[str]:
        """Return the names of the tensors that optimizers are given."""
        return frozenset(self._given_names(self.records))

    def gradients(
        self, number: int, shares: Sequence[Mapping[Key, Any]], given: Sequence[Values], whole: Mapping[Key, Any]
    ) -> list[Values]:
        """Return what a record holds before its optimizer's update, and leave the state as it is.

        Args:
            number: The place of the record in `records`.
            shares: The tensors of each share of the batch by their key. What the step itself sums over the replicas is summed
                over them.
            given: What the optimizers of earlier records are given.
            whole: The batch that the shares are of.

        Returns:
            Gradients, the objective and the random draws of each share, by key.
        """
        if not self.records[number].is_of_forward_pass:
            return [{} for _ in shares]
        named = self._named(given)
        are_reduced = len(shares) > 1 and len(self._reductions) <= _MOST_REDUCED
        for place, reduction in enumerate(self._reductions if are_reduced else ()):
            part = self._before_a_reduction(place)
            parts = [self._call(part, rows, whole, named, pure=True)[0].values() for rows in shares]
            for (_, after), values in zip(reduction.tensors, zip(*parts, strict=True), strict=True):
                total = sum(values[1:], values[0])
                named[after] = total / len(shares) if reduction.averages else total
        part = self._before_the_update(number, tuple(named))
        return [self._call(part, rows, whole, named, pure=True)[number] for rows in shares]

    def update(
        self, shares: Sequence[Mapping[Key, Any]], given: Sequence[Values], whole: Mapping[Key, Any]
    ) -> list[list[Values]]:
        """Make the step with these gradients in place of its own: of all rows, or of one share after the other as replicas do.

        Args:
            shares: The tensors of each share by their key.
            given: What the optimizer of each record is given.
            whole: The batch that the shares are of.

        Returns:
            Of each share the variables after the step and what it returns, by record. What each share makes of the same state
            becomes one by the mean, as far as they differ: moving averages.
        """
        part = self._after_the_update
        before = self._state.read(part.assigns if len(shares) > 1 else ())
        results, after = [], []
        for rows in shares:
            self._state.assign(before)
            results.append(self._call(part, rows, whole, self._named(given)))
            after.append(self._state.read(before))
        self._state.assign({number: _together([of_share[number] for of_share in after]) for number in before})
        return results

    @cached_property
    def variables(self) -> dict[Key, int]:
        """Return, by key, the number of each variable whose value after the step is recorded."""
        nodes, numbers = {node.name: node for node in self._graph.node}, dict(self._captures)
        variables: dict[Key, int] = {}
        for key, name in (pair for record in self.records for pair in record.tensors.items() if pair[0][0] == "weight"):
            node = nodes.get(name.rpartition(":")[0])
            while node is not None and node.op == "Identity":
                node = nodes.get(node.input[0].partition(":")[0])
            number = numbers.get(_tensor(node.input[0])) if node is not None and node.op == "ReadVariableOp" else None
            variables |= {} if number is None else {key: number}
        return variables

    def _named(self, given: Sequence[Values]) -> dict[str, Any]:
        pairs = zip(self.records, given, strict=False)
        return {record.tensors[key]: value for record, values in pairs for key, value in values.items() if key[0] in GIVEN}

    def _call(
        self,
        part: _Part,
        rows: Mapping[Key, Any],
        whole: Mapping[Key, Any],
        given: Mapping[str, Any],
        *,
        pure: bool = False,
    ) -> list[Values]:
        values = {name: rows[key] for key, name in self._rows.items()} | dict(given)
        values |= {name: whole[key] for name, key in self._whole.items()}
        before = self._state.read(part.assigns if pure else ())
        try:
            results = iter(part.function(*(self._tensor(name, values[name]) for name in part.inputs)))
        finally:
            self._state.assign(before)
        return [{key: next(results) for key in of_record} for of_record in part.keys]

    def _tensor(self, name: str, value: Any) -> Any:
        import tensorflow as tf

        return tf.cast(value, self._specs[name][0]) if self._specs[name][0] != "string" else tf.constant(value)

    def _given_names(self, records: Sequence[Fetched]) -> list[str]:
        return list(dict.fromkeys(name for record in records for key, name in record.tensors.items() if key[0] in GIVEN))

    def _before_the_update(self, number: int, given: tuple[str, ...]) -> _Part:
        if (number, given) not in self._before:
            self._before[number, given] = self._part(OF_THE_FORWARD_PASS, given, only=number)
        return self._before[number, given]

    def _before_a_reduction(self, place: int) -> _Part:
        """Return a function that makes what the step sums over the replicas, given what it has summed before."""
        if place not in self._summands:
            fetched = [before for before, _ in self._reductions[place].tensors]
            given = [after for reduction in self._reductions[:place] for _, after in reduction.tensors]
            self._summands[place] = self._fetching(fetched, given, [[("summand", i) for i in range(len(fetched))]])
        return self._summands[place]

    @cached_property
    def _after_the_update(self) -> _Part:
        return self._part(("weight", "variable", "result"), self._given_names(self.records), updates=self._updates)

    def _part(
        self, kinds: Sequence[str], given: Sequence[str], *, only: int | None = None, updates: Sequence[str] = ()
    ) -> _Part:
        """Return a function that fetches these kinds of tensors.

        Args:
            kinds: Of what is fetched.
            given: Tensors that are given in place of the graph's own, besides the rows.
            only: The place of the one record whose tensors are fetched; None for all.
            updates: Operations that are executed besides.

        Returns:
            The function.
        """
        keys = [
            [key for key in record.tensors if key[0] in kinds and only in (None, place)]
            for place, record in enumerate(self.records)
        ]
        fetched = [record.tensors[key] for record, of_record in zip(self.records, keys, strict=True) for key in of_record]
        return self._fetching(fetched, given, keys, updates)

    def _fetching(
        self, fetched: Sequence[str], given: Iterable[str], keys: list[list[Key]], updates: Sequence[str] = ()
    ) -> _Part:
        import tensorflow as tf

        inputs = list(dict.fromkeys([*self._rows.values(), *self._whole, *given]))
        graph_def = _cut(self._graph, [*fetched, *(f"{name}:0" for name in updates)], set(inputs))
        used = _inputs_of(graph_def)
        inputs = [name for name in inputs if name in used or name in fetched]
        specs = [tf.TensorSpec(shape, dtype) for dtype, shape in map(self._specs.__getitem__, inputs)]

        @tf.function(autograph=False, input_signature=specs)
        def part(*values: Any) -> list[Any]:
            at_hand = dict(zip(inputs, values, strict=True))
            mapped = {name: value for name, value in (self._captured(used) | at_hand).items() if name in used}
            others = [name for name in dict.fromkeys(fetched) if name not in at_hand]
            rest = tf.graph_util.import_graph_def(graph_def, mapped, return_elements=others, name="") if graph_def.node else []
            results = at_hand | dict(zip(others, rest, strict=True))
            return [results[name] for name in fetched]

        return _Part(part, inputs, keys, self._assigns(graph_def))

    def _assigns(self, graph_def: Any) -> list[int]:
        """Return the variables that anything but a read takes."""
        taken = {_tensor(name) for node in graph_def.node if node.op not in READS for name in node.input}
        return sorted({number for name, number in self._captures if number is not None and name in taken})

    def _captured(self, used: set[str]) -> dict[str, Any]:
        import tensorflow as tf

        here = tf.compat.v1.get_default_graph()
        variables = self._state.variables
        return {
            name: tf.constant(self._constants[place]) if number is None else here.capture(variables[number].handle)
            for place, (name, number) in enumerate(self._captures)
            if name in used
        }


def _together(values: Sequence[Any]) -> Any:
    """Return the mean of values that differ; of whole numbers the first."""
    import tensorflow as tf

    are_equal = all(np.array_equal(values[0], value) for value in values[1:])
    return values[0] if are_equal or not values[0].dtype.is_floating else tf.add_n(list(values)) / len(values)


def _of_any_rows(key: Key, shape: list[int | None] | None) -> list[int | None] | None:
    """Return the shape of what may be given for a tensor: a sparse gradient may have other rows than the program's own."""
    return [None, *shape[1:]] if shape and key[0] in ("sparse-gradient", "sparse-rows") else shape


def _inputs_of(graph_def: Any) -> set[str]:
    return {_tensor(name) for node in graph_def.node for name in node.input if not name.startswith("^")}


def _tensor(name: str) -> str:
    """Return the full name of a tensor: `x:0` for the `x` of a GraphDef."""
    return name if ":" in name else f"{name}:0"


def _cut(graph_def: Any, names: Sequence[str], given: set[str]) -> Any:
    """Return the nodes that tensors are computed from where others are given."""
    nodes = {node.name: node for node in graph_def.node}
    todo = [name.rpartition(":")[0] for name in names if name not in given]
    kept: set[str] = set()
    while todo:
        name = todo.pop()
        if name in kept:
            continue
        kept.add(name)
        for entry in nodes[name].input:
            if entry.startswith("^"):
                todo.append(entry[1:])
            elif _tensor(entry) not in given:
                todo.append(entry.partition(":")[0])
    cut = type(graph_def)()
    cut.CopyFrom(graph_def)
    del cut.node[:]
    cut.node.extend(node for node in graph_def.node if node.name in kept and node.op != "Placeholder")
    return cut
