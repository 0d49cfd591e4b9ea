"""Detect runs that failed: a host is gone, counts other steps, or asks for something else than its peers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, numbers
from emulate.verify.lines import made, stopped, stuck
from emulate.verify.outcome import Outcome

_LOST_PEER = re.compile(
    r"Connection reset by peer|tasks are unhealthy|failed to connect to all addresses|Socket closed|GOAWAY|heartbeat",
    re.IGNORECASE,
)
_MISMATCH = re.compile(
    r"Collective instance \d+ expected [^\n\"]*|Shape mismatch in the collective[^\n\"]*"
    r"|[^\n\"]*another member in the group expected[^\n\"]*",
    re.IGNORECASE,
)
NO_THREAD = re.compile(r"[^\n]*(?:pthread_create(?:\(\))? failed|can't start new thread|Thread creation failed)[^\n]*")
"""Errors of TensorFlow, gRPC, Python and OpenMP if the system refuses a new thread."""
_MORE_THREADS = "If the host could not start a thread"


def _steps(case: Case) -> dict[int, int]:
    """Return the number of steps of each host."""
    counts: dict[int, int] = {}
    for host, event in case.untouched.of("step"):
        counts[host] = max(counts.get(host, 0), int(event["step"]) + 1)
    return counts


def _where(case: Case) -> str:
    """Return what each host was doing, from the hang judge or from the steps and ends."""
    if case.outcome.where:
        return case.outcome.where
    steps = _steps(case)
    counts = {host: "1 step" if steps.get(host) == 1 else f"{steps.get(host, 0)} steps" for host in case.outcome.hosts}
    return "; ".join(f"host {host}: {how} after {counts[host]}" for host, how in sorted(case.outcome.hosts.items()))


def _gone(outcome: Outcome) -> list[int]:
    """Return the hosts that left by exit or signal, without an exception of the program."""
    return [host for host, how in sorted(outcome.hosts.items()) if how in ("exited", "killed")]


def _search_exited(case: Case) -> Sign | None:
    return _search_without_threads(case) or _search_left(case)


def _search_without_threads(case: Case) -> Sign | None:
    """Check whether the machine limits threads so that C++ ends a host's process, also one without peers."""
    outcome, gone = case.outcome, _gone(case.outcome)
    said = NO_THREAD.search(outcome.failure or "")
    if said is None or not gone:
        return None
    how = numbers(_how(outcome, host) for host in gone)
    summary = f"Host {numbers(gone)} left ({how}): the system refused to start more threads."
    return Sign(summary, f"its output says: {said.group().strip()}; {_where(case)}", _MORE_THREADS)


def _search_left(case: Case) -> Sign | None:
    outcome, gone = case.outcome, _gone(case.outcome)
    several = case.untouched.topology.num_hosts > 1
    lost_peer = bool(outcome.failure and _LOST_PEER.search(outcome.failure))
    if not several or not (outcome.suspect == "host-exited" or (gone and (outcome.hung == "hang" or outcome.failure))):
        return None
    how = [_how(outcome, host) for host in gone]
    who = f"Host {numbers(gone)} left" if gone else "A host left"
    peers = "; another host reports that it lost the connection" if lost_peer else ""
    return Sign(f"{who} ({numbers(how)}), but the other hosts still need it." if how else f"{who}.", _where(case) + peers)


def _how(outcome: Outcome, host: int) -> str:
    code = outcome.codes.get(host)
    if outcome.hosts.get(host) == "killed":
        return f"killed by signal {-(code or 0)}"
    return f"exit code {code}"


def _search_unequal(case: Case) -> Sign | None:
    steps = _steps(case)
    done = [host for host, how in case.outcome.hosts.items() if how == "returned"]
    by_itself = case.outcome.hung == "hang" and done and len(set(steps.values())) > 1 and not _gone(case.outcome)
    if case.outcome.suspect != "unequal-steps" and not by_itself:
        return None
    counted = ", ".join(f"host {host} {number}" for host, number in sorted(steps.items()))
    return Sign(
        "The hosts do not run the same number of steps: some have finished while others wait for their gradients.",
        _where(case) + (f" (recorded steps: {counted})" if len(set(steps.values())) > 1 else ""),
    )


def _search_order(case: Case) -> Sign | None:
    """Check whether hosts met in collectives of different shapes, each of which all hosts have, equally often."""
    said = _MISMATCH.search(case.outcome.failure or "")
    shapes = set(re.findall(r"shape (\[[\d, ]*\])", said.group())) if said else set()
    collectives = list(case.outcome.collectives.values())
    are_alike = bool(collectives) and all(Counter(of_host) == Counter(collectives[0]) for of_host in collectives)
    by_error = len(shapes) > 1 and are_alike and shapes <= set(map(_shape, collectives[0]))
    if case.outcome.suspect != "collective-order" and not by_error:
        return None
    every = f"every host has collective operations of the shapes {numbers(sorted(shapes))}; " if by_error else ""
    evidence = f"{every}TensorFlow says: {said.group().strip()}; {_where(case)}" if said else _where(case)
    return Sign("The hosts start the same collective operations in different orders.", evidence)


def _shape(name: str) -> str:
    return name[name.find("[") :]


def _search_mismatch(case: Case) -> Sign | None:
    if case.has("collective-order"):
        return None
    said = _MISMATCH.search(case.outcome.failure or "")
    if case.outcome.suspect != "collective-mismatch" and said is None:
        return None
    evidence = f"TensorFlow says: {said.group().strip()}; {_where(case)}" if said else _where(case)
    return Sign(
        "The hosts are in different collective operations, or in one with different shapes or types. None can complete.",
        evidence,
    )


def _suspected(code: str, summary: str) -> Callable[[Case], Sign | None]:
    """Return a search that relies on the hang judge."""

    def search(case: Case) -> Sign | None:
        return Sign(summary, _where(case)) if case.outcome.suspect == code else None

    return search


HOST_EXITED = Cause(
    "host-exited", _search_exited, runs_that_ended=True, completed=False, blame=(made("ending", "exit"), stopped(), stuck())
)

UNEQUAL_STEPS = Cause("unequal-steps", _search_unequal, runs_that_ended=True, completed=False, blame=(stuck(), stopped()))

COLLECTIVE_MISMATCH = Cause(
    "collective-mismatch", _search_mismatch, runs_that_ended=True, completed=False, blame=(stuck(), stopped())
)

COLLECTIVE_ORDER = Cause("collective-order", _search_order, runs_that_ended=True, completed=False, blame=(stuck(), stopped()))

WAITS_FOR_DATA = Cause(
    "waits-for-data",
    _suspected("waits-for-data", "A host waits for data that do not come, and the other hosts wait for it."),
    runs_that_ended=True,
    completed=False,
    blame=(stuck(),),
)

PYTHON_DEADLOCK = Cause(
    "python-deadlock",
    _suspected(
        "python-deadlock", "A host's threads wait for a lock, a queue or an event that none of them can release, fill or set."
    ),
    runs_that_ended=True,
    completed=False,
    blame=(stuck(),),
)
