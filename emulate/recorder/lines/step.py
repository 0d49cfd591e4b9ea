"""Say which of the user's lines make each stage of a step, from its points: what tapes, optimizers and reports are given."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from emulate.imports import tf
from emulate.program import described, innermost
from emulate.recorder.host_trace import HostTrace
from emulate.recorder.lines import stack_lines, walks
from emulate.recorder.lines.stack_lines import Operations
from emulate.recorder.lines.walks import ReplicaGraph, describe

REPLICA = "_gpudist_replica"
"""Attribute of a graph's operation: the replica that makes it."""
_IN_THE_TAIL = ("mean", "sum", "scale", "ratio", "penalty")
"""Roles that count in the loss only, not in the layers: of operations whose results have no entry for each example."""
Entry = dict[str, Any]


def owner(operation: Any) -> int | None:
    """Return the replica that made an operation of a graph or of eager code."""
    replica = getattr(operation, "replica", getattr(operation, REPLICA, None))
    return replica if isinstance(replica, int) else None


class StepLines:
    """Collect the points of one replica's step.

    Args:
        replica: Its number.
        graph: What its call is traced into; None in eager code.
        inputs: What enters, by key: filled while the step goes on.
        trace: Knows how many replicas this host has.
        eager: The operations that run, where it runs eagerly.
        called_from: The user's lines that led to `Strategy.run`.
    """

    def __init__(
        self,
        replica: int,
        graph: Any,
        inputs: list[tuple[tuple[Any, ...], Any]],
        trace: HostTrace,
        eager: Operations | None,
        called_from: stack_lines.Frames,
    ) -> None:
        self._replica, self._graph, self._inputs, self._trace = replica, graph, inputs, trace
        self.eager = eager
        self._called_from = called_from
        self._begins = stack_lines.here()
        self.objective: list[Any] = []
        self._losses: dict[tuple[str, ...], list[Any]] = {}
        self.taped: list[Any] = []
        self.given: list[Any] = []
        self.kept: list[Any] = []
        self.returned: Any = None
        self.calls: dict[str, list[Entry]] = {}

    def tensors(self, values: Any) -> list[Any]:
        """Return the tensors among values as walks take them."""
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

    def tape(self, target: Any, gradients: Any, variables: Iterable[str]) -> None:
        """Take note of what a tape takes gradients of, of the gradients, and of whose they are."""
        losses = self.tensors(target)
        self.objective += losses
        self._losses.setdefault(tuple(variables), []).extend(losses)
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
        whole = self._graph
        ends = [*self.objective, *self.taped, *self.given, *self.kept]
        if whole is None or not (self.taped or self.given) or any(end.graph is not whole for end in ends):
            return None
        ends += [tensor for tensor in self.tensors(self.returned) if tensor.graph is whole]
        return describe(whole, ends, self.objective, self.rows, self._is_own)

    def places(self, graph: ReplicaGraph) -> dict[str, Any]:
        """Return the user's lines of a graph; of each operation its name, and the index of its line, None where it has none."""
        entries = [self.entry(stack_lines.of_operation(operation), {}) for operation in graph.made]
        places = [{key: entry[key] for key in ("file", "line", "text", "cell") if key in entry} for entry in entries]
        lines = list({json.dumps(place): place for place in places if place}.values())
        names = [operation.name for operation in graph.made]
        return {"lines": lines, "at": [lines.index(place) if place else None for place in places], "names": names}

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
        shapes = [walks.dims_of(tensor) for _, tensor in self._inputs]
        lengths = Counter(shape[0] for shape in shapes if shape)
        most = max(lengths.values(), default=0)
        others = [shape is not None and (not shape or (len(shape) == 1 and lengths[shape[0]] < most)) for shape in shapes]
        return [tensor for (_, tensor), is_other in zip(self._inputs, others, strict=True) if not is_other]

    def stages(self) -> dict[str, list[Entry]]:
        """Return the lines of each stage."""
        loss = walks.region(self.objective, self.rows, self._is_own)
        flows = walks.Flows(loss, self.rows, self.sizes)
        roles = self._roles_of_loss(loss, flows)
        # A loss that is a tf.function, or has a loop, is one operation here: its lines are in the function that it calls.
        for call, operation, words in walks.roles_inside([op for op in loss if self._is_own(op)], flows, self.sizes):
            loss[operation] = loss[call]
            is_loss = call.type.endswith("PartitionedCall") and not flows.of(call.outputs[0]).batched
            roles[operation] = words if is_loss else words - {*_IN_THE_TAIL}
        stages = {"loss": self._of_variables(self.lines(loss, roles))} | self._of_given()
        for stage, entries in self.calls.items():
            stages[stage] = [*stages.get(stage, []), *entries]
        return {stage: entries for stage, entries in stages.items() if entries}

    def _of_variables(self, entries: list[Entry]) -> list[Entry]:
        """Say of lines whose gradients they make, where several losses train different variables."""
        of_place: dict[tuple[Any, ...], list[str]] = {}
        for names, losses in self._losses.items() if len(self._losses) > 1 else ():
            for entry in self.lines(walks.region(losses, self.rows, self._is_own), {}):
                of_place.setdefault(_place(entry), []).extend(names)
        return [entry | ({"of": of_place[_place(entry)]} if _place(entry) in of_place else {}) for entry in entries]

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
        return owner(operation) == self._replica

    def _adds_up(self, operation: Any) -> bool:
        """Return whether an operation puts together what replicas have: one of a collective, or made by none of them."""
        if operation.type.startswith(("Collective", "Nccl")):
            return True
        of_none = owner(operation) is None and operation.type not in ("Placeholder", "Const", "Given")
        return self._trace.local_replicas > 1 and of_none

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
            place = _place(entry)
            kept = entries.setdefault(place, entry)
            kept["roles"] = entry["roles"] | kept["roles"]  # walked from near to far: the nearest one counts
            kinds.setdefault(place, Counter())[operation.type] += 1
        return [entry | {"operations": dict(kinds[place])} for place, entry in entries.items()]


def _place(entry: Entry) -> tuple[Any, ...]:
    return entry["file"], entry.get("cell"), entry["line"]
