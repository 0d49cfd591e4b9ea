"""Say what virtual replicas can check, and refuse the rest."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.errors import UsageError
from emulate.faults import Fault
from emulate.topology import Topology

NOT_SEEN = (
    "The replicas were virtual: they took turns in one process, and gpudist added up their gradients by arithmetic. Not seen: "
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
