"""Hosts that must draw the same random numbers, and that nothing seeds alike."""

from __future__ import annotations

from emulate.probe.trace import Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, error_line
from emulate.verify.compare import compare
from emulate.verify.ledgers import hosts_of_rows, ledgers
from emulate.verify.result import RunResult

_MOVED = 0.2
"""Of shares that follow the seed at least half of the rows change their host; of fixed shares none but equal rows."""
_FEWEST = 4
"""Rows seen in both runs that it takes to tell."""


def _search(case: Case) -> Sign | None:
    if case.has("unseeded-randomness") or case.has("replicas-missing"):
        return None
    run = case.with_own_seeds
    if run is None:
        return None
    if run.status != "ok" or run.trace is None:
        return ends_otherwise(run, "each host has a seed of its own.", "With the same seed on all hosts it ends")
    apart = [name for name, ledger in ledgers(case.topology, run.trace).items() if ledger.first_apart is not None]
    if apart:
        return _rows(case, run.trace, apart[0])
    summary = "Hosts compute with random numbers that every host draws for itself, and nothing seeds them."
    return numbers_apart(case, run.trace, summary, "With a seed of its own on each host")


def ends_otherwise(run: RunResult, where: str, without: str) -> Sign:
    """A run in which hosts differ on purpose ends with an error, or does not end.

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
    one, own = hosts_of_rows(case.topology, optimizer), hosts_of_rows(trace, optimizer)
    # The first host keeps its seed, and with it its rows: only what the others take tells something.
    others = {row: hosts - {0} for row, hosts in own.items() if hosts - {0}}
    common = [row for row, hosts in one.items() if row in others and len(hosts) == 1]
    moved = sum(1 for row in common if others[row] != one[row])
    if len(common) < _FEWEST:
        case.notes.append(
            "The program does not seed all that it draws from, and with a seed of its own on each host the rows are others or "
            "have other contents: whether hosts then train on the same rows was not seen. "
            "keras.utils.set_random_seed(SEED) at the program's start makes it sure."
        )
        return None
    if moved < _MOVED * len(common):
        case.notes.append(
            "The program does not seed all that it draws from. With a seed of its own on each host the rows of each host come "
            "in another order; every row stays with its host, so none is lost or seen too often."
        )
        return None
    return Sign(
        "Which rows a host takes depends on a random number that every host draws for itself, and nothing seeds it.",
        f"With a seed of its own on each host {moved} of the {len(common)} rows that hosts after the first take in both runs "
        f"come from another host's share, and {len(own)} different rows are seen in the same steps instead of {len(one)}",
    )


def numbers_apart(case: Case, trace: Trace, summary: str, how: str) -> Sign | None:
    """Other numbers from the same rows in a run in which hosts differ on purpose.

    Args:
        case: Whose topology's run it is compared with.
        trace: Of that run.
        summary: What is told then.
        how: In what hosts differ.

    Returns:
        The sign; None where the numbers agree.
    """
    found = compare(case.topology, trace, case.noise)
    if found.is_equivalent_but_for_kinks or found.first is None:
        return None
    first = found.first
    what = "losses" if first.kind == "loss" else f"{first.kind}s"
    return Sign(
        summary,
        f"{how}, on the same rows, the {what} differ (first {first.tensor} in step {first.step}: {first.error:.3g} "
        f"apart, noise {first.noise:.3g})",
    )


UNSEEDED_HOSTS = Cause(
    code="unseeded-hosts",
    title="each host draws random numbers of its own",
    meaning="The hosts rely on drawing the same random numbers (one shuffled order, of which each takes its part; one random "
    "projection), but the program does not seed them: each host starts from another state, so that rows are seen twice or "
    "never, without an error. gpudist gives all hosts one seed, which hides it.",
    evidence="Where the program does not seed Python, NumPy and TensorFlow itself, it is run once more with another seed on "
    "each host: rows go to other hosts (shares that do not depend on the seed keep theirs), or gradients, weights or reports "
    "differ.",
    fix="Seed every host alike, before anything is drawn:\n"
    "    keras.utils.set_random_seed(SEED)\n"
    "or seed what the shares depend on: dataset.shuffle(n, seed=SEED), numpy.random.default_rng(SEED).permutation(n); or shard "
    "first and shuffle each host's own rows.",
    search=_search,
)
