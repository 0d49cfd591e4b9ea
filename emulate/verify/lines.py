"""Find lines of the user's program: those to blame, and those whose result depends on the number of replicas.

A cause declares where it looks: `blame=(operations("loss", "mean"), made("examples", "batch"))`. The first query that finds
something tells the stage and the lines. Where none does, nothing is told. `step_graph` compares the graph of a step on one
device with that on each replica.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emulate.grouping import grouped
from emulate.program import lines_of_traceback, lines_that_change_state, lines_that_return
from emulate.trace import Trace
from emulate.verify.result import Outcome
from emulate.verify.verdict import Location, StepGraph

MOST = 5
"""So many lines a finding has at most; the first is the one that is most likely to blame."""
_PLACE = re.compile(r"^(?P<name>.+?)(?:, line |:)(?P<line>\d+)$")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Blame:
    """Say where the lines of a cause are looked for.

    Attributes:
        stage: The stage of the step.
        find: Returns the lines' records, the one most likely to blame first.
    """

    stage: str
    find: Callable[[ProgramLines], Sequence[Record]]


class ProgramLines:
    """Read what traces, and the end of a run, say of the user's lines.

    Args:
        *traces: The judged run, then the reference.
        outcome: How the judged run ended.
    """

    def __init__(self, *traces: Trace, outcome: Outcome | None = None) -> None:
        self._traces = traces
        self.outcome = outcome or Outcome()

    def of(self, stage: str) -> list[Record]:
        """Return the records of a stage's lines: those of the program's own operations first, then of calls to libraries."""
        records = [
            entry
            for trace in self._traces
            for _, event in trace.of("lines")
            for entry in event["stages"].get(stage, ())
            if _trains(event)
        ]
        return sorted(records, key=lambda entry: bool(entry.get("called")))

    def made(self, *kinds: str, **about: object) -> list[Record]:
        """Return the records of calls that make something: the kinds in this order, the last call first.

        Those of libraries count where the program itself makes none of the kind.
        """
        events = [event for trace in self._traces for _, event in trace.of("made")]
        alike = [event for event in events if all(event.get(name) == value for name, value in about.items())]
        by_kind = [[event for event in reversed(alike) if event["kind"] == kind] for kind in kinds]
        own = [[event for event in calls if not event.get("called")] or calls for calls in by_kind]
        return [event["line"] for calls in own for event in calls]

    def made_apart(self, *kinds: str, **about: object) -> list[Record]:
        """Return the lines of calls that only some hosts of the judged run make, the last call first."""
        judged = self._traces[0]
        alike = [(host, event) for host, event in judged.of("made") if all(event.get(name) == about[name] for name in about)]
        calls = reversed(_by_place(kinds, alike))
        return [of_line[-1][1]["line"] for of_line in calls if len({host for host, _ in of_line}) < judged.num_hosts]

    def seeded_apart(self, *kinds: str) -> list[Record]:
        """Return the lines of calls that get another seed on each host of the judged run."""
        judged = self._traces[0]
        return self._given_apart("seed", kinds, ((host, event) for host, event in judged.of("made")))

    def counted_apart(self, *kinds: str) -> list[Record]:
        """Return the lines of calls that get other numbers in the judged run than on one device."""
        events = ((run, event) for run, trace in enumerate(self._traces) for _, event in trace.of("made"))
        return self._given_apart("count", kinds, events)

    @staticmethod
    def _given_apart(name: str, kinds: Collection[str], events: Iterable[tuple[int, Record]]) -> list[Record]:
        """Return the lines of calls of which each group gives other values for one argument than the others."""
        calls = _by_place(kinds, ((group, event) for group, event in events if event.get(name) is not None))
        values = [grouped((group, event[name]) for group, event in of_line) for of_line in calls]
        are_apart = [len(set(map(frozenset, by_group.values()))) > 1 for by_group in values]
        return [of_line[-1][1]["line"] for of_line, is_apart in zip(calls, are_apart, strict=True) if is_apart]

    @property
    def depends_on_examples_alone(self) -> bool:
        """Return whether no term of one device's loss is without examples, and nothing is added to its gradients."""
        *_, reference = self._traces
        stages = [event["stages"] for _, event in reference.of("lines") if _trains(event)]
        of_loss = [record for stage in stages for record in stage.get("loss", ())]
        is_added = any(stage.get("given") for stage in stages)
        return bool(of_loss) and not is_added and not any("penalty" in record["roles"] for record in of_loss)

    @property
    def rows_meet(self) -> bool:
        """Return whether the program's own loss combines examples with each other, other than by a sum or a mean."""
        return any({"contracts", "mixes"} & record["roles"].keys() for record in self.of("loss") if not record.get("called"))

    def making(self, names: Iterable[str]) -> list[Record]:
        """Return the lines of operations of the reference's graph, by name."""
        *_, reference = self._traces
        events = [event for _, event in reference.of("graph")]
        places = {name: (event, at) for event in events for name, at in zip(event["names"], event["at"], strict=True)}
        found = (places[name] for name in names if name in places)
        return [event["lines"][at] for event, at in found if at is not None]

    def crossings(self) -> list[Record]:
        """Return where a replica takes a tensor of another one."""
        return [event for trace in self._traces for _, event in trace.of("crossing")]

    def at(self, places: Iterable[str]) -> list[Record]:
        """Return the records of places such as `train.py:9` and `train.py, line 9` in files of which lines were recorded."""
        files = {os.path.basename(file): file for file in self._files()}
        matches = [match for place in places if (match := _PLACE.match(place)) and match["name"] in files]
        return [{"file": files[match["name"]], "line": int(match["line"])} for match in matches]

    def _files(self) -> list[str]:
        of_calls = [event["line"]["file"] for trace in self._traces for _, event in trace.of("made")]
        of_steps = [entry["file"] for trace in self._traces for _, event in trace.of("lines") for entry in _entries(event)]
        return [*of_steps, *of_calls]


