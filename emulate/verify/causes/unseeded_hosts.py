"""Detect hosts that must draw the same random numbers without a common seed."""

from __future__ import annotations

from emulate.probe.trace import Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, error_line
from emulate.verify.compare import compare_enough
from emulate.verify.ledgers import hosts_of_rows, ledgers
from emulate.verify.lines import made
from emulate.verify.result import RunResult

_MOVED = 0.2
"""Fraction of rows that must change their host. At least half do if shares follow the seed, in fixed shares only equal rows."""
_FEWEST = 4
"""Rows seen in both runs that it takes to tell."""
_ONE_SEED = "one seed on all hosts"


def _search(case: Case) -> Sign | None:
    if case.has("unseeded-randomness") or case.has("replicas-missing"):
        return None
    run = case.with_own_seeds
    if run is None:
        return None
    if run.status != "ok" or run.trace is None:
        return ends_otherwise(run, "each host has its own seed.", "With the same seed on all hosts it ends")
    apart = [name for name, ledger in ledgers(case.topology, run.trace).items() if ledger.first_apart is not None]
    if apart:
        return _rows(case, run.trace, apart[0])
    summary = "Each host computes with its own random numbers. The hosts have no common seed."
    return numbers_apart(case, run.trace, summary, f"{agrees_with(case, _ONE_SEED)}With a different seed on each host")


def agrees_with(case: Case, alike: str) -> str:
    """Return a sentence for a run that agrees with one device as long as hosts are alike; empty if it does not.

    Args:
        case: Whose topology's run it is.
        alike: What all hosts have in common in that run.

    Returns:
        The sentence, with a space behind it.
    """
    return "" if case.base.exceeding else f"With {alike} the run agrees with one device. "


def of_later_hosts(case: Case) -> str:
    """Return the words for all hosts except the first."""
    return "of host 1" if case.topology.topology.num_hosts == 2 else "of all hosts except host 0"


def ends_otherwise(run: RunResult, where: str, without: str) -> Sign:
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


def _rows(case: Case, trace: Trace, optimizer: str) -> Sign | None:
    before, own = hosts_of_rows(case.topology, optimizer), hosts_of_rows(trace, optimizer)
    # The first host keeps its seed, and with it its rows: only what the others take tells something.
    others = {row: hosts - {0} for row, hosts in own.items() if hosts - {0}}
    common = [row for row, hosts in before.items() if row in others and len(hosts) == 1]
    moved = sum(1 for row in common if others[row] != before[row])
    if len(common) < _FEWEST:
        case.notes.append(
            "The program does not seed all generators that it uses. With a different seed on each host the examples "
            "differ or have other contents. gpudist did not see whether hosts then train on the same examples. Call "
            "keras.utils.set_random_seed(SEED) at the start of the program to be sure."
        )
        return None
    if moved < _MOVED * len(common):
        case.notes.append(
            "The program does not seed all generators that it uses. With a different seed on each host the examples "
            "of a host come in another order. Every example stays on its host, so none is lost or repeated."
        )
        return None
    return Sign(
        "Each host chooses its examples with its own random numbers. The hosts have no common seed.",
        (
            f"{agrees_with(case, _ONE_SEED)}With a different seed on each host, {moved} of the {len(common)} examples "
            f"{of_later_hosts(case)} are on another host than with one seed. So the same steps use "
            f"{'only ' if len(own) < len(before) else ''}{len(own)} different examples instead of {len(before)}"
        ),
    )


def numbers_apart(case: Case, trace: Trace, summary: str, how: str) -> Sign | None:
    """Check for other numbers from the same examples in a run with different hosts.

    Args:
        case: Whose topology's run it is compared with.
        trace: Of that run.
        summary: What is told then.
        how: In what hosts differ.

    Returns:
        The sign; None where the numbers agree.
    """
    comparison = compare_enough(case.topology, trace, case.noise)
    if comparison.is_equivalent_but_for_kinks or comparison.first is None:
        return None
    first = comparison.first
    what = "losses" if first.kind == "loss" else f"{first.kind}s"
    return Sign(
        summary,
        (
            f"{how}, from the same examples, the {what} differ (first {first.tensor} in step {first.step}: error "
            f"{first.error:.3g}, noise floor {first.noise:.3g})"
        ),
    )


UNSEEDED_HOSTS = Cause(
    "unseeded-hosts", _search, blame=(made("examples", "shuffle", seeded=False), made("examples", "generator", seeded=False))
)
