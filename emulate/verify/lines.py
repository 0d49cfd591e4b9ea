"""Find the user's lines to blame, by queries over what a run has recorded of its program.

A cause declares where it looks: `blame=(operations("loss", "mean"), made("examples", "batch"))`. The first query that finds
something tells the stage and the lines. Where none does, nothing is told.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emulate.probe import Trace
from emulate.program import lines_of_traceback, lines_that_change_state
from emulate.verify.verdict import Location

if TYPE_CHECKING:
    from emulate.verify.case import Case

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
    find: Callable[[Case], Sequence[Record]]


class ProgramLines:
    """Read what traces say of the user's lines.

    Args:
        *traces: The judged run, then the reference.
    """

    def __init__(self, *traces: Trace) -> None:
        self._traces = traces

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


def _entries(event: Record) -> list[Record]:
    return [entry for entries in event["stages"].values() for entry in entries]


def _trains(event: Record) -> bool:
    """Return whether the function is a training step, or the event of a report."""
    return "report" in event or bool({"gradient", "update", "given", "assigned"} & set(event["stages"]))


def operations(stage: str, *roles: str) -> Blame:
    """Look for operations of a stage: the roles in this order, the program's own before libraries', the nearest first."""

    def find(case: Case) -> list[Record]:
        records = case.lines.of(stage)
        for is_called in (False, True):
            for role in roles:
                matching = [record for record in records if role in record["roles"] and bool(record.get("called")) is is_called]
                if matching:
                    return sorted(matching, key=lambda record: int(record["roles"][role]))
        return []

    return Blame(stage, find)


def updates_of(metric: str) -> Blame:
    """Look for updates of a metric by the names of its variables: `loss/total` is a variable of `loss`."""
    updates = operations("reported", "update")
    return Blame(
        updates.stage,
        lambda case: [record for record in updates.find(case) if str(record.get("name")).startswith(f"{metric}/")],
    )


def between(stage: str) -> Blame:
    """Look for all operations of a stage, the program's own before libraries', the nearest to its end first."""
    return Blame(stage, lambda case: [record for record in case.lines.of(stage) if "operations" in record])


def made(stage: str, *kinds: str, **about: object) -> Blame:
    """Look for calls that make something: the kinds in this order."""
    return Blame(stage, lambda case: case.lines.made(*kinds, **about))


def seeded_apart(stage: str, *kinds: str) -> Blame:
    """Look for calls that get another seed on each host."""

    def find(case: Case) -> list[Record]:
        seeds: dict[tuple[object, ...], dict[int, set[object]]] = {}
        lines: dict[tuple[object, ...], Record] = {}
        for host, event in case.untouched.of("made"):
            if event["kind"] in kinds and event.get("seed") is not None:
                place = event["line"]["file"], event["line"]["line"]
                lines[place] = event["line"]
                seeds.setdefault(place, {}).setdefault(host, set()).add(event["seed"])
        return [lines[place] for place, by_host in seeds.items() if len(set(map(frozenset, by_host.values()))) > 1]

    return Blame(stage, find)


def changes_of_state(stage: str) -> Blame:
    """Look, in the functions that take gradients, for lines that change what outlives their call."""

    def find(case: Case) -> list[Record]:
        records = [record for record in case.lines.of("gradient") if "tape" in record["roles"] and record.get("cell") is None]
        places = [(str(record["file"]), int(record["line"])) for record in records]
        return [{"file": file, "line": number} for file, line in places for number in lines_that_change_state(file, line)]

    return Blame(stage, find)


def raised(stage: str = "ending") -> Blame:
    """Look for the program's innermost line in what it raised: where TensorFlow tells it, that which made the operation."""
    return Blame(stage, lambda case: _innermost(case.outcome.failure or ""))


def stopped(stage: str = "ending") -> Blame:
    """Look for the program's innermost calls in the tracebacks of what it raised, the shown one's first."""

    def find(case: Case) -> list[Record]:
        texts = [case.outcome.failure or "", *(text for _, text in sorted(case.outcome.raised.items()))]
        return [record for text in texts for record in _innermost(_calls(text))]

    return Blame(stage, find)


def _calls(traceback: str) -> str:
    """Return the frames of a traceback without the message, which may quote others."""
    _, header, rest = traceback.partition("Traceback (most recent call last):\n")
    return header + "\n".join(itertools.takewhile(lambda line: line.startswith(" "), rest.splitlines()))


def stuck(stage: str = "ending") -> Blame:
    """Look for the program's innermost lines in the stacks of hosts that hung."""
    return Blame(stage, lambda case: [record for _, text in sorted(case.outcome.stacks.items()) for record in _innermost(text)])


def _innermost(text: str) -> Sequence[Record]:
    return list(lines_of_traceback(text))[-1:]


def locate(
    blame: Sequence[Blame], case: Case, places: Sequence[str] = (), tensors: Collection[str] = ()
) -> tuple[str | None, tuple[Location, ...]]:
    """Return the stage and the lines of a finding; no lines where nothing can be said.

    Args:
        blame: Where its cause looks, in this order. Where nothing is found there, all of the first one's stage is taken.
        case: What is known of the run.
        places: Lines that the cause itself knows; they come first.
        tensors: The variables that the finding is about: lines that assign them come before others.

    Returns:
        Both.
    """
    named = case.lines.at(places)
    if named:
        return (blame[0].stage if blame else None), located(named)
    for candidate in (*blame, *(_all_of(first.stage) for first in blame[:1])):
        if locations := located(sorted(candidate.find(case), key=lambda record: record.get("name") not in tensors)):
            return candidate.stage, locations
    return (blame[0].stage if blame else None), ()


def _all_of(stage: str) -> Blame:
    """Look for everything that a stage is made by."""
    return made(stage, *_SOURCES) if stage == "examples" else between(stage)


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