def _by_place(kinds: Collection[str], events: Iterable[tuple[int, Record]]) -> list[list[tuple[int, Record]]]:
    """Return the events of calls of these kinds, those of one line together."""
    lines = ((event["line"], (group, event)) for group, event in events if event["kind"] in kinds)
    return [*grouped(((line["file"], line.get("cell"), line["line"]), call) for line, call in lines).values()]


def _entries(event: Record) -> list[Record]:
    return [entry for entries in event["stages"].values() for entry in entries]


def _trains(event: Record) -> bool:
    """Return whether the function is a training step, or the event of a report."""
    return "report" in event or bool({"gradient", "update", "given", "assigned"} & set(event["stages"]))


def operations(stage: str, *roles: str) -> Blame:
    """Look for operations of a stage: the roles in this order, the program's own before libraries', the nearest first."""

    def find(lines: ProgramLines) -> list[Record]:
        records = lines.of(stage)
        for is_called in (False, True):
            for role in roles:
                matching = [record for record in records if role in record["roles"] and bool(record.get("called")) is is_called]
                if matching:
                    return sorted(matching, key=lambda record: int(record["roles"][role]))
        return []

    return Blame(stage, find)


def making(stage: str, names: Collection[str]) -> Blame:
    """Look for the lines of operations, by their names in the reference's graph."""
    return Blame(stage, lambda lines: lines.making(names))


def updates_of(*metrics: str) -> Blame:
    """Look for updates of metrics by the names of their variables: `loss/total` is a variable of `loss`."""
    updates = operations("reported", "update")
    return Blame(
        updates.stage,
        lambda lines: [
            record for metric in metrics for record in updates.find(lines) if str(record.get("name")).startswith(f"{metric}/")
        ],
    )


