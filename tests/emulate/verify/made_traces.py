"""Writes small traces by hand, as a probe would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from emulate.trace import Trace, TraceWriter, digest


@dataclass
class Made:
    """A trace in the making: `step(...)` for each replica and step, then `trace()`."""

    directory: Path
    topology: str = "1x1"
    share: int | None = None
    replicas: int | None = None
    _writers: dict[int, TraceWriter] = field(default_factory=dict)

    def writer(self, host: int = 0) -> TraceWriter:
        if host not in self._writers:
            Trace.describe(self.directory, {"topology": self.topology})
            self._writers[host] = TraceWriter(self.directory / f"host-{host}", budget=1 << 30)
        return self._writers[host]

    def event(self, event: Mapping[str, Any], host: int = 0) -> None:
        self.writer(host).write(event)

    def variables(self, host: int, values: Mapping[str, Any], frozen: Sequence[str] = (), keep: bool = True) -> dict[str, Any]:
        writer = self.writer(host)
        found = {}
        for name, value in values.items():
            array = np.asarray(value)
            entry: dict[str, Any] = {"digest": digest(array), "trainable": name not in frozen}
            if keep:
                entry["array"] = self._kept(writer, array)
            found[name] = entry
        return found

    def initial(self, weights: Mapping[str, Any], replica: int = 0, host: int = 0, frozen: Sequence[str] = ()) -> None:
        self.event({"event": "initial", "replica": replica, "variables": self.variables(host, weights, frozen)}, host)

    def step(
        self,
        index: int,
        gradients: Mapping[str, Any],
        weights: Mapping[str, Any],
        *,
        replica: int = 0,
        host: int = 0,
        optimizer: str = "sgd",
        rows: Sequence[str] | None = None,
        objective: float | None = None,
        draws: Sequence[str] = (),
        frozen: Sequence[str] = (),
        keep: bool = True,
        tape: bool = False,
        runs: int = 1,
        inputs: Sequence[Any] = (),
        row_inputs: Sequence[int] | None = None,
        sparse: bool = False,
    ) -> None:
        writer = self.writer(host)
        arrays = {name: np.asarray(value) for name, value in gradients.items()}
        stored = {name: self._rows_of(writer, array) if sparse else self._kept(writer, array) for name, array in arrays.items()}
        event: dict[str, Any] = {
            "event": "step",
            "optimizer": optimizer,
            "step": index,
            "replica": replica,
            "rows": None if rows is None else list(rows),
            "inputs": [writer.array(np.asarray(value)) for value in inputs],
            "row_inputs": list(range(len(inputs)) if row_inputs is None else row_inputs),
            "gradients": stored,
            "weights": self.variables(host, weights, frozen, keep),
            "objective": objective,
            "draws": list(draws),
            "runs": runs,
            **({"tape": True} if tape else {}),
        }
        self.event(event, host)

    def _kept(self, writer: TraceWriter, array: Any) -> dict[str, Any]:
        """About `share` of the elements."""
        stride = 1 if self.share is None else max(1, -(-array.size // self.share))
        if stride == 1:
            return writer.array(array)
        return writer.array(array.reshape(-1)[::stride]) | {"shape": list(array.shape), "stride": stride}

    def _rows_of(self, writer: TraceWriter, table: Any) -> dict[str, Any]:
        """A sparse gradient: the rows that are not 0."""
        rows = np.flatnonzero(table.reshape(len(table), -1).any(axis=1))
        return writer.array(table[rows], rows=rows) | {"shape": list(table.shape)}

    def left(self, values: Mapping[str, Any], replica: int = 0, host: int = 0) -> None:
        """What the program has put in the place of the weights, after its last step."""
        variables = self.variables(host, values)
        self.event({"event": "left", "replica": replica, "changed": list(values), "variables": variables}, host)

    def state(self, index: int, values: Mapping[str, Any], replica: int = 0, host: int = 0, optimizer: str = "sgd") -> None:
        """What a step assigned itself; after the step."""
        event = {"event": "state", "optimizer": optimizer, "step": index, "replica": replica}
        self.event({**event, "variables": self.variables(host, values, frozen=list(values))}, host)

    def report(self, kind: str, name: str, step: int, value: float, host: int = 0, made: int | None = None) -> None:
        self.event({"event": "report", "kind": kind, "name": name, "step": step, "value": value, "made": made}, host)

    def with_nothing(self) -> Trace:
        """A trace of a run that made no step."""
        self.writer()
        return self.trace()

    def trace(self) -> Trace:
        for writer in self._writers.values():
            writer.close()
        return Trace(self.directory)
