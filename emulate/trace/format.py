"""Read and write the trace: what one run of a program recorded, in files that can be compared elsewhere.

gpudist_core knows such variables, and the `axis`, `rows` and `total_replicas` of each: replica r holds the rows from r *
ceil(rows / total_replicas) on, and what is beyond the last row is padding. Its local gradient is the total of its slice. A part
is written like a sparse gradient: some rows, the axis first, with their numbers in the table. A table in one piece
(`total_replicas` is 1) is one for all replicas, each with its part of the gradient, as of any variable.

A trace is a folder:

    trace.json             what ran: format, topology, program, seed, versions (written before the run)
    host-0/events.jsonl    one JSON object a line, in the order in which things happened on this host
    host-0/arrays.bin      the arrays that the events refer to: little-endian, C order, one after the other

A host that is killed leaves every line written until then; a last line without its end is not read.

An array in an event is `{"at": offset, "dtype": "float32", "shape": [3, 4]}`. Of a large variable, and where the budget did
not allow all of it, `"stride": k` is set and only the elements 0, k, 2k, ... of the flattened array are there. Where any of
its elements is NaN or infinite, it has `"finite": false`. A sparse gradient has `"rows"` (an array of row numbers, unique and
sorted) beside the values of those rows. A slice of a table (`Shard`) is written like it, the split axis first, and has
`"slice": {"of": number of slices, "every": k}`: every k-th row of the table is kept. Where all slices are there they are read
as one table.

Events (every one has `event`):

    strategy     name, replicas (num_replicas_in_sync), local (how many of them on this host)
    initial      replica, variables: {name: {array, digest, trainable}}       before the first step
    program      facts about the program: its optimizers, unsynchronised BatchNormalization, regularised variables
    step         optimizer, step, replica, rows, inputs, row_inputs, gradients, weights, objective, draws, runs, reduced, tape,
                 free, again, outside, function (the number of the function that makes it), sums (over the host's replicas,
                 with the last of them: of gradients that are not kept whole)
    after        replica, variables: what the update has made of them that followed their last step
    state        optimizer, step, replica, variables                         what the step assigned itself, as it left it
    seeded       generator: a global one (python, numpy, tensorflow) that the program seeds itself, before it draws
    streams      streams: {name: {seed, moved, looks}}: generators that the program seeds, and how often each moved on
    evaluation   replica, rows                                               a Strategy.run without an apply
    report       kind (loss or metric), name, step, made, value, replica, line, how: what the program itself reports
    shared       name: what is reported under it is one replica's part of something that the program makes of several
    collective   phase (enter or exit), name, ordinal, replica, step
    final        replica, variables                                          after the last recorded step
    left         replica, variables, changed: those of them that it changed itself when it had made all steps, at its end
    set          variable, value: what the program made between two steps of a variable that their functions read
    result       values: the numbers that a step returns; null where one is not finite
    changed-in-a-graph   variable: the same, function: the one that assigns it, None if it makes no record of a step
    graph        function, replicas (which have this graph), rows, operations, leaves, forward, lines, at: what a step computes
    input        elements and examples that the dataset gave in how many seconds after the first element (of `first` examples),
                 cores: of the machine's CPU; or failure: why that was not measured
    note         code, text
    end          reason: steps (enough were seen), returned, raised
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from emulate.errors import UsageError
from emulate.topology import Topology

FORMAT = "gpudist.trace/1"
STATE_OF = "state of "
"""Begins the name under which a function stands in the place of an optimizer: its label and the variable's name follow."""
SO_FAR = "epoch so far"
"""Before a name: what the epoch would log if it ended here."""
Array = NDArray[Any]


def digest(array: Array) -> str:
    """Return a short hash of an array's exact bits: 64 bits of BLAKE2b over dtype, shape and bytes.

    A large variable has 64 bits of TensorFlow's `Fingerprint` instead, which a step makes in a fraction of the time.
    """
    contents = np.ascontiguousarray(array)
    state = hashlib.blake2b(f"{contents.dtype.str}{contents.shape}".encode(), digest_size=8)
    # bfloat16, which NumPy lends no buffer of, is bytes like any other.
    state.update(contents.reshape(-1).view(np.uint8).data if contents.size else b"")
    return state.hexdigest()


