"""Write which of the user's lines make each stage of a step, and what each replica computes."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from emulate import graph_functions
from emulate.grouping import grouped
from emulate.program import described, innermost
from emulate.recorder.host_trace import HostTrace
from emulate.recorder.lines import stack_lines, walks
from emulate.recorder.lines.stack_lines import Operations
from emulate.recorder.lines.step import StepLines, owner
from emulate.recorder.replica_call import Body, current_body

_MOST_TRACES = 4
"""So often the lines of a function are recorded: it may be traced again for other shapes, or once variables are made."""


class Lines:
    """Record the user's lines of each step function, when it is traced or runs eagerly for the first time.

    Args:
        trace: Where they are written.
        warn: Tells the user that lines may be missing.
        enabled: Whether anybody asks for them.

    Attributes:
        listeners: Called when the program makes a call whose line is noted.
    """

    def __init__(self, trace: HostTrace, warn: Callable[[str], None], *, enabled: bool) -> None:
        self._trace = trace
        self._warn = warn
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
        if self.enabled and current_body() is None:
            self._called_from, self._steps, self._eager = stack_lines.here(), {}, Operations()

    @contextlib.contextmanager
    def of(self, body: Body) -> Iterator[None]:
        """Record the lines of a replica's call."""
        self._seen[(body.label, body.replica)] += 1
        if not self.enabled or self._seen[(body.label, body.replica)] > _MOST_TRACES:
            yield
            return
        is_eager = body.graph is None
        eager = (self._eager or Operations()) if is_eager else None
        body.lines = StepLines(body.replica, body.graph, body.inputs, self._trace, eager, self._called_from)
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
            self._warn(f"The lines of a finding may be missing: {type(error).__name__}: {error}")

    def _end(self, body: Body, step: StepLines) -> None:
        self._steps[body.replica] = step
        if body.replica == min(self._steps):
            self.write({"event": "lines", "function": body.label, "stages": step.stages()})
        every = self._trace.local_replicas
        if len(self._steps) == every > 1:
            self._write_crossings(body)
        if len(self._steps) == every or graph_functions.virtual_replicas() is not None:
            self._write_graphs(body)

    def _write_graphs(self, body: Body) -> None:
        """Write what the replicas' steps compute, equal ones once, and each function as it is traced first."""
        if body.label in self._described:
            return
        graphs = [(replica, step, graph) for replica, step in self._steps.items() if (graph := step.graph()) is not None]
        for alike in grouped((json.dumps(graph.content()), (replica, step, graph)) for replica, step, graph in graphs).values():
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
        if not self.enabled or not self._steps or current_body() is not None:
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
            self._trace.write(event)

    def note_call(self, kind: str, about: dict[str, Any] | None = None, made: stack_lines.Frames | None = None) -> None:
        """Write the line of a call, once; inside of a step as a point of it."""
        for listener in self.listeners:
            listener()
        stack = (stack_lines.here() if made is None else made) if self.enabled else ()
        place = innermost(list(stack))
        if place is not None:
            in_step = current_body() is not None
            self.write({"event": "made", "kind": kind, "in_step": in_step, **(about or {}), "line": described(*place)})