def between(stage: str) -> Blame:
    """Look for all operations of a stage, the program's own before libraries', the nearest to its end first."""
    return Blame(stage, lambda lines: [record for record in lines.of(stage) if "operations" in record])


def made(stage: str, *kinds: str, **about: object) -> Blame:
    """Look for calls that make something: the kinds in this order."""
    return Blame(stage, lambda lines: lines.made(*kinds, **about))


def made_apart(stage: str, *kinds: str, **about: object) -> Blame:
    """Look for calls that only some hosts make."""
    return Blame(stage, lambda lines: lines.made_apart(*kinds, **about))


def seeded_apart(stage: str, *kinds: str) -> Blame:
    """Look for calls that get another seed on each host."""
    return Blame(stage, lambda lines: lines.seeded_apart(*kinds))


def counted_apart(stage: str, *kinds: str) -> Blame:
    """Look for calls that get other numbers than on one device."""
    return Blame(stage, lambda lines: lines.counted_apart(*kinds))


def changes_of_state(stage: str) -> Blame:
    """Look, in the functions that take gradients, for lines that change what outlives their call."""
    return _around_tapes(stage, lines_that_change_state)


def returned(stage: str) -> Blame:
    """Look, in the functions that take gradients, for lines that return a value."""
    return _around_tapes(stage, lines_that_return)


def _around_tapes(stage: str, lines_of: Callable[[str, int], list[int]]) -> Blame:
    def find(lines: ProgramLines) -> list[Record]:
        records = [record for record in lines.of("gradient") if "tape" in record["roles"] and record.get("cell") is None]
        places = [(str(record["file"]), int(record["line"])) for record in records]
        return [{"file": file, "line": number} for file, line in places for number in lines_of(file, line)]

    return Blame(stage, find)


def raised(stage: str = "ending") -> Blame:
    """Look for the program's innermost line in what it raised: where TensorFlow tells it, that which made the operation."""
    return Blame(stage, lambda lines: _innermost(lines.outcome.failure or ""))


def stopped(stage: str = "ending") -> Blame:
    """Look for the program's innermost calls in the tracebacks of what it raised, the shown one's first."""

    def find(lines: ProgramLines) -> list[Record]:
        texts = [lines.outcome.failure or "", *(text for _, text in sorted(lines.outcome.raised.items()))]
        return [record for text in texts for record in _innermost(_calls(text))]

    return Blame(stage, find)


def _calls(traceback: str) -> str:
    """Return the frames of a traceback without the message, which may quote others."""
    _, header, rest = traceback.partition("Traceback (most recent call last):\n")
    return header + "\n".join(itertools.takewhile(lambda line: line.startswith(" "), rest.splitlines()))


def stuck(stage: str = "ending") -> Blame:
    """Look for the program's innermost lines in the stacks of hosts that hung."""
    return Blame(
        stage, lambda lines: [record for _, text in sorted(lines.outcome.stacks.items()) for record in _innermost(text)]
    )


def _innermost(text: str) -> Sequence[Record]:
    return list(lines_of_traceback(text))[-1:]


def locate(
    blame: Sequence[Blame], lines: ProgramLines, places: Sequence[str] = (), tensors: Collection[str] = ()
) -> tuple[str | None, tuple[Location, ...]]:
    """Return the stage and the lines of a finding; no lines where nothing can be said.

    Args:
        blame: Where its cause looks, in this order. Where nothing is found there, all of the first one's stage is taken.
        lines: What the runs recorded of lines.
        places: Lines that the cause itself knows; they come first.
        tensors: The variables that the finding is about: lines that assign them come before others, and of losses those that
            train them count.

    Returns:
        Both.
    """
    named = lines.at(places)
    if named:
        return (blame[0].stage if blame else None), located(named)
    everything = [made(first.stage, *_SOURCES) if first.stage == "examples" else between(first.stage) for first in blame[:1]]
    for candidate in (*blame, *everything):
        found = candidate.find(lines)
        found = [record for record in found if not {*tensors}.isdisjoint(record.get("of", tensors))] or found
        if locations := located(sorted(found, key=lambda record: record.get("name") not in tensors)):
            return candidate.stage, locations
    return (blame[0].stage if blame else None), ()


