"""Compare what hosts on one machine share and real hosts do not: run again with a difference on each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emulate.probe.trace import Step, Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Sign
from emulate.verify.causes.unseeded_hosts import agrees_with, ends_otherwise, numbers_apart, of_later_hosts
from emulate.verify.compared_runs import complete
from emulate.verify.ledgers import has_ended, hosts_of_rows, ledgers, parts_of_rows
from emulate.verify.result import RunResult

_OTHER = 0.2
"""Fraction of rows that must change their host or contents. If rows depend on the host at least half do, otherwise none."""
_FEWEST = 4
"""Rows seen in both runs, or in a step, that it takes to tell, and steps."""


@dataclass(frozen=True)
class Words:
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
    order: str
    unseen: str


def search(case: Case, run: RunResult | None, places: Sequence[str], words: Words) -> Sign | None:
    """Look for rows of another host, other rows or other numbers.

    Args:
        case: Whose topology's run it is compared with; it is told the notes, and what is undecided.
        run: With each host in its own way; None where there is none.
        places: Where the program's source asks for it.
        words: How it is told.

    Returns:
        The sign; None where nothing depends on it.
    """
    if run is None or case.has("unseeded-randomness") or case.has("replicas-missing"):
        return None
    where = f" ({'; '.join(places[:3])})"
    if run.status != "ok" or run.trace is None:
        return ends_otherwise(run, f"{words.each}{where}.", f"With {words.alike} it ends")
    apart = [name for name, ledger in ledgers(case.topology, run.trace).items() if ledger.first_apart is not None]
    if apart:
        return _rows(case, run.trace, apart[0], where, words)
    return numbers_apart(
        case,
        run.trace,
        f"The computation on a host {words.hangs}{where}.",
        f"{agrees_with(case, words.alike)}With {words.as_real}",
    )


def _rows(case: Case, trace: Trace, optimizer: str, where: str, words: Words) -> Sign | None:
    before, own = hosts_of_rows(case.topology, optimizer), hosts_of_rows(trace, optimizer)
    # The first host is as before, and keeps its rows: only what the others take tells something.
    others = {row: hosts - {0} for row, hosts in own.items() if hosts - {0}}
    common = [row for row in others if row in before]
    moved = [row for row in common if others[row] - before[row]]
    summary = f"Which examples a host takes, or their contents, {words.hangs}{where}."

    def evidence(number: int) -> str:
        told = f"With {words.as_real}, {number} of the {len(others)} examples {of_later_hosts(case)}"
        return f"{agrees_with(case, words.alike)}{told}"

    if len(common) >= _FEWEST and len(moved) >= _OTHER * len(common):
        return Sign(summary, f"{evidence(len(moved))} come from another host's share")
    if len(others) - len(common) < _OTHER * len(others):
        case.notes.append(words.order)
        return None
    mixed = _put_together_otherwise(case.topology, trace, optimizer)
    if mixed >= max(_FEWEST, _OTHER * len(others)):
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
