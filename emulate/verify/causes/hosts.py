"""Detect what differs between real hosts: seeds, hashes, the order of folders, values that each learned from its share.

Hosts on one machine share more than real hosts do. A further run gives each host its own seed, hashes or listing order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emulate.told import Told, told
from emulate.trace import TABLE, Step, Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import NUMBERS_MEAN_NOTHING, Cause, Sign
from emulate.verify.compared_runs import complete
from emulate.verify.ledgers import has_ended, hosts_of_rows, ledgers, parts_of_rows, shifted_columns
from emulate.verify.lines import made
from emulate.verify.result import RunResult, error_line

_MOVED = 0.2
"""Fraction of rows that must change their host. At least half do if shares follow the seed, in fixed shares only equal rows."""
_FEWEST = 4
"""Rows seen in both runs, or in a step, that it takes to tell, and steps."""
_ONE_SEED = "one seed on all hosts"
_OF_NO_HOST = ("unseeded-randomness", "replicas-missing")
"""Beside these another run with other hosts differs for no reason of its hosts."""


def _search_unseeded(case: Case) -> Sign | None:
    run = case.lab.vary_hosts(case.pair, "seeds")
    if run is None:
        return None
    if run.status != "ok" or run.trace is None:
        return _ends_otherwise(run, "each host has its own seed.", "With the same seed on all hosts it ends")
    apart = [name for name, ledger in ledgers(case.topology, run.trace).items() if ledger.first_apart is not None]
    if apart:
        return _moved_with_seeds(case, run.trace, apart[0])
    summary = "Each host computes with its own random numbers. The hosts have no common seed."
    return _numbers_apart(case, run.trace, summary, f"{_agrees_with(case, _ONE_SEED)}With a different seed on each host")


def _agrees_with(case: Case, alike: str) -> str:
    """Return a sentence for a run that agrees with one device as long as hosts are alike; empty if it does not.

    Args:
        case: Whose topology's run it is.
        alike: What all hosts have in common in that run.

    Returns:
        The sentence, with a space behind it.
    """
    return "" if case.base.exceeding else f"With {alike} the run agrees with one device. "


def _of_later_hosts(case: Case) -> str:
    """Return the words for all hosts except the first."""
    return "of host 1" if case.topology.topology.num_hosts == 2 else "of all hosts except host 0"


def _ends_otherwise(run: RunResult, where: str, without: str) -> Sign:
    """Report that a run with different hosts ends with an error, or does not end.

    Args:
        run: That run.
        where: In what they differ.
        without: What is told of the run in which they do not.

    Returns:
        What is told of it.
    """
    how = "raises" if run.status == "failed" else "does not end"
    said = error_line(run.failure or run.where, "no error was seen")
    return Sign(f"The program {how} where {where}", f"{without}: {said}")


_UNSEEDED_CONTENTS = told("unseeded-hosts-open")(
    "The program does not seed all generators that it uses. With a different seed on each host the examples differ or have "
    "other contents. gpudist did not see whether hosts then train on the same examples. Call "
    "keras.utils.set_random_seed(SEED) at the start of the program to be sure."
)
_NONE_IS_LOST = "Every example stays on its host, so none is lost or repeated."
_UNSEEDED_ORDER = told("order-by-seed")(
    "The program does not seed all generators that it uses. With a different seed on each host the examples of a host come in "
    f"another order. {_NONE_IS_LOST}"
)


def _moved_with_seeds(case: Case, trace: Trace, optimizer: str) -> Sign | None:
    before, own = hosts_of_rows(case.topology, optimizer), hosts_of_rows(trace, optimizer)
    # The first host keeps its seed, and with it its rows: only what the others take tells something.
    others = {row: hosts - {0} for row, hosts in own.items() if hosts - {0}}
    common = [row for row, hosts in before.items() if row in others and len(hosts) == 1]
    moved = sum(1 for row in common if others[row] != before[row])
    if len(common) < _FEWEST:
        case.notes.append(_UNSEEDED_CONTENTS)
        return None
    if moved < _MOVED * len(common):
        case.notes.append(_UNSEEDED_ORDER)
        return None
    return Sign(
        "Each host chooses its examples with its own random numbers. The hosts have no common seed.",
        f"{_agrees_with(case, _ONE_SEED)}With a different seed on each host, {moved} of the {len(common)} examples "
        f"{_of_later_hosts(case)} are on another host than with one seed. So the same steps use "
        f"{'only ' if len(own) < len(before) else ''}{len(own)} different examples instead of {len(before)}",
    )


def _numbers_apart(case: Case, trace: Trace, summary: str, how: str) -> Sign | None:
    """Check for other numbers from the same examples in a run with different hosts.

    Args:
        case: Whose topology's run it is compared with.
        trace: Of that run.
        summary: What is told then.
        how: In what hosts differ.

    Returns:
        The sign; None where the numbers agree.
    """
    comparison = case.compare_with_noise(case.topology, trace)
    if comparison.first is None:
        return None
    first = comparison.first
    what = "losses" if first.kind == "loss" else f"{first.kind}s"
    return Sign(
        summary,
        f"{how}, from the same examples, the {what} differ (first {first.tensor} in step {first.step}: error "
        f"{first.error:.3g}, noise floor {first.noise:.3g})",
    )


UNSEEDED_HOSTS = Cause(
    "unseeded-hosts",
    _search_unseeded,
    unless=_OF_NO_HOST,
    blame=(made("examples", "shuffle", seeded=False), made("examples", "generator", seeded=False)),
)


_MOVED_OR_OTHER = 0.2
"""Fraction of rows that must change their host or contents. If rows depend on the host at least half do, otherwise none."""


@dataclass(frozen=True)
class _Words:
    """Hold the texts for the report.

    Attributes:
        code: Of the cause.
        hangs: What rows and numbers depend on, and on whom: "depends on how ..., and every host ...".
        each: Each host as it is in that run: "each host hashes ..., as real hosts do".
        alike: All of them as they are without: "the same hashes on all hosts".
        as_real: The hosts of that run: "hosts that hash as real ones do".
        order: A note where every row stays with its host.
        unseen: What is missing where that was not seen.
    """

    code: str
    hangs: str
    each: str
    alike: str
    as_real: str
    order: Told
    unseen: Told


def _search_variation(case: Case, what: str, words: _Words) -> Sign | None:
    """Look for rows of another host, other rows or other numbers.

    Args:
        case: Whose topology's run it is compared with; it is told the notes, and what is undecided.
        what: In what each host has its own way: `hashes` or `listing`.
        words: How it is told.

    Returns:
        The sign; None where nothing depends on it.
    """
    run = case.lab.vary_hosts(case.pair, what)
    if run is None:
        return None
    where = f" ({'; '.join(case.lab.places_of(what)[:3])})"
    if run.status != "ok" or run.trace is None:
        return _ends_otherwise(run, f"{words.each}{where}.", f"With {words.alike} it ends")
    apart = [name for name, ledger in ledgers(case.topology, run.trace).items() if ledger.first_apart is not None]
    if apart:
        return _moved_with_variation(case, run.trace, apart[0], where, words)
    return _numbers_apart(
        case,
        run.trace,
        f"The computation on a host {words.hangs}{where}.",
        f"{_agrees_with(case, words.alike)}With {words.as_real}",
    )


def _moved_with_variation(case: Case, trace: Trace, optimizer: str, where: str, words: _Words) -> Sign | None:
    before, own = hosts_of_rows(case.topology, optimizer), hosts_of_rows(trace, optimizer)
    # The first host is as before, and keeps its rows: only what the others take tells something.
    others = {row: hosts - {0} for row, hosts in own.items() if hosts - {0}}
    common = [row for row in others if row in before]
    moved = [row for row in common if others[row] - before[row]]
    summary = f"Which examples a host takes, or their contents, {words.hangs}{where}."

    def evidence(number: int) -> str:
        told = f"With {words.as_real}, {number} of the {len(others)} examples {_of_later_hosts(case)}"
        return f"{_agrees_with(case, words.alike)}{told}"

    if len(common) >= _FEWEST and len(moved) >= _MOVED_OR_OTHER * len(common):
        return Sign(summary, f"{evidence(len(moved))} come from another host's share")
    if len(others) - len(common) < _MOVED_OR_OTHER * len(others):
        case.notes.append(words.order)
        return None
    mixed = _put_together_otherwise(case.topology, trace, optimizer)
    if mixed >= max(_FEWEST, _MOVED_OR_OTHER * len(others)):
        return Sign(summary, f"{evidence(mixed)} combine inputs of different examples of the run with {words.alike}")
    unseen = f"{evidence(len(others) - len(common))} are on no host with {words.alike}"
    still = _input_that_stays(case.topology, trace, optimizer)
    if still is not None:
        return Sign(summary, f"{unseen}; input {still + 1} of their steps is the same bit for bit, other inputs are not")
    if has_ended(case.topology) and has_ended(trace):
        return Sign(summary, f"{unseen}, until the end of the program")
    case.undecided[words.code] = words.unseen
    return None


def _put_together_otherwise(one: Trace, other: Trace, optimizer: str) -> int:
    """Return how many examples of later hosts combine an input of one example with an input of another."""
    rows = set(parts_of_rows(one, optimizer))
    values = [set(column) for column in zip(*rows, strict=True)] if len({len(row) for row in rows}) == 1 else []
    if all(len(column) < len(rows) for column in values):  # labels, say: each tells many rows
        return 0
    others = [row for row in parts_of_rows(other, optimizer, after=0) if len(row) == len(values) and row not in rows]
    return sum(all(part in column for part, column in zip(row, values, strict=True)) for row in others)


def _input_that_stays(one: Trace, other: Trace, optimizer: str) -> int | None:
    """Return an input of later hosts' steps that keeps the same examples in the same order, while another does not."""
    pairs = [
        (step[replica], again[replica])
        for step, again in zip(complete(one, optimizer), complete(other, optimizer), strict=False)
        for replica in step
        if replica in again and step[replica].host
    ]
    places = set.intersection(*(set(mine.row_inputs) & set(theirs.row_inputs) for mine, theirs in pairs)) if pairs else set()
    return next((place for place in sorted(places) if _stays(pairs, place)), None)


