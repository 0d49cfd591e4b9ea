"""Say which of the user's lines make each stage of a step, from its points: what tapes, optimizers and reports are given."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from emulate import graph_functions
from emulate.probe import replica_call as bodies
from emulate.probe import upstream
from emulate.probe.lines import stack_lines, walks
from emulate.probe.lines.stack_lines import Operations
from emulate.probe.lines.walks import ReplicaGraph, describe
from emulate.probe.point import around
from emulate.program import described, innermost

if TYPE_CHECKING:
    from emulate.probe.probe import Probe
    from emulate.probe.replica_call import Body

_MOST_TRACES = 4
"""So often the lines of a function are recorded: it may be traced again for other shapes, or once variables are made."""
_REPLICA = "_gpudist_replica"
_IN_THE_TAIL = ("mean", "sum", "scale", "ratio", "penalty")
"""Roles that count in the loss only, not in the layers: of operations whose results have no entry for each example."""
Entry = dict[str, Any]


def owner(operation: Any) -> int | None:
    """Return the replica that made an operation of a graph or of eager code."""
    replica = getattr(operation, "replica", getattr(operation, _REPLICA, None))
    return replica if isinstance(replica, int) else None


class StepLines:
    """Collect the points of one replica's step.

    Args:
        body: The replica's call.
        eager: The operations that run, where it runs eagerly.
        called_from: The user's lines that led to `Strategy.run`.
    """

    def __init__(self, body: Body, eager: Operations | None, called_from: stack_lines.Frames) -> None:
        self.body, self.eager = body, eager
        self._called_from = called_from
        self._begins = stack_lines.here()
        self.objective: list[Any] = []
        self.taped: list[Any] = []
        self.given: list[Any] = []
        self.kept: list[Any] = []
        self.returned: Any = None
        self.calls: dict[str, list[Entry]] = {}

    def tensors(self, values: Any) -> list[Any]:
        """Return the tensors among values as walks take them."""
        import tensorflow as tf

        tensors = []
        for value in tf.nest.flatten(values):
            if not tf.is_tensor(value) or hasattr(value, "assign"):
                continue
            is_sparse = isinstance(value, tf.IndexedSlices)
            parts = [value.values, value.indices] if is_sparse else tf.nest.flatten(value, expand_composites=True)
            for tensor in parts:
                is_eager = hasattr(tensor, "numpy")
                tensors += [self.eager.value(tensor)] if is_eager and self.eager else [] if is_eager else [tensor]
        return tensors

    def tape(self, target: Any, gradients: Any) -> None:
        """Take note of what a tape takes gradients of, and of the gradients."""
        self.objective += self.tensors(target)
        self.taped += self.tensors(gradients)
        self.call("gradient", "tape")

    def assign(self, name: str, values: Any, *, of_metric: bool, of_layer: bool) -> None:
        """Take note of what the step assigns to a variable by itself."""
        stage, role = ("reported", "update") if of_metric else ("assigned", "assign")
        self.call(stage, role, name, called=of_layer)
        self.kept += self.tensors(values)

    def apply(self, gradients: Any) -> None:
        """Take note of what an optimizer is given."""
        self.given += self.tensors(gradients)
        self.call("update", "apply")

    def call(self, stage: str, what: str, name: str = "", *, called: bool = False) -> None:
        """Take note of the line of a call of the step's, or of what the step calls."""
        entry = (
            self.entry(stack_lines.here(), {what: 0}) | ({"name": name} if name else {}) | ({"called": True} if called else {})
        )
        if entry.get("file") and entry not in self.calls.setdefault(stage, []):
            self.calls[stage].append(entry)

    def graph(self) -> ReplicaGraph | None:
        """Return what the step computes; None where it does not train, or not in one graph."""
        whole = self.body.graph
        ends = [*self.objective, *self.taped, *self.given, *self.kept]
        if whole is None or not (self.taped or self.given) or any(end.graph is not whole for end in ends):
            return None
        ends += [tensor for tensor in self.tensors(self.returned) if tensor.graph is whole]
        return describe(whole, ends, self.objective, self.rows, self._is_own)

    def places(self, graph: ReplicaGraph) -> dict[str, Any]:
        """Return the user's lines of a graph, and for each operation the index of its line; None where it has none."""
        entries = [self.entry(stack_lines.of_operation(operation), {}) for operation in graph.made]
        places = [{key: entry[key] for key in ("file", "line", "text", "cell") if key in entry} for entry in entries]
        lines = list({json.dumps(place): place for place in places if place}.values())
        return {"lines": lines, "at": [lines.index(place) if place else None for place in places]}

    def entry(self, made: stack_lines.Frames, roles: Mapping[str, int], near: int = 0) -> Entry:
        """Return the description of a user's line; without a file where no line is known."""
        begins = tuple(self._begins)
        inner = made[len(begins) :] if tuple(made[: len(begins)]) == begins else made
        place = innermost(list(inner or made or self._called_from))
        called = {"called": True} if not inner else {}
        return ({} if place is None else described(*place)) | called | {"roles": dict(roles), "near": near}

    @property
    def rows(self) -> set[walks.Key]:
        """Return the tensors that hold this replica's examples."""
        return {walks.key_of(part) for tensor in self._of_examples for part in self.tensors([tensor])}

    @property
    def sizes(self) -> set[int]:
        """Return the numbers of examples, as far as they are known."""
        return self.numbers_of_rows - {1}  # which is many another dimension, too

    @property
    def numbers_of_rows(self) -> set[int]:
        """Return the numbers of examples, as far as they are known, also of a single one."""
        shapes = [walks.dims_of(tensor) for tensor in self._of_examples]
        return {shape[0] for shape in shapes if shape and shape[0] is not None}

    @property
    def _of_examples(self) -> list[Any]:
        """Return the inputs but single numbers and lists that are not as long as most inputs: weights of losses, say."""
        shapes = [walks.dims_of(tensor) for _, tensor in self.body.inputs]
        lengths = Counter(shape[0] for shape in shapes if shape)
        most = max(lengths.values(), default=0)
        others = [shape is not None and (not shape or (len(shape) == 1 and lengths[shape[0]] < most)) for shape in shapes]
        return [tensor for (_, tensor), is_other in zip(self.body.inputs, others, strict=True) if not is_other]

    def stages(self) -> dict[str, list[Entry]]:
        """Return the lines of each stage."""
        loss = walks.region(self.objective, self.rows, self._is_own)
        flows = walks.Flows(loss, self.rows, self.sizes)
        stages = {"loss": self.lines(loss, self._roles_of_loss(loss, flows))} | self._of_given()
        for stage, entries in self.calls.items():
            stages[stage] = [*stages.get(stage, []), *entries]
        return {stage: entries for stage, entries in stages.items() if entries}

    def _roles_of_loss(self, loss: Collection[Any], flows: walks.Flows) -> dict[Any, set[str]]:
        is_of_each = all(flows.of(tensor).batched for tensor in self.objective)
        tail = walks.region(
            self.objective, self.rows, lambda op: is_of_each or not any(flows.of(t).batched for t in op.outputs[:1])
        )
        tail = {op: distance for op, distance in tail.items() if op in loss}
        roles = {op: walks.roles(op, flows) for op in loss}
        roles = {op: names - (set() if op in tail else {*_IN_THE_TAIL}) for op, names in roles.items()}
        for op in walks.counts([op for op in tail if "norm" not in roles[op]], flows):
            roles[op] = roles.get(op, set()) | {"count"}
        return roles

    def _of_given(self) -> dict[str, list[Entry]]:
        """Return the lines between the tapes and the sum, and between the sum and the optimizer."""
        taped = set(map(walks.key_of, self.taped))
        stops = {*self.rows, *taped}
        # What is kept of gradients in variables, as accumulation does, is given to an optimizer later.
        ends = [*self.given, *(tensor for tensor in self.kept if self.is_made_of_gradients(tensor))]
        whole = walks.region(ends, stops, lambda op: self._is_own(op) or self._adds_up(op))
        sums = {op for op in whole if self._adds_up(op)}
        after = walks.region(ends, stops, lambda op: op not in sums) if sums else {}
        before = {op: distance for op, distance in whole.items() if op not in after}
        flows = walks.Flows(whole, taped)
        roles = {op: walks.roles(op, flows) for op in whole}
        summed = {op: distance for op, distance in after.items() if op not in sums}
        return {"given": self.lines(before, roles), "sum": self.lines(summed, roles)}

    def is_made_of_gradients(self, tensor: Any) -> bool:
        """Return whether a tensor is computed with one of the gradients."""
        taped = set(map(walks.key_of, self.taped))
        ops = walks.region([tensor], taped, self._is_own)
        return walks.key_of(tensor) in taped or any(walks.key_of(operand) in taped for op in ops for operand in op.inputs)

    def _is_own(self, operation: Any) -> bool:
        """Return whether this replica makes an operation."""
        return owner(operation) == self.body.replica

    def _adds_up(self, operation: Any) -> bool:
        """Return whether an operation puts together what replicas have: one of a collective, or made by none of them."""
        if operation.type.startswith(("Collective", "Nccl")):
            return True
        of_none = owner(operation) is None and operation.type not in ("Placeholder", "Const", "Given")
        return self.body.probe.recording.local_replicas > 1 and of_none

    def lines(self, region: Mapping[Any, int], roles: Mapping[Any, Iterable[str]]) -> list[Entry]:
        """Return the lines of a region, the nearest first, with the types and the roles of their operations."""
        entries: dict[tuple[Any, ...], Entry] = {}
        kinds: dict[tuple[Any, ...], Counter[str]] = {}
        for operation, distance in region.items():
            if operation.type in ("Placeholder", "Const", "Given") or not self._is_own(operation):
                continue
            entry = self.entry(stack_lines.of_operation(operation), dict.fromkeys(roles.get(operation, ()), distance), distance)
            if not entry.get("file"):
                continue
            place = (entry["file"], entry.get("cell"), entry["line"])
            kept = entries.setdefault(place, entry)
            kept["roles"] = entry["roles"] | kept["roles"]  # walked from near to far: the nearest one counts
            kinds.setdefault(place, Counter())[operation.type] += 1
        return [entry | {"operations": dict(kinds[place])} for place, entry in entries.items()]


