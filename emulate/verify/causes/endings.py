"""Runs that did not end well: a host is gone, counts other steps, or asks for something else than its peers."""

from __future__ import annotations

import re

from emulate.verify.case import Case, Outcome
from emulate.verify.causes.cause import Cause, Sign, numbers

_LOST_PEER = re.compile(
    r"Connection reset by peer|tasks are unhealthy|failed to connect to all addresses|Socket closed|GOAWAY|heartbeat",
    re.IGNORECASE,
)
_MISMATCH = re.compile(
    r"Collective instance \d+ expected [^\n\"]*|Shape mismatch in the collective[^\n\"]*"
    r"|[^\n\"]*another member in the group expected[^\n\"]*",
    re.IGNORECASE,
)


def _steps(case: Case) -> dict[int, int]:
    """Steps each host made."""
    found: dict[int, int] = {}
    for host, event in case.untouched.of("step"):
        found[host] = max(found.get(host, 0), int(event["step"]) + 1)
    return found


def _where(case: Case) -> str:
    """What each host was doing, as the hang judge has it, else from the steps and ends."""
    if case.outcome.where:
        return case.outcome.where
    steps = _steps(case)
    made = {host: "1 step" if steps.get(host) == 1 else f"{steps.get(host, 0)} steps" for host in case.outcome.hosts}
    return "; ".join(f"host {host}: {how} after {made[host]}" for host, how in sorted(case.outcome.hosts.items()))


def _gone(outcome: Outcome) -> list[int]:
    """Hosts that left by exit or signal, without an exception of the program."""
    return [host for host, how in sorted(outcome.hosts.items()) if how in ("exited", "killed")]


def _search_exited(case: Case) -> Sign | None:
    outcome, gone = case.outcome, _gone(case.outcome)
    several = case.untouched.topology.num_hosts > 1
    lost_peer = bool(outcome.failure and _LOST_PEER.search(outcome.failure))
    if not several or not (outcome.suspect == "host-exited" or (gone and (outcome.hung == "hang" or outcome.failure))):
        return None
    how = [_how(outcome, host) for host in gone]
    who = f"Host {numbers(gone)} left" if gone else "A host left"
    peers = "; a peer's error says that it lost the connection" if lost_peer else ""
    return Sign(f"{who} ({numbers(how)}) while the others went on and need it." if how else f"{who}.", _where(case) + peers)


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
        "The hosts do not make the same number of steps: some are done while others wait for their gradients.",
        _where(case) + (f" (steps recorded: {counted})" if len(set(steps.values())) > 1 else ""),
    )


def _search_mismatch(case: Case) -> Sign | None:
    said = _MISMATCH.search(case.outcome.failure or "")
    if case.outcome.suspect != "collective-mismatch" and said is None:
        return None
    evidence = f"TensorFlow says: {said.group().strip()}; {_where(case)}" if said else _where(case)
    return Sign(
        "The hosts are in different collectives, or in one with different shapes or types, so none can complete.", evidence
    )


HOST_EXITED = Cause(
    code="host-exited",
    title="a host is gone",
    meaning="One host's process ended (exit, signal, out of memory) while its peers train on. They wait for it in the "
    "next collective, "
    "for ever or until a time limit.",
    evidence="A host's process ended by exit or signal; the live hosts are inside a collective that needs it.",
    fix="Find out why that host left (its output is in the report): sys.exit in a branch of one worker, memory, a "
    "signal. For hosts that "
    "may be lost: tf.distribute.PreemptionCheckpointHandler, and CommunicationOptions(timeout_seconds=...) so that "
    "peers notice.",
    search=_search_exited,
    runs_that_ended=True,
    completed=False,
)

UNEQUAL_STEPS = Cause(
    code="unequal-steps",
    title="hosts with different numbers of steps",
    meaning="A host is through with its data (or stops early) while its peers start another step and wait for it: "
    "shards of "
    "different length, early stopping on a local metric, a step count per host.",
    evidence="Recorded steps of each host, which hosts ended their program, and the collective in which the others wait.",
    fix="Give every host the same number of steps: steps_per_epoch = num_rows // GLOBAL_BATCH_SIZE with "
    "dataset.repeat(), or decide to "
    "stop on a value that was reduced over all replicas.",
    search=_search_unequal,
    runs_that_ended=True,
    completed=False,
)

COLLECTIVE_MISMATCH = Cause(
    code="collective-mismatch",
    title="hosts in different collectives",
    meaning="Collectives pair up in the order in which each host starts them. Code that only one host runs (the "
    "chief's evaluation, "
    "saving or logging with a reduce in it) shifts the order, and each waits for a partner that waits elsewhere.",
    evidence="The collective that each live host is in: their numbers, names or shapes differ and all hosts wait.",
    fix="Run everything that contains a collective (strategy.run, reduce, gather, metrics' results, saving of synchronized "
    "variables) on all hosts; let only the chief write the file. Leave a loop over the data in the same step on all hosts: "
    "what one of them starts after its loop meets what the others still do in theirs.",
    search=_search_mismatch,
    runs_that_ended=True,
    completed=False,
)
