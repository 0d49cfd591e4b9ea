"""Turn records into the events of a trace: examples get their identity, arrays their place in the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulate.recorder.queue import WEIGHT_ELEMENTS, Key, Record, Sampled, is_sampled
from emulate.trace import Shard, TraceWriter, digest, num_rows, part_of, parts_of, row_names, row_positions

MOST_RUNS = 256
"""So many runs may be applied together."""

Run = dict[str, Any]


class Taped:
    """Hold runs whose gradients were taken but not applied: they belong to the step that applies them.

    Several runs may be applied together (accumulation), and several optimizers may apply one run's gradients, each once.
    """

    def __init__(self) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._takers: dict[int, set[str]] = {}

    def add(self, replica: int, run: Run, kept_by: str | None) -> None:
        """Add a run that made gradients. `kept_by` names the program's function that stored them in variables."""
        if self._takers.pop(replica, None):
            self._runs.pop(replica)
        entry: dict[str, Any] = {name: run[name] for name in ("replica", "rows", "objective", "draws") if name in run}
        entry["kept_by"] = kept_by
        self._runs.setdefault(replica, []).append(entry)
        del self._runs[replica][:-MOST_RUNS]

    def take(self, optimizer: str, replicas: list[int] | None = None) -> list[Run]:
        """Return the runs whose gradients an optimizer applies, replica after replica. Default: those of all replicas."""
        chosen = sorted(self._runs) if replicas is None else replicas
        return [run for replica in chosen for run in self._take(optimizer, replica, self._runs.get(replica, []))]

    def take_kept(self, optimizer: str, replica: int, kept_by: str) -> list[Run]:
        """Return the runs of a replica in which the same function of the program stored its gradients."""
        return self._take(optimizer, replica, [run for run in self._runs.get(replica, []) if run["kept_by"] == kept_by])

    def _take(self, optimizer: str, replica: int, runs: list[Run]) -> list[Run]:
        if not runs or optimizer in self._takers.get(replica, set()):
            return []
        self._takers.setdefault(replica, set()).add(optimizer)
        return runs


def join_applied(runs: list[Run]) -> dict[str, Any]:
    """Return the examples of several runs together, the sum of their objectives if all have one, and the runs per replica."""
    if not runs:
        return {}
    fields: dict[str, Any] = {"rows": [row for run in runs for row in run.get("rows", [])]}
    fields["runs"] = max(Counter(run["replica"] for run in runs).values())
    fields["draws"] = [draw for run in runs for draw in run.get("draws", [])]
    if all("objective" in run for run in runs):
        fields["objective"] = sum(run["objective"] for run in runs)
    return fields


Array = NDArray[Any]
Value = Array | Sampled
TABLE_ELEMENTS = 1 << 22


