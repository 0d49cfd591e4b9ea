"""Runs that did not end well: a host is gone, counts other steps, or asks for something else than its peers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

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
NO_THREAD = re.compile(r"[^\n]*(?:pthread_create(?:\(\))? failed|can't start new thread|Thread creation failed)[^\n]*")
"""What TensorFlow's, gRPC's, Python's and OpenMP's own code says of a thread that the system did not give it."""
_MORE_THREADS = (
    "Allow more threads, which the system counts over all processes of the user or the container: `ulimit -u` (limits.conf, "
    "TasksMax= of systemd), or the pids limit of the container (docker run --pids-limit, podPidsLimit in Kubernetes; "
    "/sys/fs/cgroup/pids.max). Or verify fewer hosts, or fewer topologies in one call: each host needs tens of threads."
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
    return _search_without_threads(case) or _search_left(case)


def _search_without_threads(case: Case) -> Sign | None:
    """The machine let a host start too few threads, which C++ ends the process for; a host without peers too."""
    outcome, gone = case.outcome, _gone(case.outcome)
    said = NO_THREAD.search(outcome.failure or "")
    if said is None or not gone:
        return None
    how = numbers(_how(outcome, host) for host in gone)
    summary = f"Host {numbers(gone)} left ({how}): the system let it start no more threads."
    return Sign(summary, f"its output says: {said.group().strip()}; {_where(case)}", _MORE_THREADS)


def _search_left(case: Case) -> Sign | None:
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


def _search_order(case: Case) -> Sign | None:
    """The hosts met in collectives of different shapes, each of which all of them have, and no host has one more."""
    said = _MISMATCH.search(case.outcome.failure or "")
    shapes = set(re.findall(r"shape (\[[\d, ]*\])", said.group())) if said else set()
    known = list(case.outcome.collectives.values())
    are_alike = bool(known) and all(Counter(one) == Counter(known[0]) for one in known)
    by_error = len(shapes) > 1 and are_alike and shapes <= set(map(_shape, known[0]))
    if case.outcome.suspect != "collective-order" and not by_error:
        return None
    every = f"every host has collectives of the shapes {numbers(sorted(shapes))}; " if by_error else ""
    evidence = f"{every}TensorFlow says: {said.group().strip()}; {_where(case)}" if said else _where(case)
    return Sign("The hosts start the same collectives in different orders, so they do not fit each other.", evidence)


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
        "The hosts are in different collectives, or in one with different shapes or types, so none can complete.", evidence
    )


def _suspected(code: str, summary: str) -> Callable[[Case], Sign | None]:
    """A search that relies on the hang judge."""

    def search(case: Case) -> Sign | None:
        return Sign(summary, _where(case)) if case.outcome.suspect == code else None

    return search


HOST_EXITED = Cause(
    code="host-exited",
    title="a host is gone",
    meaning="One host's process ended (exit, signal, out of memory) while its peers train on. They wait for it in the "
    "next collective, "
    "for ever or until a time limit.",
    evidence="A host's process ended by exit or signal; the live hosts are inside a collective that needs it.",
    fix="Find out why that host left (its output is in the report): sys.exit in a branch of one worker, memory, a "
    "limit on threads, a signal. For hosts that "
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

COLLECTIVE_ORDER = Cause(
    code="collective-order",
    title="hosts start the same collectives in another order",
    meaning="Every host has both collectives, but one starts them the other way round. TensorFlow pairs collectives in the "
    "order in which each host starts them: where shapes differ it raises, else each gets the other's numbers, or waits. Loops "
    "over sets or over the files of a folder, callbacks and threads have no order of their own.",
    evidence="The hosts are at the same number of collectives, in different ones, and each has the other's in its program too.",
    fix="Give what contains a collective the same order on every host: sort the names that a loop goes through (sorted(...) "
    "around sets and os.listdir), and start collectives from one thread.",
    search=_search_order,
    runs_that_ended=True,
    completed=False,
)

WAITS_FOR_DATA = Cause(
    code="waits-for-data",
    title="a host waits for its next batch",
    meaning="A host waits for data that does not come, while its peers wait in a collective for its part of the step: a "
    "generator or queue that is empty on one host, a file or a service that does not answer, a shard that never fills a batch.",
    evidence="For some seconds no host has computed anything; the host named is in no collective but asks for its next batch "
    "(or is in a TensorFlow function that does), where its generator stands, and the collective in which its peers are.",
    fix="Look at what feeds that host, at the line named. Give each host the same number of batches (repeat(), or a sharding "
    "that divides evenly), and a generator an end (a sentinel in the queue) or a time limit.",
    search=_suspected("waits-for-data", "A host waits for data that does not come, and the others wait for it."),
    runs_that_ended=True,
    completed=False,
)

PYTHON_DEADLOCK = Cause(
    code="python-deadlock",
    title="Python threads wait for each other",
    meaning="The program waits for a lock, a queue, an event or a thread that nobody will give, fill, set or end: all threads "
    "of the host wait, and none computes.",
    evidence="For some seconds no host has computed anything; the main thread of the host named waits for another thread (a "
    "lock, a queue, an event), and none of its other threads sleeps, reads, computes or waits for a time only.",
    fix="Look at the stack of that host: which thread is to release, fill, set or end what it waits for? For a queue or an "
    "event, see that a thread of the same host fills or sets it, also where that thread fails (a sentinel in `finally`). Take "
    "locks in one order everywhere, release them with `with`, and never call code that waits (a callback, a collective) while "
    "holding one. Give waits a timeout.",
    search=_suspected(
        "python-deadlock", "A host's threads wait for a lock, a queue or an event that none of them can release, fill or set."
    ),
    runs_that_ended=True,
    completed=False,
)
