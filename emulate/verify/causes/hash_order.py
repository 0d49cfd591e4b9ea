"""Data that hang on how Python hashes strings, which every host does in its own way."""

from __future__ import annotations

import numpy as np

from emulate.probe.trace import Step, Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.unseeded_hosts import ends_otherwise, numbers_apart
from emulate.verify.ledger import has_ended, hosts_of_rows, ledgers
from emulate.verify.measure import complete

_OTHER = 0.2
"""Of rows that hang on the hashes at least half change their host or their contents; of rows that do not, none does."""
_FEWEST = 4
"""Rows seen in both runs, or in a step, that it takes to tell."""


def _search(case: Case) -> Sign | None:
    if case.has("unseeded-randomness") or case.has("replicas-missing"):
        return None
    run = case.with_own_hashes
    if run is None:
        return None
    where = f" ({'; '.join(case.hash_places[:3])})"
    if run.status != "ok" or run.trace is None:
        as_real = f"each host hashes strings in its own way, as real hosts do{where}."
        return ends_otherwise(run, as_real, "With the same hashes on all hosts it ends")
    apart = [name for name, ledger in ledgers(case.topology, run.trace).items() if ledger.first_apart is not None]
    if apart:
        return _rows(case, run.trace, apart[0], where)
    summary = f"What hosts compute depends on how Python hashes strings, and every host does so in its own way{where}."
    return numbers_apart(case, run.trace, summary, "With hosts that hash as real ones do")


def _rows(case: Case, trace: Trace, optimizer: str, where: str) -> Sign | None:
    known, own = hosts_of_rows(case.topology, optimizer), hosts_of_rows(trace, optimizer)
    # The first host hashes as before, and keeps its rows: only what the others take tells something.
    others = {row: hosts - {0} for row, hosts in own.items() if hosts - {0}}
    common = [row for row in others if row in known]
    moved = [row for row in common if others[row] - known[row]]
    summary = (
        "Which rows a host takes, or what is in them, depends on how Python hashes strings, and every host does so in its own "
        f"way{where}."
    )
    evidence = f"With hosts that hash as real ones do, of {len(others)} rows that hosts after the first take "
    if len(common) >= _FEWEST and len(moved) >= _OTHER * len(common):
        return Sign(summary, f"{evidence}{len(moved)} come from another host's share")
    if len(others) - len(common) < _OTHER * len(others):
        case.notes.append(_ORDER)
        return None
    evidence += f"{len(others) - len(common)} are none that any host has where all hash alike"
    still = _input_that_stays(case.topology, trace, optimizer)
    if still is not None:
        return Sign(summary, f"{evidence}; input {still + 1} of their steps is the same bit for bit, and others are not")
    if has_ended(case.topology) and has_ended(trace):
        return Sign(summary, f"{evidence}, to the end of the program")
    case.notes.append(_UNSEEN)
    return None


_ORDER = (
    "The order of a set of strings, or a hash, decides in which order a host takes its rows: every row stays with its host, so "
    "none is lost or seen too often."
)
_UNSEEN = (
    "On hosts that hash strings in their own ways, as real ones do, those after the first have other rows: in another order, "
    "so that other ones are seen in these steps, or with other contents. --steps all tells which; sorted(...) of a set, or "
    "PYTHONHASHSEED=0 on every host, makes it sure."
)


def _input_that_stays(one: Trace, other: Trace, optimizer: str) -> int | None:
    """Of the steps of the hosts after the first an input that has the same rows in the same order, where another has not."""
    pairs = [
        (step[replica], again[replica])
        for step, again in zip(complete(one, optimizer), complete(other, optimizer), strict=False)
        for replica in step
        if replica in again and step[replica].host
    ]
    places = set.intersection(*(set(mine.row_inputs) & set(theirs.row_inputs) for mine, theirs in pairs)) if pairs else set()
    return next((place for place in sorted(places) if all(_stays(mine, theirs, place) for mine, theirs in pairs)), None)


def _stays(mine: Step, theirs: Step, place: int) -> bool:
    one, other = mine.inputs[place], theirs.inputs[place]
    if one is None or other is None or not (one.is_complete and other.is_complete) or one.shape != other.shape:
        return False
    rows = one.read()
    return len(rows) >= _FEWEST and len(np.unique(rows, axis=0)) > 1 and bool(np.array_equal(rows, other.read()))


HASH_ORDER = Cause(
    code="hash-order",
    title="each host orders a set of strings in its own way",
    meaning="Python hashes strings with a seed that each process draws for itself, so the order of a set of strings, and "
    "hash() of one, are others on every host: words and classes are numbered differently, files are dealt out twice or to "
    "nobody, without an error.",
    evidence="Where the program's own files make sets or ask for hashes, it is run once more on hosts whose Python hashes "
    "in their own ways (the first as before): rows of the others are taken from another host's share or have other contents, "
    "or gradients, weights or reports differ.",
    fix="Sort before you number or deal out: sorted(set(words)); for a number that belongs to a string take zlib.crc32 or "
    "hashlib, not hash(). Or set PYTHONHASHSEED=0 in the environment of every host, which gpudist then takes as it is.",
    search=_search,
)