def _stays(pairs: Sequence[tuple[Step, Step]], place: int) -> bool:
    """Return whether an input is the same in all steps. Inputs of equal values, such as labels, prove nothing."""
    telling = 0
    for mine, theirs in pairs:
        array, other = mine.inputs[place], theirs.inputs[place]
        if array is None or other is None or not (array.is_complete and other.is_complete) or array.shape != other.shape:
            return False
        rows = array.read()
        if not np.array_equal(rows, other.read()):
            return False
        telling += len(rows) >= _FEWEST and len(np.unique(rows, axis=0)) > 1
    return telling >= min(_FEWEST, len(pairs))


_ORDER = f"{{}} decides in which order a host takes its examples. {_NONE_IS_LOST}"
_OPEN = (
    "data: with {} these hosts have other examples. gpudist could not see whether they only come in another order or have "
    "other contents. Run with --steps all to find out. Use sorted(...) on {} to be sure, or --allow {} to accept it."
)
_OF_HASHES = _Words(
    code="hash-order",
    hangs="depends on how Python hashes strings, and each host hashes in its own way",
    each="each host hashes strings in its own way, as real hosts do",
    alike="the same hashes on all hosts",
    as_real="another hash seed on all hosts but the first, as real hosts have",
    order=told("order-by-hash")(_ORDER.format("The order of a set of strings, or a hash,")),
    unseen=told("hash-order-open")(
        _OPEN.format(
            "another hash seed on all hosts but the first,", "the set, or PYTHONHASHSEED=0 on every host,", "hash-order"
        )
    ),
)


