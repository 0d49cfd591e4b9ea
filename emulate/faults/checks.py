"""Check which faults a topology can have."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.errors import UsageError
from emulate.faults.fired import Fired
from emulate.faults.values import AtStep, Disconnect, Fault, Link, Missing
from emulate.topology import Topology


def check_for(faults: Sequence[Fault], topology: Topology) -> None:
    """Check that these faults can be injected into this topology.

    Args:
        faults: All of a run.
        topology: Its shape.

    Raises:
        UsageError: When a fault names a host or a link that is not there.
    """
    count = topology.num_hosts + topology.num_ps + bool(topology.num_ps)
    for fault in faults:
        received = f"Received: fault={str(fault)!r}, topology={str(topology)!r}"
        host = getattr(fault, "host", None)
        if host is not None and host >= count:
            have = "host 0 alone" if count == 1 else f"hosts 0 to {count - 1}"
            raise UsageError(f"The host of a fault must exist. {received}, which has {have}. Name one of them.")
        if isinstance(fault, (Link, Disconnect)) and count == 1:
            raise UsageError(f"A link needs several hosts. {received}, which has one host. Use a topology with several hosts.")
        if isinstance(fault, Missing) and count == 1:
            raise UsageError(
                f"At least one host must start. {received}, which has one host. Use a topology with several hosts."
            )
        if isinstance(fault, AtStep) and topology.num_ps:
            raise UsageError(
                f"A fault in a step needs hosts that train synchronously. {received}, with parameter servers. "
                "Use missing, late or link."
            )


def check_fired(faults: Sequence[Fault], fired: Sequence[Fired]) -> None:
    """Check that every fault came to pass: a test of a fault that never did tests nothing.

    Args:
        faults: All of a run.
        fired: Those that came to pass.

    Raises:
        UsageError: When one did not.
    """
    there = {event.number for event in fired}
    for number, fault in enumerate(faults):
        if number not in there:
            raise UsageError(never_fired(fault))


def never_fired(fault: Fault, held: int | None = None) -> str:
    """Return the message about a fault that did not occur.

    Args:
        fault: The fault.
        held: The step after which its run was held; None where it was not.

    Returns:
        Two sentences or three.
    """
    phase, step = getattr(fault, "phase", ""), getattr(fault, "step", 0)
    if held is not None and step > held:
        return (
            f"A fault must happen. Received: fault={str(fault)!r}, which did not happen: gpudist stops every run after "
            f"step {held}. Use --steps {step} or more, or --steps all."
        )
    how = (
        "gpudist sees checkpoints of gpudist_core, tf.train and Keras"
        if phase == "checkpoint"
        else "gpudist counts the steps of optimizers of Keras and TensorFlow"
    )
    return (
        f"A fault must happen. Received: fault={str(fault)!r}, which did not happen: the program ended before ({how}). "
        "Use an earlier step or another phase."
    )


def needs_links(faults: Sequence[Fault]) -> bool:
    """Return whether the hosts need links that can be cut and slowed down."""
    return any(isinstance(fault, (Link, Disconnect)) for fault in faults)
