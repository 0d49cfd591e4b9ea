"""Detect values of a step, or of the input pipeline, that differ between hosts, because each learned them from its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emulate.probe.held import TABLE
from emulate.probe.trace import Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.columns import shifted_columns
from emulate.verify.lines import made

_DECIDED = ("replicas-missing", "missing-all-reduce", "replicas-disagree", "empty-shard", "nan")
"""After these the arithmetic says nothing of its own."""
_OTHER_ROWS = {"unseeded-randomness", "batch-size", "samples-repeated", "samples-missing", "samples-reordered"}
_OTHER_ROWS |= {"hash-order", "file-order", "unseeded-hosts", "identical-augmentation"}
"""These explain by themselves why rows are not those of one device."""
_MOST = 0.9
"""Beyond this part of the rows hosts have other contents, and not only other rows: those may be shared out by arrays."""


@dataclass(frozen=True)
class _PlaceApart:
    """Describe a place in the step that holds different values on the hosts.

    Attributes:
        place: The line that makes them, their type and shape, as the probe tells them.
        values: By host the values there.
    """

    place: str
    values: Mapping[int, Sequence[str]]

    @property
    def in_words(self) -> str:
        """Return the line, and the values on the first two hosts that differ."""
        line = self.place.partition("|")[0]
        (first, mine), *others = sorted(self.values.items())
        other, theirs = next((host, values) for host, values in others if set(values) != set(mine))
        of_one, of_other = (
            ([v for v in mine if v not in theirs] or mine)[0],
            ([v for v in theirs if v not in mine] or theirs)[0],
        )
        where = f"at {line}" if line else f"in a {'table' if _tables([self]) else 'tensor'} created outside of it"
        return f"{where}: {of_one} on host {first}, {of_other} on host {other}"


def tables_apart(case: Case) -> bool:
    """Return whether the hosts' lookup tables differ while they make examples, which then differ, too."""
    return bool(_tables(_apart(_held(case.untouched, "mapped"))))


def _tables(places: Sequence[_PlaceApart]) -> list[_PlaceApart]:
    return [place for place in places if place.place.split("|")[1] == TABLE]


def _search(case: Case) -> Sign | None:
    return _of_rows(case) or _of_the_step(case)


def _of_rows(case: Case) -> Sign | None:
    """Check for values that make different examples from the same data on each host."""
    ledger = case.ledger
    if ledger is None or ledger.grows or ledger.first_apart is None or any(case.has(code) for code in _OTHER_ROWS):
        return None
    apart = _apart(_held(case.untouched, "mapped"))
    is_foreign = ledger.foreign > _MOST * ledger.samples.seen
    apart = apart if is_foreign else _tables(apart)
    if not apart:
        return _of_columns(case) if is_foreign else None
    line = apart[0].place.partition("|")[0]
    kind = "table" if _tables(apart[:1]) else "number"
    return Sign(
        f"Each host makes its examples with its own {kind}s{f' ({line})' if line else ''}.",
        (
            f"A function of the pipeline uses {apart[0].in_words}; from step {ledger.first_apart} on the examples "
            f"differ from those of one device, and one device has none of {ledger.foreign} of {ledger.samples.seen} "
            "examples"
        ),
        _FROM_ALL,
        places=[line],
    )


def _of_columns(case: Case) -> Sign | None:
    """Check whether each host scales and shifts each column of its examples by numbers of its own."""
    columns = shifted_columns(case.plain, case.untouched)
    if columns is None:
        return None
    return Sign(
        "Each host makes its examples with its own numbers: it has scaled or shifted them by what it knows of its share.",
        f"{columns}; one device has none of {case.ledger.foreign if case.ledger else 0} examples",
        _FROM_ALL,
        blame=(made("examples", "map", "dataset function", "from_tensor_slices"),),
    )


_FROM_ALL = "If the input pipeline uses them"


def _of_the_step(case: Case) -> Sign | None:
    left = case.left()
    if not left or any(case.has(code) for code in _DECIDED):
        return None
    apart = _apart(_held(case.untouched, "held"))
    if not apart:
        return None
    first = left[0].difference()
    of = f" of {first.tensor}" if first.kind in ("gradient", "weight") else f" {first.tensor}"
    case.cut(0, "each host computes with its own numbers")
    lines = list(dict.fromkeys(place.place.partition("|")[0] for place in apart if not place.place.startswith("|")))
    named = f" ({', '.join(lines[:3])}{', ...' if len(lines) > 3 else ''})" if lines else ""
    return Sign(
        f"Each host's step computes with its own numbers{named}.",
        (
            f"The step uses {apart[0].in_words}; from step {first.step} on the {first.kind}{of} differs (error "
            f"{first.error:.2g}, noise floor {first.noise:.2g})"
        ),
        places=lines,
    )


def _held(trace: Trace, by: str) -> dict[int, Mapping[str, Sequence[str]]]:
    """Return, by host, the last values that its steps (`held`) or its pipeline functions (`mapped`) hold."""
    return {host: event.get(by, {}) for host, event in trace.of("program")}


def _apart(held: Mapping[int, Mapping[str, Sequence[str]]]) -> list[_PlaceApart]:
    """Return places that all hosts have, with different values; those with a line of the program first."""
    if len(held) < 2:
        return []
    common = set.intersection(*(set(of_host) for of_host in held.values()))
    places = sorted(common, key=lambda place: (place.startswith("|"), place))
    apart = [_PlaceApart(place, {host: of_host[place] for host, of_host in held.items()}) for place in places]
    return [place for place in apart if len({frozenset(values) for values in place.values.values()}) > 1]


HOST_VALUES = Cause("host-values", _search, blame=(made("examples"),))