HASH_ORDER = Cause(
    "hash-order",
    lambda case: _search_variation(case, "hashes", _OF_HASHES),
    unless=_OF_NO_HOST,
    blame=(made("examples"),),
)


_OF_LISTINGS = _Words(
    code="file-order",
    hangs="depends on the order in which a folder is listed, and each disk has its own order",
    each="each host lists folders in its own order, as hosts with separate disks do",
    alike="the same order on all hosts",
    as_real="folders listed in another order on all hosts but the first",
    order=told("order-by-listing")(_ORDER.format("The order in which a folder is listed")),
    unseen=told("file-order-open")(
        _OPEN.format("folders listed in another order on all hosts but the first,", "the list", "file-order")
    ),
)


FILE_ORDER = Cause(
    "file-order",
    lambda case: _search_variation(case, "listing", _OF_LISTINGS),
    unless=_OF_NO_HOST,
    blame=(made("examples"),),
)


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
    return bool(_tables(_places_apart(_held(case.untouched, "mapped"))))


def _tables(places: Sequence[_PlaceApart]) -> list[_PlaceApart]:
    return [place for place in places if place.place.split("|")[1] == TABLE]


def _of_examples(case: Case) -> Sign | None:
    """Check for values that make different examples from the same data on each host."""
    ledger = case.ledger
    if ledger is None or ledger.grows or ledger.first_apart is None:
        return None
    apart = _places_apart(_held(case.untouched, "mapped"))
    is_foreign = ledger.foreign > _MOST * ledger.samples.seen
    apart = apart if is_foreign else _tables(apart)
    if not apart:
        return _of_columns(case) if is_foreign else None
    line = apart[0].place.partition("|")[0]
    kind = "table" if _tables(apart[:1]) else "number"
    return Sign(
        f"Each host makes its examples with its own {kind}s{f' ({line})' if line else ''}.",
        f"A function of the pipeline uses {apart[0].in_words}; from step {ledger.first_apart} on the examples "
        f"differ from those of one device, and one device has none of {ledger.foreign} of {ledger.samples.seen} "
        "examples",
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
    left, apart = case.left(), _places_apart(_held(case.untouched, "held"))
    if not left or not apart:
        return None
    first = left[0].difference()
    of = f" of {first.tensor}" if first.kind in ("gradient", "weight") else f" {first.tensor}"
    lines = list(dict.fromkeys(place.place.partition("|")[0] for place in apart if not place.place.startswith("|")))
    named = f" ({', '.join(lines[:3])}{', ...' if len(lines) > 3 else ''})" if lines else ""
    return Sign(
        f"Each host's step computes with its own numbers{named}.",
        f"The step uses {apart[0].in_words}; from step {first.step} on the {first.kind}{of} differs (error "
        f"{first.error:.2g}, noise floor {first.noise:.2g})",
        places=lines,
        then=lambda: case.cut(0, "each host computes with its own numbers"),
    )


def _held(trace: Trace, by: str) -> dict[int, Mapping[str, Sequence[str]]]:
    """Return, by host, the last values that its steps (`held`) or its pipeline functions (`mapped`) hold."""
    return {host: event.get(by, {}) for host, event in trace.of("program")}


def _places_apart(held: Mapping[int, Mapping[str, Sequence[str]]]) -> list[_PlaceApart]:
    """Return places that all hosts have, with different values; those with a line of the program first."""
    if len(held) < 2:
        return []
    common = set.intersection(*(set(of_host) for of_host in held.values()))
    places = sorted(common, key=lambda place: (place.startswith("|"), place))
    apart = [_PlaceApart(place, {host: of_host[place] for host, of_host in held.items()}) for place in places]
    return [place for place in apart if len({frozenset(values) for values in place.values.values()}) > 1]


OF_EXAMPLES = Cause("host-values", _of_examples, unless=_OTHER_ROWS, blame=(made("examples"),))
OF_THE_STEP = Cause("host-values", _of_the_step, unless=NUMBERS_MEAN_NOTHING, blame=(made("examples"),))