@dataclass(frozen=True)
class StoredArray:
    """Hold an array of a trace, read on request.

    Attributes:
        shape: The shape of the whole array.
        is_finite: Whether all of its elements are, those that were not kept too.
        stride: 1 where all elements were kept, else every stride-th of the flattened array.
        rows: For a sparse gradient the numbers of the rows that are not zero, else None.
        slices: Of how many slices of a table this is one, 0 for a whole array.
        every: 1 where all rows of a table were kept, else every `every`-th.
        parts: The slices that make up a table.
    """

    path: Path
    at: int
    dtype: str
    shape: tuple[int, ...]
    stride: int = 1
    rows: StoredArray | None = None
    slices: int = 0
    every: int = 1
    is_finite: bool = True
    parts: tuple[StoredArray, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether every element was kept."""
        return self.stride == 1 and self.every == 1

    def read(self) -> Array:
        """Return the kept elements: in the array's shape if all were kept, else flat. A sparse array becomes dense."""
        if self.parts:
            whole = self.parts[0].read()
            for part in self.parts[1:]:
                whole += part.read()  # each has zeros where the others have their rows
            return whole
        if self.rows is None:
            kept = self._kept()
            return kept.reshape(self.shape) if self.stride == 1 else kept
        dense = np.zeros(self.shape, self.dtype)
        numbers, values = self.read_rows()
        dense[numbers] = values
        return dense.reshape(-1)[:: self.stride] if self.stride > 1 else dense

    def read_rows(self) -> tuple[Array, Array]:
        """Return the row numbers and the rows of a sparse array."""
        assert self.rows is not None
        numbers = self.rows.read()
        return numbers, self._kept((len(numbers), *self.shape[1:]))

    def _kept(self, shape: tuple[int, ...] | None = None) -> Array:
        size = math.prod(shape if shape is not None else self.shape)
        count = size if shape is not None else -(-size // self.stride)
        try:
            kept = np.fromfile(self.path, self.dtype, count, offset=self.at)
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(
                f"A trace's arrays must be readable. Received: {self.path} ({error}). "
                "Copy the whole folder again, or record another."
            ) from error
        if kept.size != count:
            raise UsageError(
                f"A trace's arrays must be complete. Received: {self.path} ends before byte {self.at + count * kept.itemsize}. "
                "Copy it again, or record another."
            )
        return kept if shape is None else kept.reshape(shape)


@dataclass(frozen=True)
class Variable:
    """Hold one variable's value on one replica: its exact digest, and its elements as far as they were kept."""

    digest: str
    array: StoredArray | None
    trainable: bool = True


@dataclass(frozen=True)
class Step:
    """Describe what one replica did in one training step.

    Attributes:
        rows: Identity of each row of the local batch, in order; None where the program's input was not seen.
        inputs: The arguments of `Strategy.run`, flattened, as far as they were kept.
        gradients: The local gradient of each variable as it entered the optimizer (before clipping and before the sum).
        weights: Each variable after the step.
        objective: What the gradient was taken of: the sum of the local loss, None where no tape was seen.
        draws: Digest of each random draw, in the order in which the step makes them; of one that is for the batch as a whole
            with its place before it, `PLACE=DIGEST`.
        row_inputs: Which of `inputs` are rows of the batch.
        state: Variables that the step assigned itself, neither the model's nor the optimizer's, after the step.
        sums: Of gradients of which a part was kept, the sum over the replicas of this host; with its last replica alone.
        runs: How many runs' gradients were applied together (accumulation).
        taped: Of a step that adds up gradients itself what its tapes gave on this replica.
        reduced: True where `gradients` are already the sum over all replicas (an apply after `Strategy.reduce`).
        again: True where the same call of `Strategy.run` has made an update before.
        outside: Variables that the program changes outside of `Strategy.run`: what they are after the step the next one finds.
    """

    host: int
    replica: int
    optimizer: str
    index: int
    rows: tuple[str, ...] | None = None
    inputs: tuple[StoredArray | None, ...] = ()
    gradients: Mapping[str, StoredArray] = field(default_factory=dict)
    sums: Mapping[str, StoredArray] = field(default_factory=dict)
    weights: Mapping[str, Variable] = field(default_factory=dict)
    objective: float | None = None
    draws: tuple[str, ...] = ()
    row_inputs: tuple[int, ...] = ()
    state: Mapping[str, Variable] = field(default_factory=dict)
    runs: int = 1
    taped: Mapping[str, StoredArray] = field(default_factory=dict)
    reduced: bool = False
    again: bool = False
    outside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Hold one number that the program itself reported.

    Attributes:
        step: How often this host had reported that number before.
        made: How many training steps it had made by then, where that was recorded.
        line: Of what it reduces the line of the program.
        how: `mean` where it was reduced by a mean over the replicas.
    """

    host: int
    kind: str
    name: str
    step: int
    value: float
    replica: int | None = None
    made: int | None = None
    line: str | None = None
    how: str | None = None


class Trace:
    """Read a trace from its folder.

    Args:
        directory: The folder with `trace.json`.

    Raises:
        ValueError: When the folder holds another format.

    Example:
        trace = Trace(Path("traces/1x4"))
        for replica, step in trace.steps("adam")[0].items(): ...
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.about: dict[str, Any] = json.loads((directory / "trace.json").read_text(encoding="utf-8"))
        if not isinstance(self.about, dict):
            raise ValueError(f"A trace.json is a JSON object. Received: {directory} with {self.about!r}.")
        if self.about.get("format") != FORMAT:
            raise ValueError(f"A trace has the format {FORMAT}. Received: {directory} with {self.about.get('format')!r}.")
        self.topology = Topology.parse(self.about["topology"], is_virtual=bool(self.about.get("virtual")))
        self.num_hosts = len(list(directory.glob("host-*")))
        self._files: dict[int, Path] = {}

    @staticmethod
    def describe(directory: Path, about: Mapping[str, Any]) -> None:
        """Write `trace.json`; `about` has at least `topology`."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **about}, indent=1)
        (directory / "trace.json").write_text(text + "\n", encoding="utf-8")

    @cached_property
    def events(self) -> list[tuple[int, dict[str, Any]]]:
        """Return every event with its host's number, host after host."""
        events: list[tuple[int, dict[str, Any]]] = []
        for host in range(self.num_hosts):
            path = self.directory / f"host-{host}" / "events.jsonl"
            if not path.exists():
                continue
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.endswith("\n"):
                        events.append((host, _event(line, f"host-{host}/{path.name}, line {number}")))
        return events

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the events of one kind with their hosts."""
        return [(host, event) for host, event in self.events if event["event"] == kind]

    @cached_property
    def optimizers(self) -> list[str]:
        """Return the names of the optimizers in the order of their first step; `tape` for a loop without one."""
        names = list(dict.fromkeys(event["optimizer"] for _, event in self.of("step")))
        return [name for name in names if name != "tape"] or names

    @cached_property
    def _steps(self) -> dict[str, list[dict[int, Step]]]:
        by_name: dict[str, dict[int, dict[int, Step]]] = {}
        for host, event in self.of("step"):
            step = self._step(host, event)
            by_name.setdefault(step.optimizer, {}).setdefault(step.index, {})[step.replica] = step
        for host, event in self.of("state"):
            replicas = by_name.get(event["optimizer"], {}).get(event["step"], {})
            if event["replica"] in replicas:
                step = replicas[event["replica"]]
                replicas[step.replica] = replace(step, state={**step.state, **self._variables(host, event["variables"])})
        after = {(host, event["replica"]): self._variables(host, event["variables"]) for host, event in self.of("after")}
        in_order = {name: _after_updates([by_index[i] for i in sorted(by_index)], after) for name, by_index in by_name.items()}
        return {name: [_with_tables(step) for step in steps] for name, steps in in_order.items()}

    def steps(self, optimizer: str) -> list[dict[int, Step]]:
        """Return the steps of one optimizer in order, each by replica. The last may lack replicas (a killed host)."""
        return self._steps.get(optimizer, [])

    @property
    def batch(self) -> int | None:
        """Return the number of examples in the first step of all replicas together; None where they were not seen."""
        first = next(iter(self.calls()), {})
        rows = [local.rows for local in first.values()]
        return None if not rows or None in rows else sum(len(of_replica or ()) for of_replica in rows)

    def calls(self) -> list[dict[int, Step]]:
        """Return the steps of all optimizers in order; of several in one call of `Strategy.run` the first.

        Optimizers that are applied outside of it one after the other, to gradients of the same rows, have one call too.
        """
        by_index = {name: {next(iter(step.values())).index: step for step in self.steps(name)} for name in self.optimizers}
        first = min(self.replicas, default=0)
        events = [event for _, event in self.of("step") if event["replica"] == first and event["optimizer"] in by_index]
        calls: list[dict[int, Step]] = []
        for event in events:
            step = by_index[event["optimizer"]][event["step"]]
            before = calls[-1][first] if calls else None
            if not (step[first].again or (before is not None and _is_of_one_call(step[first], before))):
                calls.append(step)
        return calls

    @cached_property
    def follows(self) -> bool:
        """Return whether its optimizers applied another run's gradients."""
        return any(event.get("follows") for _, event in self.of("program"))

    @cached_property
    def has_other_examples(self) -> bool:
        """Return whether its steps were given another run's examples."""
        return any(event.get("replayed") for _, event in self.of("program"))

    @cached_property
    def applies_sums(self) -> bool:
        """Return whether a step applied gradients that were already summed over the replicas or workers."""
        return any(event.get("reduced") for _, event in self.of("step"))

    @cached_property
    def num_steps(self) -> int:
        """Return the number of steps that every replica finished: the maximum over the optimizers."""
        return max(
            (len([s for s in self.steps(name) if len(s) == len(self.steps(name)[0])]) for name in self.optimizers), default=0
        )

    @cached_property
    def replicas(self) -> list[int]:
        """Return the numbers of the replicas that made a step."""
        return sorted({replica for name in self.optimizers for step in self.steps(name) for replica in step})

    def variables(self, when: str) -> dict[tuple[int, int], dict[str, Variable]]:
        """Return the variables `initial`, `final` or `left`, by (host, replica).

        Equal values keep their array on the first only. What is trained begins with what it has then, not before a function of
        the program assigns it.
        """
        variables: dict[tuple[int, int], dict[str, Variable]] = {}
        for host, event in sorted(self.of(when), key=lambda one: str(one[1].get("optimizer")).startswith(STATE_OF)):
            own = variables.setdefault((host, event["replica"]), {})
            for name, variable in self._variables(host, event["variables"]).items():
                if name not in own or (own[name].array is None and own[name].digest == variable.digest):
                    own[name] = variable
        return with_tables(dict(sorted(variables.items())))

    @cached_property
    def reports(self) -> list[Report]:
        """Return what the program reported, host after host. Values that are not finite are NaN or infinite here, too."""
        shared = {event["name"] for _, event in self.of("shared")}
        return [
            Report(host, e["kind"], e["name"], e["step"], float(e["value"]), *map(e.get, ("replica", "made", "line", "how")))
            for host, e in self.of("report")
            if e["name"] not in shared
        ]

    def _step(self, host: int, event: Mapping[str, Any]) -> Step:
        rows = event.get("rows")
        objective = event.get("objective")
        return Step(
            host=host,
            replica=event["replica"],
            optimizer=event["optimizer"],
            index=event["step"],
            rows=None if rows is None else tuple(rows),
            inputs=tuple(self._array(host, entry) for entry in event.get("inputs", ())),
            gradients={n: a for n, e in event.get("gradients", {}).items() if (a := self._array(host, e)) is not None},
            sums={n: a for n, e in event.get("sums", {}).items() if (a := self._array(host, e)) is not None},
            weights=self._variables(host, event.get("weights", {})),
            objective=None if objective is None else float(objective),
            draws=tuple(event.get("draws", ())),
            row_inputs=tuple(event.get("row_inputs", ())),
            runs=event.get("runs", 1),
            taped={n: a for n, e in event.get("taped", {}).items() if (a := self._array(host, e)) is not None},
            reduced=event.get("reduced", False),
            again=event.get("again", False),
            outside=tuple(event.get("outside", ())),
        )

    def _variables(self, host: int, entries: Mapping[str, Any]) -> dict[str, Variable]:
        return {
            name: Variable(entry["digest"], self._array(host, entry.get("array")), entry.get("trainable", True))
            for name, entry in entries.items()
        }

    def _array(self, host: int, entry: Mapping[str, Any] | None) -> StoredArray | None:
        return None if entry is None else self.array(host, entry)

    def array(self, host: int, entry: Mapping[str, Any]) -> StoredArray:
        """Return the array that an event of a host refers to."""
        if host not in self._files:  # a trace has tens of thousands of arrays
            self._files[host] = self.directory / f"host-{host}" / "arrays.bin"
        return StoredArray(
            path=self._files[host],
            at=entry["at"],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            stride=entry.get("stride", 1),
            rows=self._array(host, entry.get("rows")),
            slices=entry.get("slice", {}).get("of", 0),
            every=entry.get("slice", {}).get("every", 1),
            is_finite=entry.get("finite", True),
        )


def _event(line: str, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}, is not JSON: {error}") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError(f"{where}, is not an event")
    return event


def _is_of_one_call(step: Step, before: Step) -> bool:
    """Return whether two optimizers were applied, outside of `Strategy.run`, to the results of one call of it."""
    return step.reduced and before.reduced and step.optimizer != before.optimizer and step.rows == before.rows


def _after_updates(
    steps: list[dict[int, Step]], after: Mapping[tuple[int, int], Mapping[str, Variable]]
) -> list[dict[int, Step]]:
    """Return steps with their variables after the update; for updates outside of `Strategy.run`, from the next step.

    What nobody saw after its last step has no value there.
    """
    later = {place: dict(variables) for place, variables in after.items()}
    in_reverse: list[dict[int, Step]] = []
    for step in reversed(steps):
        replicas = {}
        for replica, local in step.items():
            of_next = later.setdefault((local.host, replica), {})
            updated = {name: of_next.get(name) if name in local.outside else v for name, v in local.weights.items()}
            replicas[replica] = replace(local, weights={name: v for name, v in updated.items() if v is not None})
            for name, variable in local.weights.items():
                of_next.pop(name, None)
                of_next |= {name: variable} if name in local.outside else {}
        in_reverse.append(replicas)
    return in_reverse[::-1]


def _with_tables(step: Mapping[int, Step]) -> dict[int, Step]:
    """Return a step with whole tables in place of slices."""
    ordered = dict(sorted(step.items()))
    weights = with_tables({replica: local.weights for replica, local in ordered.items()})
    gradients = with_gradients({replica: local.gradients for replica, local in ordered.items()})
    return {r: replace(local, weights=weights[r], gradients=gradients[r]) for r, local in ordered.items()}


Key = TypeVar("Key", bound=Hashable)


class Shard(NamedTuple):
    """Describe how a table is split over the replicas.

    gpudist_core knows variables of which each replica holds a slice, and the `axis`, `rows` and `total_replicas` of each:
    replica r holds the rows from r * ceil(rows / total_replicas) on, and what is beyond the last row is padding. Its local
    gradient is the total of its slice. A part is written like a sparse gradient: some rows, the axis first, with their numbers
    in the table. A table in one piece (`total_replicas` is 1) is one for all replicas, each with its part of the gradient, as
    of any variable.
    """

    axis: int
    rows: int
    total_replicas: int

    def span(self, replica: int) -> tuple[int, int]:
        """Return the rows of a replica: the first, and the first after the last."""
        if self.total_replicas == 1:
            return 0, self.rows
        height = -(-self.rows // self.total_replicas)
        return min(self.rows, replica * height), min(self.rows, (replica + 1) * height)


class Part(NamedTuple):
    """Hold what is kept of one replica's slice.

    Attributes:
        values: Some of its rows, the axis first.
        rows: Their numbers, of the table of which every `every`-th row is kept.
        shape: That table's shape.
        every: Which rows are kept: the same on every topology.
    """

    values: Array
    rows: Array
    shape: tuple[int, ...]
    every: int

    def entry(self, shard: Shard) -> dict[str, Any]:
        """Return the fields of an event besides the array."""
        return {"shape": list(self.shape), "slice": {"of": shard.total_replicas, "every": self.every}}


def part_of(value: Array, shard: Shard, replica: int, most: int, rows: Array | None = None) -> Part:
    """Return a replica's slice without its padding, as a part of the table.

    Args:
        value: The slice, or the values of some of its rows.
        shard: How the table is split.
        replica: The replica's number.
        most: About how many elements of the whole table to keep at the most.
        rows: For a sparse gradient the numbers of the rows in the slice, unique and sorted.

    Returns:
        The part.
    """
    start, stop = shard.span(replica)
    first = np.moveaxis(value, shard.axis, 0)
    numbers = start + (np.arange(stop - start) if rows is None else rows)
    first = first[: len(numbers)]
    every = max(1, math.ceil(shard.rows * math.prod(first.shape[1:]) / most))
    mask = (numbers < stop) & (numbers % every == 0)
    shape = (-(-shard.rows // every), *first.shape[1:])
    return Part(np.ascontiguousarray(first[mask]), (numbers[mask] // every).astype(np.int64), shape, every)


def local_slice(table: Array, shard: Shard, replica: int) -> Array:
    """Return a replica's slice of a table with the split axis first, padded with zeros."""
    start, stop = shard.span(replica)
    height = -(-shard.rows // shard.total_replicas)
    padded = np.pad(table[start:stop], [(0, height - (stop - start)), *([(0, 0)] * (table.ndim - 1))])
    return np.moveaxis(padded, 0, shard.axis)


def with_tables(variables: Mapping[Key, Mapping[str, Variable]]) -> dict[Key, dict[str, Variable]]:
    """Return every replica's variables, with whole tables in place of slices. Incomplete tables are left out.

    Args:
        variables: By replica, in the order of the replicas.

    Returns:
        The same with one value for each table, which all replicas have.
    """
    whole = {key: dict(values) for key, values in variables.items()}
    for name in dict.fromkeys(name for values in whole.values() for name, v in values.items() if _is_slice(v.array)):
        parts = {key: v[name] for key, v in whole.items() if name in v and _is_slice(v[name].array)}
        for group in _tables({key: part.array for key, part in parts.items() if part.array is not None}):
            table = assembled([array for key in group if (array := parts[key].array) is not None])
            digest = hashlib.blake2b("".join(parts[key].digest for key in group).encode(), digest_size=8).hexdigest()
            for key in group:
                whole[key].pop(name)
                if table is not None:
                    whole[key][name] = replace(parts[group[0]], digest=digest, array=table)
    return whole


def _tables(parts: Mapping[Key, StoredArray]) -> list[list[Key]]:
    """Return which replicas' parts make up a table: all of them, or each alone if it is in one piece."""
    in_one_piece = any(part.slices == 1 for part in parts.values())
    return [[key] for key in parts] if in_one_piece else [list(parts)]


def with_gradients(gradients: Mapping[Key, Mapping[str, StoredArray]]) -> dict[Key, dict[str, StoredArray]]:
    """Return every replica's gradients. That of a table in slices is on the first replica only, because it is the sum.

    Args:
        gradients: By replica, in the order of the replicas.

    Returns:
        The same without slices.
    """
    whole = {key: dict(values) for key, values in gradients.items()}
    for name in dict.fromkeys(name for values in whole.values() for name, array in values.items() if _is_slice(array)):
        parts = {key: array for key, values in whole.items() if (array := values.pop(name, None)) is not None}
        for group in _tables(parts):
            table = assembled([parts[key] for key in group])
            if table is not None:
                whole[group[0]][name] = table
    return whole


def assembled(parts: Sequence[StoredArray]) -> StoredArray | None:
    """Return the table that its slices make up; None if one is missing."""
    if not parts or len(parts) != parts[0].slices:
        return None
    is_finite = all(part.is_finite for part in parts)
    return replace(parts[0], rows=None, slices=0, is_finite=is_finite, parts=tuple(parts))


def _is_slice(array: StoredArray | None) -> bool:
    return array is not None and array.slices > 0