_SOURCES = ("dataset function", "from_generator", "from_tensor_slices", "from_tensors", "distribute")
"""Calls that decide which examples a host has, where no other one does."""


def located(records: Iterable[Record]) -> tuple[Location, ...]:
    """Return records as locations, each line once."""
    return tuple(dict.fromkeys(map(_location, records)))[:MOST]


def _location(record: Record) -> Location:
    file, line = str(record["file"]), int(record["line"])
    text = record.get("text") or linecache.getline(file, line).strip()
    return Location(_shown(file), line, str(text), record.get("cell"))


def _shown(file: str) -> str:
    """Return a path relative to the current folder where the file is in it."""
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative


_EXAMPLES, _NUMBER, _SUM = "the number of examples", "the number of the replica", "a sum over the replicas"
"""Two graphs may differ in these."""
Line = Mapping[str, Any]
Pair = tuple[int | None, int | None]


class _Graph:
    """Read the description of a step's graph from its event.

    Args:
        event: What the probe has written.
    """

    def __init__(self, event: Mapping[str, Any]) -> None:
        self.replica, self.rows = int(event["replicas"][0]), list(event["rows"])
        self.operations, self.leaves = event["operations"], event["leaves"]
        self.forward = int(event["forward"])
        self.lines: list[Line | None] = [None if at is None else event["lines"][at] for at in event["at"]]

    def kind(self, place: int) -> tuple[Any, ...]:
        """Return the pass, line, type and attributes of an operation, and how many inputs it takes."""
        line, (name, attributes, inputs) = self.lines[place] or {}, self.operations[place]
        where = place < self.forward, line.get("file"), line.get("cell"), line.get("line")
        return *where, name, attributes, len(inputs)