class Lines:
    """Record the user's lines of each step function, when it is traced or runs eagerly for the first time."""

    def __init__(self, probe: Probe, *, enabled: bool) -> None:
        self._probe = probe
        self.enabled = enabled
        self._called_from: stack_lines.Frames = ()
        self._eager: Operations | None = None
        self._seen: Counter[tuple[str, int]] = Counter()
        self._written: set[str] = set()
        self.listeners: list[Callable[[], None]] = []
        self._steps: dict[int, StepLines] = {}
        self._described: set[str] = set()

    def run_entered(self) -> None:
        """Take note that the program has called `Strategy.run`."""
        if self.enabled and bodies.current() is None:
            self._called_from, self._steps, self._eager = stack_lines.here(), {}, Operations()

    @contextlib.contextmanager
    def of(self, body: Body) -> Iterator[None]:
        """Record the lines of a replica's call."""
        self._seen[(body.label, body.replica)] += 1
        if not self.enabled or self._seen[(body.label, body.replica)] > _MOST_TRACES:
            yield
            return
        is_eager = body.graph is None
        body.lines = StepLines(body, (self._eager or Operations()) if is_eager else None, self._called_from)
        watched = body.lines.eager.watch(body.replica) if body.lines.eager is not None else contextlib.nullcontext()
        with watched:
            yield
        with self._told_if_it_fails():
            self._end(body, body.lines)

    @contextlib.contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        """Note an error of ours: a program must not end because its lines could not be found."""
        try:
            yield
        except Exception as error:
            self._probe.note_once("lines-unseen", f"The lines of a finding may be missing: {type(error).__name__}: {error}")

    def _end(self, body: Body, step: StepLines) -> None:
        self._steps[body.replica] = step
        if body.replica == min(self._steps):
            self.write({"event": "lines", "function": body.label, "stages": step.stages()})
        every = self._probe.recording.local_replicas
        if len(self._steps) == every > 1:
            self._write_crossings(body)
        if len(self._steps) == every or graph_functions.virtual_replicas() is not None:
            self._write_graphs(body)

    def _write_graphs(self, body: Body) -> None:
        """Write what the replicas' steps compute, equal ones once, and each function as it is traced first."""
        if body.label in self._described:
            return
        graphs = [(replica, step, graph) for replica, step in self._steps.items() if (graph := step.graph()) is not None]
        by_content: dict[str, list[tuple[int, StepLines, ReplicaGraph]]] = {}
        for item in graphs:
            by_content.setdefault(json.dumps(item[2].content()), []).append(item)
        for alike in by_content.values():
            _, step, graph = alike[0]
            about = {"function": body.label, "replicas": [r for r, _, _ in alike], "rows": sorted(step.numbers_of_rows - {0})}
            self.write({"event": "graph", **about, **graph.content(), **step.places(graph)})
            self._described.add(body.label)

    def _write_crossings(self, body: Body) -> None:
        """Write where a replica takes a tensor that another one has made of its own examples."""
        of_graph = [] if body.graph is None else body.graph.get_operations()
        operations = next(iter(self._steps.values())).eager.all if body.graph is None else of_graph  # type: ignore[union-attr]
        losses = {op for step in self._steps.values() for op in walks.region(step.objective)}
        rows = {replica: step.rows for replica, step in self._steps.items()}
        crossings = [
            (op, tensor) for op, tensor in walks.crossings(operations, owner, rows) if op in losses and owner(op) in self._steps
        ]
        for first, tensor in crossings[:1]:
            reader = owner(first)
            entries = [self._steps[owner(op) or 0].entry(stack_lines.of_operation(op), {"crosses": 0}) for op, _ in crossings]
            unique = list({json.dumps(entry): entry for entry in entries if entry.get("file")}.values())
            about = {"replica": reader, "of": owner(tensor.op), "operation": first.type, "number": len(crossings)}
            self.write({"event": "crossing", **about, "lines": unique})

    def reported(self, value: Any, name: str, *, averages: bool = False) -> None:
        """Record the lines between the loss and a number that the program reports, or where it averages a gradient."""
        if not self.enabled or not self._steps or bodies.current() is not None:
            return
        with self._told_if_it_fails():
            self._report(value, name, averages=averages)

    def _report(self, value: Any, name: str, *, averages: bool) -> None:
        step = self._steps[min(self._steps)]
        parts = getattr(value, "values", None)
        parts = list(parts) if isinstance(parts, tuple) else [value]
        ends = step.tensors(parts[:1])
        region = walks.region(ends, {*step.rows, *map(walks.key_of, step.objective)})
        entries = step.lines(region, {op: {"made"} for op in region})
        stages = {"reported": entries}
        if (entry := step.entry(stack_lines.here(), {"reduced": 0}) | {"called": False}).get("file"):
            entries.append(entry)
            # Gradients have dimensions; their norm, which is often reported, has none.
            if averages and any(walks.dims_of(end) and step.is_made_of_gradients(end) for end in ends):
                stages["sum"] = [entry | {"roles": {"averages": 0}}]
        self.write({"event": "lines", "report": name, "stages": stages})

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event once."""
        text = json.dumps(event, sort_keys=True)
        if self.enabled and text not in self._written:
            self._written.add(text)
            self._probe.recording.write(event)


def own_operations() -> None:
    """Have each operation of a graph know the replica that makes it: replicas are traced one after the other by threads."""
    cls = upstream.graph_class()

    @around(cls, "_create_op_internal")
    def create(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        operation = original(self, *args, **kwargs)
        body = bodies.current()
        if body is not None:
            setattr(operation, _REPLICA, body.replica)
        return operation
