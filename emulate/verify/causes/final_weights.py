"""Detect wrong weights that the program computes itself after its last step."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers
from emulate.verify.fit import ROUND
from emulate.verify.lines import made
from emulate.verify.measured_final_weights import changed_in_the_end, ends_of_hosts


def _search(case: Case) -> Sign | None:
    left = case.left()
    out = [point for point in left if point.measure.key.kind == "final-weight"]
    if len(out) < len(left):
        return None
    if not out:
        return _hosts_apart(case)
    case.explain(lambda point: point.measure.key.kind == "final-weight")
    names, runs, first = [p.measure.key.tensor for p in out], case.base.runs.as_they_came, out[0]
    changing = [set(changed_in_the_end(trace)) & set(names) for trace in (runs.topology, runs.reference)]
    if not all(changing):
        where = "here, but not on one device" if changing[0] else "on one device, but not here"
        what = f"After the last step the program replaces {names_in_words(names)} {where}."
    else:
        factors = [point.factor for point in out]
        is_one = all(abs(factor - factors[0]) <= ROUND * abs(factors[0]) for factor in factors)
        times = f": it is {factors[0]:.4g}x that" if is_one else ""
        what = f"After the last step the program replaces {names_in_words(names)} by other values than on one device{times}."
    m = first.measure
    return Sign(
        what,
        (
            f"the weights agree after each of the {first.step} steps; at the end {m.key.tensor} is {m.in_print[0]}, "
            f"{m.in_print[1]} on one device ({first.ratio:.0f}x the noise floor)"
        ),
    )


def _hosts_apart(case: Case) -> Sign | None:
    """Check whether the first host's final weights are right and another host's differ."""
    ends = ends_of_hosts(case.untouched)
    apart = [name for name, hosts in ends.items() if len({end for end in hosts.values() if end is not None}) > 1]
    if not apart:
        return None
    by_end: dict[str, list[str]] = {}
    for host, end in ends[apart[0]].items():
        by_end.setdefault(end or "", []).append(f"host {host}")
    groups = numbers([f"({', '.join(hosts[:4])}{', ...' if hosts[4:] else ''})" for hosts in list(by_end.values())[:4]])
    return Sign(
        f"After the last step the hosts replace {names_in_words(apart)} by different values.",
        f"bits of {apart[0]} at the end: {groups} agree only among themselves; after the last step all agreed",
    )


FINAL_WEIGHTS = Cause("final-weights", _search, blame=(made("ending", "restore"),))
