"""Check which faults a topology can have."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.errors import UsageError
from emulate.faults.fired import Fired
from emulate.faults.values import AtStep, Disconnect, Fault, Link, Missing
from emulate.topology import Topology


def check_for(faults: Sequence[Fault], topology: Topology) -> None:
    """Check that these faults can befall this topology.

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
            raise UsageError(f"A fault must be of a host that is there. {received}, which has {have}. Name one of them.")
        if isinstance(fault, (Link, Disconnect)) and count == 1:
            raise UsageError(f"A link is between hosts. {received}, which has one host. Take a topology with several.")
        if isinstance(fault, Missing) and count == 1:
            raise UsageError(f"Some host must start. {received}, which has one host. Take a topology with several.")
        if isinstance(fault, AtStep) and topology.num_ps:
            raise UsageError(
                f"Steps are counted on hosts that train together. {received}, whose chief hands out the work. "
                "With parameter servers hosts can be missing or late, and links slow."
            )


def check_fired(faults: Sequence[Fault], fired: Sequence[Fired]) -> None:
    """Check that every fault came to pass: a test of a fault that never did tests nothing.

    Args:
        faults: All of a run.
        fired: Those that came to pass.

    Raises:
        UsageError: When one did not.
    """
    there = {one.number for one in fired}
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
            f"A fault must come to pass. Received: fault={str(fault)!r}, which never did: every run is held after "
            f"step {held}. --steps {step} or more, or --steps all, lets the program come there."
        )
    how = (
        "checkpoints of gpudist_core, tf.train and Keras are seen"
        if phase == "checkpoint"
        else "steps are counted by an optimizer of Keras or TensorFlow"
    )
    return (
        f"A fault must come to pass. Received: fault={str(fault)!r}, which never did: the program ended before ({how}). "
        "Name an earlier step or another phase."
    )


def needs_links(faults: Sequence[Fault]) -> bool:
    """Return whether the hosts need links that can be cut and slowed down."""
    return any(isinstance(fault, (Link, Disconnect)) for fault in faults)
