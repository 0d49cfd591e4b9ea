"""Check that a verification can run: memory, disk space, and what virtual replicas can stand for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from emulate.errors import Unavailable, UsageError
from emulate.faults import Fault
from emulate.recorder import ProbePlan
from emulate.told import Told, told
from emulate.topology import Topology
from emulate.verify.recorded import differing, same_weights
from emulate.verify.result import RunResult
from gpudist_core.machine import free_memory

MIB = 1 << 20
MOST_PER_HOST = ProbePlan.budget
LEAST_PER_HOST = 4 * MIB
HOST_MEMORY = 120 * MIB
"""Memory of a host without its model: TensorFlow's runtime and a first step (four forked hosts: 477 MiB)."""
PARENT_MEMORY = 400 * MIB
_RUNS_BESIDE_TOPOLOGIES = 10  # the reference, its repeat, its noise; some of them replayed
_RUNS_PER_TOPOLOGY = 4


def lack_of_memory(topologies: Sequence[Topology]) -> dict[Topology, Told]:
    """Return why hosts of a topology do not fit into memory together, for each such topology.

    Args:
        topologies: Those to verify.

    Returns:
        What to tell the user, by topology.

    Raises:
        Unavailable: When none fits.
    """
    free = free_memory()
    lacking = {}
    for topology in topologies:
        needed = PARENT_MEMORY + num_processes(topology) * HOST_MEMORY
        if needed > free:
            lacking[topology] = told("lack-of-memory")(
                f"A topology's hosts must fit into memory, about {HOST_MEMORY // MIB} MiB each before the model. Received: "
                f"topology='{topology}', which needs {needed // MIB} MiB, where {free // MIB} MiB are free. "
                "Ask for fewer hosts, or free some memory."
            )
    if len(lacking) == len(topologies):
        raise Unavailable(next(iter(lacking.values())))
    return lacking


def trace_budget(folder: Path, topologies: Sequence[Topology]) -> int:
    """Return how many bytes of arrays each host of each run may keep, so that all traces use at most half of the free disk.

    Args:
        folder: Where the traces will lie.
        topologies: Those to verify.

    Returns:
        Bytes for one host of one run.

    Raises:
        Unavailable: When there is too little space for traces that say anything.
    """
    free = shutil.disk_usage(folder).free
    hosts = _RUNS_BESIDE_TOPOLOGIES + _RUNS_PER_TOPOLOGY * sum(num_processes(topology) for topology in topologies)
    each = free // 2 // hosts
    if each < LEAST_PER_HOST:
        raise Unavailable(
            f"The traces of the runs need at least {2 * hosts * LEAST_PER_HOST // MIB} MiB of free space. Received: "
            f"folder={str(folder)!r} with {free // MIB} MiB free. "
            "Free some, or use a larger disk: TMPDIR, or --traces where it is given."
        )
    return min(MOST_PER_HOST, each)


def num_processes(topology: Topology) -> int:
    """Return the number of processes of a topology: its hosts, plus with parameter servers these and the chief."""
    if topology.is_virtual:
        return 1
    return topology.num_hosts + (topology.num_ps + 1 if topology.num_ps else 0)


NOT_SEEN = told("virtual-replicas")(
    "The replicas were virtual: they took turns in one process, and gpudist added up their gradients itself. Not seen: "
    "hangs, the network, TensorFlow's own collectives, and code that needs one process or device for each replica."
)


def check_virtual(topologies: Sequence[Topology], faults: Sequence[Fault], device: str, all_reduce: str) -> None:
    """Check that virtual replicas can stand for these topologies.

    Args:
        topologies: What is to be verified.
        faults: What is to be injected.
        device: `cpu`, `gpu` or `auto`.
        all_reduce: How real replicas would be summed.

    Raises:
        UsageError: When they cannot.
    """
    for topology in topologies:
        if topology.num_ps:
            raise UsageError(
                f"Virtual replicas have no parameter servers. Received: --virtual with topology={str(topology)!r}. "
                "Leave out one of both."
            )
    if faults:
        raise UsageError(
            f"Faults need real hosts. Received: --virtual with {len(faults)} faults ({faults[0]}). Leave out one of both."
        )
    if device == "gpu":
        raise UsageError("Virtual replicas run on the CPU. Received: --virtual with --device gpu. Leave out one of both.")
    if all_reduce not in ("auto", "ring"):
        raise UsageError(
            f"Virtual replicas are summed in the order of the ring. Received: --virtual with --all-reduce {all_reduce}. "
            "Leave out one of both."
        )


_SAME_AS_LAST = told("asks-for-host")(
    "The program asks for the number of its host. gpudist ran it as host 0 and as host {}: it trains the same."
)


def check_same_hosts(first: RunResult, last: RunResult) -> None:
    """Check that a program that asks for the number of its host trains the same whatever it is told.

    Args:
        first: Its run as host 0. It gets a note.
        last: Its run as the last host.

    Raises:
        UsageError: When the number matters.
    """
    number = first.topology.num_hosts - 1
    assert first.trace is not None
    assert last.trace is not None
    if last.status != "ok":
        difference: str | None = f"ends otherwise: {last.status}"
    else:
        difference = differing(first.trace, last.trace) or (None if same_weights(first.trace, last.trace) else "the weights")
        difference = None if difference is None else f"differs in {difference}"
    if difference is not None:
        raise UsageError(
            "Virtual hosts share one run of the program, so its training must not depend on the number of its host. Received: "
            f"a program that asks for the number (TF_CONFIG, task_id) and as host {number} of {first.topology} {difference}. "
            "Let the strategy shard the data, or verify it without --virtual on fewer hosts."
        )
    first.notes.append(_SAME_AS_LAST.format(number))