@dataclass
class _GraphPair:
    """Compare two graphs.

    Attributes:
        names: What they are graphs of, in words.
        apart: (line, text) of each operation that differs.
        besides: What may differ and does, with the lines of the operations.
    """

    first: _Graph
    other: _Graph
    names: tuple[str, str]
    apart: list[tuple[Line | None, str]] = field(default_factory=list)
    besides: dict[str, list[Line]] = field(default_factory=dict)
    _met: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))

    def __post_init__(self) -> None:
        pairs = self._pairs_apart()
        # The backward pass has other operations wherever the forward pass has them.
        forward = [(a, b) for a, b in pairs if (a or 0) < self.first.forward and (b or 0) < self.other.forward]
        self.apart += [self._text(*pair) for pair in forward or pairs]

    def _pairs_apart(self) -> list[Pair]:
        """Return the places of operations that differ; None for that of one that only the other graph has."""
        first, other = ([operation[:2] for operation in graph.operations] for graph in (self.first, self.other))
        if first == other:
            return [(place, place) for place in range(len(first)) if not self._agree(place, place, exactly=True)]
        groups: dict[Any, tuple[list[int], list[int]]] = {}
        for which, graph in enumerate((self.first, self.other)):
            for place in range(len(graph.operations)):
                groups.setdefault(graph.kind(place), ([], []))[which].append(place)
        left: list[Pair] = []
        for places, others in groups.values():
            left += itertools.zip_longest([place for place in places if not self._finds_equal(place, others)], others)
        return sorted(left, key=lambda pair: None not in pair)  # others may differ by taking what one graph has alone

    def _finds_equal(self, place: int, others: list[int]) -> bool:
        """Remove the first of some operations that agrees with this one. Return whether there is any."""
        equal = next((at for at in others if self._agree(place, at)), None)
        if equal is not None:
            others.remove(equal)
        return equal is not None

    def _agree(self, place: int, at: int, *, exactly: bool = False) -> bool:
        """Return whether two operations take the same: from the same operations, or from some of the same type."""
        reasons = []
        for source, another in zip(self.first.operations[place][2], self.other.operations[at][2], strict=True):
            if len(source) == len(another) == 1:
                reasons.append(self._besides(source[0], another[0], exactly=exactly))
            elif len(source) == len(another):
                types = self.first.operations[source[0]][0], self.other.operations[another[0]][0]
                is_same = source == another if exactly else types[0] == types[1] and source[1] == another[1]
                reasons.append("" if is_same else None)
            else:  # one device has itself what is a sum on several replicas
                dtype, value = self.first.leaves[source[0]] if len(source) == 1 else self.other.leaves[another[0]]
                reasons.append(_SUM if value is None and dtype not in ("resource", "variant") else None)
        if None in reasons:
            return False
        line = self.other.lines[at]
        for besides in filter(None, reasons if line else ()):
            self.besides.setdefault(besides, []).append(line or {})
        return True

    def _besides(self, leaf: int, leaf_of_other: int, *, exactly: bool) -> str | None:
        """Return what two leaves may differ in; empty where they are equal, None where they may not."""
        (dtype, value), (dtype_of_other, value_of_other) = self.first.leaves[leaf], self.other.leaves[leaf_of_other]
        if "number" in (value, value_of_other):
            own = ("number", [self.first.replica]), ("number", [self.other.replica])
            return _NUMBER if value in own[0] and value_of_other in own[1] else None
        if (dtype, value) == (dtype_of_other, value_of_other):
            return "" if value is not None or not exactly or self._is_same_tensor(leaf, leaf_of_other) else None
        are_lists = isinstance(value, list) and isinstance(value_of_other, list)
        if dtype != dtype_of_other or not are_lists:
            return None
        if len(value) != len(value_of_other):  # of equal elements the number may be that of the examples
            return _EXAMPLES if len({*value, *value_of_other}) == 1 else None
        apart = [pair for pair in zip(value, value_of_other, strict=True) if pair[0] != pair[1]]
        if all(pair == (self.first.replica, self.other.replica) for pair in apart):
            return _NUMBER
        return _EXAMPLES if all(map(self._counts_examples, apart)) else None

    def _is_same_tensor(self, leaf: int, leaf_of_other: int) -> bool:
        """Return whether each leaf has stood for the other one, and no third, so far."""
        first, other = self._met
        return first.setdefault(leaf, leaf_of_other) == leaf_of_other and other.setdefault(leaf_of_other, leaf) == leaf

    def _counts_examples(self, pair: tuple[Any, Any]) -> bool:
        """Return whether two numbers are the same multiple of the replicas' examples."""
        if not all(isinstance(number, (int, float)) for number in pair):
            return False
        sizes = itertools.product(self.first.rows, self.other.rows)
        return any(pair[0] % size == 0 and pair[0] // size == pair[1] / another > 0 for size, another in sizes)

    def _text(self, place: int | None, at: int | None) -> tuple[Line | None, str]:
        """Return the line and the text of an operation of the first graph and of one of the other."""
        if place is None:
            assert at is not None
            return self.other.lines[at], f"{self.other.operations[at][0]} only on {self.names[1]}"
        (kind, _, inputs), line = self.first.operations[place], self.first.lines[place]
        if at is None:
            return line, f"{kind} only on {self.names[0]}"
        for source, another in zip(inputs, self.other.operations[at][2], strict=True):
            if len(source) == len(another) == 1:
                values = [self.other.leaves[another[0]][1], self.first.leaves[source[0]][1]]
                if values[0] != values[1] and all(isinstance(value, list) and len(value) == 1 for value in values):
                    ours, theirs = (f"{value:g}" if isinstance(value, (int, float)) else str(value) for (value,) in values)
                    return line, f"{kind}: {ours} on {self.names[1]}, {theirs} on {self.names[0]}"
        return line, kind


def step_graph(reference: Trace, topology: Trace, num_replicas: int) -> StepGraph | None:
    """Say whether the step of a run depends on the number of replicas.

    Args:
        reference: The program's run on one device.
        topology: Its run on several replicas.
        num_replicas: How many.

    Returns:
        The result; None where the graph of a step is not known for the reference and for every replica.
    """
    alone = {event["function"]: event for _, event in reversed(reference.of("graph"))}
    events = [event for _, event in topology.of("graph")]
    functions = dict.fromkeys(event["function"] for event in events)
    if not functions or functions.keys() != alone.keys() or num_replicas < 2:
        return None
    replicas: list[_GraphPair] = []
    numbers: list[_GraphPair] = []
    for function in functions:
        own = [event for event in events if event["function"] == function]
        # Virtual replicas share one trace.
        if not topology.topology.is_virtual and sum(len(event["replicas"]) for event in own) != num_replicas:
            return None
        first, *others = sorted(map(_Graph, own), key=lambda graph: graph.replica)
        names = [f"replica {graph.replica}" for graph in (first, *others)]
        replicas += [_GraphPair(first, other, (names[0], name)) for other, name in zip(others, names[1:], strict=True)]
        numbers.append(_GraphPair(_Graph(alone[function]), first, ("one device", f"{num_replicas} replicas")))
    return _summary_of_graph(replicas, numbers, num_replicas)


_MOST_NAMED = 2
"""So many operations of a line are named."""


def _summary_of_graph(replicas: Sequence[_GraphPair], numbers: Sequence[_GraphPair], num_replicas: int) -> StepGraph:
    differing = next((graphs for graphs in replicas if graphs.apart), None)
    if differing is not None:
        first, other = differing.names
        text = f"The step is not the same on all replicas: {other} differs from {first} in {_pair_in_words(differing.apart)}."
        return StepGraph(text, same_on_replicas=False, depends_on_number=None, locations=_locations_of_graph(differing.apart))
    apart = [pair for graphs in numbers for pair in graphs.apart]
    if apart:
        alike = f"The graph of the step is the same on one device and on {num_replicas} replicas"
        text = f"{alike}, except in {_pair_in_words(apart)}."
        return StepGraph(text, same_on_replicas=True, depends_on_number=True, locations=_locations_of_graph(apart))
    besides: dict[str, list[Line]] = {}
    for graphs in (*numbers, *replicas):
        for reason, lines in graphs.besides.items():
            besides.setdefault(reason, []).extend(lines)
    same = f"its graph is the same on one device and on each of {num_replicas} replicas"
    text = f"The step does not depend on the number of replicas: {same}"
    without = [_EXAMPLES] if _EXAMPLES in besides else []
    locations: list[Location] = []
    for reason in (kind for kind in (_NUMBER, _SUM) if kind in besides):
        of_reason = located(besides[reason])
        without.append(f"{reason} in {', '.join(location.place for location in of_reason)}")
        locations += of_reason
    text += f", apart from {' and '.join(without)}." if without else "."
    return StepGraph(text, same_on_replicas=True, depends_on_number=False, locations=tuple(dict.fromkeys(locations)))


def _locations_of_graph(apart: Sequence[tuple[Line | None, str]]) -> tuple[Location, ...]:
    return located(line for line, _ in apart if line is not None)


def _pair_in_words(apart: Sequence[tuple[Line | None, str]]) -> str:
    """Return the lines, each with its operations; of many the number."""
    texts: dict[str, list[str]] = {}
    for line, text in apart:
        place = "an operation without a line" if line is None else located([line])[0].place
        if text not in texts.setdefault(place, []):
            texts[place].append(text)
    return ", ".join(
        f"{place} ({', '.join(some) if len(some) <= _MOST_NAMED else f'{len(some)} operations'})"
        for place, some in texts.items()
    )
