"""Say what virtual replicas can check, and refuse the rest."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.errors import UsageError
from emulate.faults import Fault
from emulate.topology import Topology
from emulate.verify.repeats import differing
from emulate.verify.result import RunResult
from emulate.verify.run_summary import same_weights

NOT_SEEN = (
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
    first.notes.append(
        f"The program asks for the number of its host. gpudist ran it as host 0 and as host {number}: it trains the same."
    )
