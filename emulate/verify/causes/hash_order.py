"""Data that hang on how Python hashes strings, which every host does in its own way."""

from __future__ import annotations

from collections.abc import Mapping

from emulate.probe.trace import Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, last_line
from emulate.verify.compare import compare
from emulate.verify.ledger import hosts_of_rows, ledgers

_OTHER = 0.2
"""Of rows that hang on the hashes at least half change their host or their contents; of rows that do not, none does."""


def _search(case: Case) -> Sign | None:
    if case.has("unseeded-randomness") or case.has("replicas-missing"):
        return None
    run = case.with_own_hashes
    if run is None:
        return None
    where = f" ({'; '.join(case.hash_places[:3])})"
    if run.status != "ok" or run.trace is None:
        how = "raises" if run.status == "failed" else "does not end"
        said = last_line(run.failure or run.where, "no error was seen")
        return Sign(
            f"The program {how} where each host hashes strings in its own way, as real hosts do{where}.",
            f"With the same hashes on all hosts it ends: {said}",
        )
    apart = [name for name, ledger in ledgers(case.topology, run.trace).items() if ledger.first_apart is not None]
    return _rows(case, run.trace, apart[0], where) if apart else _numbers(case, run.trace, where)


def _rows(case: Case, trace: Trace, optimizer: str, where: str) -> Sign | None:
    one, own = (_of_later_hosts(hosts_of_rows(of, optimizer)) for of in (case.topology, trace))
    unknown = [row for row in own if row not in one]
    moved = [row for row in own if row in one and own[row] != one[row]]
    if len(moved) + len(unknown) < _OTHER * len(own):
        case.notes.append(
            "The order of a set of strings, or a hash, decides in which order a host takes its rows: every row stays with its "
            "host, so none is lost or seen too often."
        )
        return None
    return Sign(
        "Which rows a host takes, or what is in them, depends on how Python hashes strings, and every host does so in its own "
        f"way{where}.",
        f"With hosts that hash as real ones do, of {len(own)} rows that hosts after the first take {len(moved)} come from "
        f"another host's share and {len(unknown)} are none that they have where all hash alike",
    )


def _of_later_hosts(rows: Mapping[str, set[int]]) -> dict[str, set[int]]:
    """The first host hashes as before, and keeps its rows."""
    return {row: hosts - {0} for row, hosts in rows.items() if hosts - {0}}


def _numbers(case: Case, trace: Trace, where: str) -> Sign | None:
    found = compare(case.topology, trace, case.noise)
    if found.is_equivalent_but_for_kinks or found.first is None:
        return None
    first = found.first
    return Sign(
        f"What hosts compute depends on how Python hashes strings, and every host does so in its own way{where}.",
        f"With hosts that hash as real ones do, on the same rows, the {first.kind}s differ (first {first.tensor} in step "
        f"{first.step}: {first.error:.3g} apart, noise {first.noise:.3g})",
    )


HASH_ORDER = Cause(
    code="hash-order",
    title="each host orders a set of strings in its own way",
    meaning="Python hashes strings with a seed that each process draws for itself, so the order of a set of strings, and "
    "hash() of one, are others on every host: words and classes are numbered differently, files are dealt out twice or to "
    "nobody, without an error.",
    evidence="Where the program's own files make sets or ask for hashes, it is run once more on hosts whose Python hashes "
    "in their own ways (the first as before): rows of the others are taken from another host's share or are none that were "
    "there before, or gradients, weights or reports differ.",
    fix="Sort before you number or deal out: sorted(set(words)); for a number that belongs to a string take zlib.crc32 or "
    "hashlib, not hash(). Or set PYTHONHASHSEED=0 in the environment of every host, which gpudist then takes as it is.",
    search=_search,
)