class HostTrace:
    """Write one host's trace.

    Args:
        writer: The host's part of the trace.
        steps: The last wanted step (counted from 1), None for all.
        send: Sends an event to the supervisor.
        ask: Asks, at the last wanted step, which step is the last one after all; None where `steps` is fixed.
        keeps_sums: Whether gradients that are not kept whole are summed over this host's replicas, and the sums are kept.

    Attributes:
        at_step: Called after each step that was written.
        at_end: Called before the end is written.
        has_reached_last: Whether the last wanted step was made: later ones are not recorded.
        local_replicas: How many replicas this host has, known once a strategy ran.
        made_before: Steps of each optimizer that a run made from which this one goes on.
    """

    def __init__(
        self,
        writer: TraceWriter,
        *,
        steps: int | None,
        send: Callable[[Mapping[str, Any]], None],
        ask: Callable[[], int] | None = None,
        keeps_sums: bool = False,
    ) -> None:
        self._writer = writer
        self._keeps_sums = keeps_sums
        self._wanted = steps
        self._send = send
        self._ask = ask
        self.at_step: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.local_replicas = 1
        self.made_before: dict[str, int] = {}
        self._counts: Counter[tuple[str, int]] = Counter()
        self._reported: Counter[str] = Counter()
        self._shared: set[str] = set()
        self._pending: dict[int, list[dict[str, Any]]] = {}
        self._taped = Taped()
        self._rowless: dict[int, dict[str, Any]] = {}
        self._summed: dict[tuple[str, int], tuple[int, set[str], dict[str, Array]]] = {}
        self._first_digests: dict[tuple[str, int, str], str] = {}
        self._trained: dict[tuple[int, str], str] = {}
        self._last: dict[int, dict[str, Any]] = {}
        self.has_reached_last = False
        self._is_taping = False
        self._outside: dict[tuple[int, str], tuple[str, int]] = {}

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event as it is."""
        self._writer.write(event)

    @property
    def num_steps(self) -> int:
        """Return the number of steps that a replica of this host has made so far."""
        counted = [(name, count) for (name, _), count in self._counts.items() if not (self._is_taping and name == "tape")]
        return max((count + self.made_before.get(name, 0) for name, count in counted), default=0)

    def handle(self, record: Record) -> None:
        """Write what a record says."""
        shards = record.about.get("shards", {})
        sampled = [(key, Sampled.of(v) if is_sampled(key, v, shards) else v) for key, v in record.values]
        record = replace(record, values=sampled)
        {
            "step": self._step,
            "run": self._run,
            "report": self._report,
            "initial": self._initial,
            "state": self._state,
            "left": self._left,
            "set": self._set,
            "result": self._result,
        }[record.kind](record)

    def _initial(self, record: Record) -> None:
        replica, about = record.about["replica"], record.about
        variables = self._variables("initial", 0, record.values, record)
        self.write({"event": "initial", "replica": replica, "optimizer": about["optimizer"], "variables": variables})

    def _left(self, record: Record) -> None:
        """Record trained variables at the end: those changed since the last step, and tables of slices."""
        replica = record.about["replica"]
        self._settle(record, [key[1] for key, _ in record.values])
        trained = {key: value for key, value in record.values if (replica, key[1]) in self._trained}
        trained = {key: value for key, value in trained.items() if (replica, key[1]) not in self._outside}
        digests = {key[1]: _digest(value) for key, value in trained.items()}
        changed = [name for name, its in digests.items() if its != self._trained[(replica, name)]]
        kept = [(key, value) for key, value in trained.items() if key[1] in changed or _shard(record, key[1]) is not None]
        variables = self._variables("left", 0, kept, record)
        self.write({"event": "left", "replica": replica, "changed": changed, "variables": variables})

    def _result(self, record: Record) -> None:
        """Record the numbers that the last step has returned."""
        values = [float(value) if np.isfinite(value) else None for _, value in record.values]
        self.write({"event": "result", "values": values})

    def _set(self, record: Record) -> None:
        """Record what the program made of a variable between its steps."""
        ((_, value),) = record.values
        self.write({"event": "set", **record.about, "value": self._writer.array(_plain(value), whole=True)})

    def _settle(self, record: Record, names: Collection[str]) -> None:
        """Record the variables after the last step, if the step itself does not change them."""
        replica = record.about["replica"]
        variables = {
            key[1]: self._variable((f"after {place[0]}", place[1], key[1]), value, record, trainable=key[2])
            for key, value in record.values
            if key[0] in ("weight", "variable") and key[1] in names and (place := self._outside.get((replica, key[1])))
        }
        if variables:
            self.write({"event": "after", "replica": replica, "variables": variables})
            last = self._last[replica]
            self._last[replica] = last | {"weights": last["weights"] | variables}

    def _state(self, record: Record) -> None:
        """Record what a step has assigned itself: it belongs to the last step of its replica."""
        replica = record.about["replica"]
        counts = {name: count for (name, other), count in self._counts.items() if other == replica}
        counts = {name: count for name, count in counts.items() if name != "tape"} or counts
        if self.has_reached_last or not counts:
            return
        optimizer = max(counts, key=lambda name: counts[name])
        index = self.made_before.get(optimizer, 0) + counts[optimizer] - 1
        variables = self._variables(f"state of {optimizer}", index, record.values, record)
        self.write({"event": "state", "optimizer": optimizer, "step": index, "replica": replica, "variables": variables})

    def _variables(
        self, kind: str, index: int, values: Iterable[tuple[Key, Array | Sampled]], record: Record
    ) -> dict[str, Any]:
        return {key[1]: self._variable((kind, index, key[1]), value, record, trainable=key[2]) for key, value in values}

    def _variable(self, place: tuple[str, int, str], value: Value, record: Record, *, trainable: bool) -> dict[str, Any]:
        """Return a variable's entry: always the digest; the elements once, and again for each differing copy."""
        entry: dict[str, Any] = {"digest": _digest(value), "trainable": trainable}
        shard = _shard(record, place[2])
        if shard is not None and not isinstance(value, Sampled):
            return entry | {"array": self._part(_plain(value), shard, record, WEIGHT_ELEMENTS)}
        if self._first_digests.get(place) == entry["digest"]:
            return entry
        self._first_digests.setdefault(place, entry["digest"])
        if not isinstance(value, Sampled):
            return entry | {"array": self._writer.array(_plain(value))}
        array = self._writer.array(_plain(value.values))
        array |= {"shape": list(value.shape), "stride": value.stride * array.get("stride", 1)}
        return entry | {"array": array | ({} if value.is_finite else {"finite": False})}

    def _part(self, value: Array, shard: Shard, record: Record, most: int, rows: Array | None = None) -> dict[str, Any]:
        """Return the entry of a slice, as rows of its table."""
        part = part_of(value, shard, record.about["replica"], most, rows)
        return self._writer.array(part.values, rows=part.rows) | part.entry(shard)

    def _step(self, record: Record) -> None:
        about = record.about
        optimizer, replica = about["optimizer"], about["replica"]
        index = self.made_before.get(optimizer, 0) + self._counts[(optimizer, replica)]
        if not about.get("free") and self._is_beyond(index):
            self._ask_once()
        self._counts[(optimizer, replica)] += 1
        self._is_taping = self._is_taping or bool(about.get("free"))
        if self._is_beyond(index) and not about.get("free"):
            if self._waits(optimizer) and not self.has_reached_last:
                self._settle(record, about.get("outside", ()))
                self._notice_end(optimizer)
            return
        event: dict[str, Any] = {"event": "step", "optimizer": optimizer, "step": index, "replica": replica}
        event |= {name: about[name] for name in ("reduced", "tape", "free", "again", "outside") if about.get(name)}
        event |= {"function": about["function"]} if "function" in about else {}
        event |= self._inputs(record) if any(key[0] == "input" for key, _ in record.values) else {}
        event["gradients"] = self._gradients(record)
        event |= self._sums(record, event["gradients"], index) if self._keeps_sums else {}
        taped = {key[1]: self._writer.array(_plain(value)) for key, value in record.values if key[0] == "taped"}
        event |= {"taped": taped} if taped else {}
        event["weights"] = self._weights(record, optimizer, index)
        for name in event["weights"]:
            self._outside.pop((replica, name), None)
        self._outside |= {(replica, name): (optimizer, index) for name in about.get("outside", ())}
        event |= _objective(record)
        read = {key[1]: value.item() for key, value in record.values if key[0] == "read"}
        event |= {"read": read} if read else {}
        event["draws"] = _draws(record)
        if about.get("apply_only"):
            runs = self._taped.take(optimizer, [replica])
            event |= _without_inputs(event) | join_applied(runs) if runs else {}
        elif "rows" in event and not event.get("tape") and about.get("kept_by"):
            runs = self._taped.take_kept(optimizer, replica, about["kept_by"])
            event |= _without_inputs(event) | join_applied([*runs, event]) if runs else {}  # the last of several batches
        self._place(event, about.get("kept_by"), fused="rows" in event or about.get("rows") == "none")

    def _place(self, event: dict[str, Any], kept_by: str | None, *, fused: bool) -> None:
        """Write a step, with the rows of the `run`s that it depends on where it does not carry its own."""
        replica = event["replica"]
        if event.get("tape"):
            self._taped.add(replica, event, kept_by)  # an optimizer outside of the `run` may apply these gradients
        if fused:
            self._write_step(event)
            return
        if event.get("reduced"):
            runs = [run for _, pending in sorted(self._pending.items()) for run in pending]
            self._pending.clear()
            event |= join_applied(self._taped.take(event["optimizer"]) or runs)
            self._write_step(event)
            return
        self._rowless[replica] = event
        if self._is_beyond(event["step"] + 1):
            self._ask_once()
        if self._is_beyond(event["step"] + 1):
            self._write_step(self._rowless.pop(replica))

    def _write_step(self, event: dict[str, Any]) -> None:
        self.write(event)
        self._last[event["replica"]] = event
        if event.get("free"):
            return
        if event["replica"] == min(self._last):
            self._send({"event": "progress", "step": event["step"] + 1})
            for action in self.at_step:
                action()
        self._notice_end(event["optimizer"])

    def _is_beyond(self, step: int) -> bool:
        """Return whether a step, counted from 0, comes after the last wanted one."""
        return self._wanted is not None and step >= self._wanted

    def _ask_once(self) -> None:
        """Learn which step is the last wanted one. Nothing that comes meanwhile is lost: it waits to be handled."""
        if self._ask is not None:
            ask, self._ask = self._ask, None
            self._wanted = ask()

    def _notice_end(self, optimizer: str) -> None:
        if self._has_all(optimizer):
            self._ask_once()
        if self._has_all(optimizer):
            self.has_reached_last = True
            self.close("steps")
            self._send({"event": "reached", "step": self._wanted})

    def _has_all(self, optimizer: str) -> bool:
        """Return whether all replicas of this host have made the last wanted step, for the first time."""
        if self._wanted is None or self.has_reached_last:
            return False
        left = self._wanted - self.made_before.get(optimizer, 0) + self._waits(optimizer)
        done = [replica for (name, replica), count in self._counts.items() if name == optimizer and count >= left]
        return len(done) >= self.local_replicas or any(self._last[r].get("reduced") for r in done if r in self._last)

    def _waits(self, optimizer: str) -> bool:
        """Return whether the next step will record the variables after the last one."""
        return any(name == optimizer for name, _ in self._outside.values())

    def close(self, reason: str) -> None:
        """Write what is held back, the final weights and the end."""
        for event in self._rowless.values():
            self.write(event)
        self._rowless.clear()
        for action in self.at_end:
            action()
        for replica, event in sorted(self._last.items()):
            self.write({"event": "final", "replica": replica, "variables": event["weights"]})
        self.write({"event": "end", "reason": reason})

    def _run(self, record: Record) -> None:
        """Process a `Strategy.run` without an apply: examples of a step made elsewhere, or an evaluation."""
        replica = record.about["replica"]
        run = self._inputs(record)
        rowless = self._rowless.pop(replica, None)
        if rowless is not None:
            self._write_step(rowless | run)
            return
        for evaluation in self._pending.pop(replica, []):  # runs without a following apply
            self.write({"event": "evaluation", "replica": replica, "rows": evaluation.get("rows", [])})
        objectives = _objective(record)
        run |= {"draws": _draws(record), "replica": replica, **objectives}
        if record.about.get("taped"):
            self._taped.add(replica, run, record.about.get("kept_by"))
        else:
            self._pending.setdefault(replica, []).append(run)

    def _report(self, record: Record) -> None:
        about = record.about
        value = float(np.sum(record.values[0][1], dtype=np.float64))
        self.report(about["kind"], about["name"], value, {name: about[name] for name in ("line", "how") if name in about})

    def report(self, kind: str, name: str, value: float, more: Mapping[str, str] | None = None) -> None:
        """Write a number the program reports, and what more is known of it; the same name again is the next step."""
        step = self._reported[name]
        self._reported[name] += 1
        if self._wanted is None or step < self._wanted * MOST_RUNS:  # a number may be reported for each run
            number = {"step": step, "made": self.num_steps, "value": value, "replica": None, **(more or {})}
            self.write({"event": "report", "kind": kind, "name": name, **number})

    def shared(self, name: str) -> None:
        """Note that a reported name is one replica's part of a value that the program combines, so no report."""
        if name not in self._shared:
            self._shared.add(name)
            self.write({"event": "shared", "name": name})

    def _gradients(self, record: Record) -> dict[str, Any]:
        values = dict(record.values)
        entries: dict[str, Any] = {}
        for key, value in record.values:
            shard = _shard(record, key[1])
            if key[0] == "gradient" and shard is not None:
                entries[key[1]] = self._part(_plain(value), shard, record, TABLE_ELEMENTS)
            elif key[0] == "gradient":
                entries[key[1]] = self._writer.array(_plain(value))
            elif key[0] == "sparse-gradient":
                rows, combined = _combined(values[("sparse-rows", key[1])], value)
                if shard is not None:
                    entries[key[1]] = self._part(_plain(combined), shard, record, TABLE_ELEMENTS, rows)
                    continue
                entry = self._writer.array(_plain(combined), rows=rows)
                entries[key[1]] = entry | {"shape": [int(n) for n in values[("sparse-shape", key[1])]]}
        return entries

    def _sums(self, record: Record, entries: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return, with the last of this host's replicas, the sums of the gradients of which not all elements are kept.

        With them another run can go on from the weights that this one has after the step.
        """
        place, wanted = (record.about["optimizer"], index), 1 if record.about.get("reduced") else self.local_replicas
        count, parts, sums = self._summed.pop(place, (0, set(), {}))
        for key, value in record.values:
            if key[0] == "gradient" and _shard(record, key[1]) is None:
                wide = value.astype(np.promote_types(value.dtype, np.float32), copy=False)
                if key[1] in sums:
                    sums[key[1]] += wide
                else:
                    sums[key[1]] = wide.copy() if wanted > 1 else wide
                parts |= {key[1]} if "stride" in entries[key[1]] else set()
        if count + 1 < wanted:
            self._summed[place] = (count + 1, parts, sums)
            return {}
        fits = parts and self._writer.takes_whole(sum(sums[name].nbytes for name in parts))
        return {"sums": {name: self._writer.array(sums[name], whole=True) for name in sorted(parts)}} if fits else {}

    def _weights(self, record: Record, optimizer: str, index: int) -> dict[str, Any]:
        weights = self._variables(optimizer, index, [pair for pair in record.values if pair[0][0] == "weight"], record)
        replica = record.about["replica"]
        self._trained |= {(replica, name): entry["digest"] for name, entry in weights.items() if entry["trainable"]}
        return weights

    def _inputs(self, record: Record) -> dict[str, Any]:
        parts = parts_of({key: value for key, value in record.values if key[0] == "input"})
        places = row_positions({place: num_rows(part) for place, part in enumerate(parts)})
        entry: dict[str, Any] = {"row_inputs": places, "inputs": []}
        for part in parts:
            array = _of_one_size(part["dense"]) if "dense" in part else None
            # Whole where there is room: without its examples no step can be evaluated.
            is_whole = array is not None and self._writer.takes_whole(array.nbytes)
            entry["inputs"].append(None if array is None else self._writer.array(_plain(array), whole=is_whole))
        entry["rows"] = row_names([parts[place] for place in places])
        return entry


def _of_one_size(value: Array) -> Array | None:
    """Return numbers unchanged, and strings padded to the same size; None for strings that would change."""
    if value.dtype != object:
        return value
    if any(not isinstance(text, bytes) or text.endswith(b"\0") for text in value.flat):
        return None
    return value.astype(bytes)


def _without_inputs(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event without examples: only gradients entered."""
    return {"inputs": [], "row_inputs": []} if "inputs" in event else {}


def _objective(record: Record) -> dict[str, Any]:
    values = [value for key, value in record.values if key[0] == "objective"]
    return {"objective": float(sum(float(np.sum(value, dtype=np.float64)) for value in values))} if values else {}


def _draws(record: Record) -> list[str]:
    drawn = [(key[1], digest(value)) for key, value in record.values if key[0] == "draw"]
    return [f"{place}={name}" if isinstance(place, str) else name for place, name in drawn]


def _shard(record: Record, name: Any) -> Shard | None:
    """Return how a variable's table is split over the replicas; None for a whole variable."""
    shard = record.about.get("shards", {}).get(name)
    return None if shard is None else Shard(*shard)


def _digest(value: Value) -> str:
    return value.digest if isinstance(value, Sampled) else digest(value)


def _plain(value: Array) -> Array:
    """Convert bfloat16 to float32: NumPy's files do not support bfloat16."""
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def _combined(rows: Array, values: Array) -> tuple[Array, Array]:
    """Return a sparse gradient with each row once, sorted (TensorFlow repeats rows that were looked up repeatedly)."""
    unique, inverse = np.unique(rows, return_inverse=True)
    combined = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(combined, inverse.reshape(-1), values)
    return unique.astype(np.int64), combined
