"""Compare each step at the weights that the judged run had, however far rounding drives two runs apart.

The reference makes its steps again, evaluated or by another run of the program, and its optimizers apply what this run's have
applied. Its weights stay this run's then but for the rounding of one update, so that each step is compared by itself: its
gradients at the same weights, and what the optimizer makes of the same gradients. What agrees so in every step trains the same
model, however far apart the runs have drifted by rounding; and a mistake of a late step, which would drown in what the steps
before have amplified, stands out.
"""

from __future__ import annotations

from dataclasses import replace

from emulate.probe import Follow, Replay, Trace, refusal
from emulate.probe.facts import Facts
from emulate.verify.aggregation import aggregation
from emulate.verify.judge import Judgement
from emulate.verify.ledgers import ledgers
from emulate.verify.repeats import starts_alike

_AGREES = (
    "rounding errors are amplified, and the weights drift apart{first}. gpudist ran the program on one "
    "device again and applied the gradients of this run. Step by step, at the same weights, gradients and "
    "updates agree"
)
_DIFFERS = (
    "rounding errors are amplified: gpudist compared each step at the same weights, on one device that "
    "applies the gradients of this run"
)


def follow(reference: Trace, topology: Trace) -> Follow | None:
    """Return what makes a reference follow a run; None if no optimizer applies gradients, or servers do it."""
    both = [name for name in topology.optimizers if name in reference.optimizers]
    applied = [name for name in both if not _is_of_tape(topology, name)]
    if not applied or topology.topology.num_ps:
        return None
    return Follow(topology.directory, tuple(name for name in applied if aggregation(topology, reference, name) == "mean"))


def lead(reference: Trace, topology: Trace, plain: Trace) -> tuple[Follow, Replay | None] | None:
    """Return what gives the steps of a reference the weights and the examples of a run.

    Args:
        reference: In the variation that is compared; its steps are evaluated.
        topology: The run.
        plain: The unchanged reference, whose examples are those of the program.

    Returns:
        Whose gradients are applied and, where they differ, whose examples are taken; None where that cannot be evaluated.
    """
    follows = follow(reference, topology)
    if follows is None or refusal(reference) is not None or not _can_lead(topology, reference):
        return None
    compared = ledgers(plain, topology).values()
    if any(ledger.growth > 1 for ledger in compared) or Facts.of(plain, topology).asynchronous:
        return None  # other steps than those of one device
    is_same = bool(compared) and all(ledger.is_same for ledger in compared if ledger.is_known)
    return follows, None if is_same else Replay(topology.directory)


def _can_lead(trace: Trace, reference: Trace) -> bool:
    """Return whether all of each gradient or of its sum was kept, and of first weights that are not those of a reference."""
    first = (v.array for variables in trace.variables("initial").values() for v in variables.values() if v.array is not None)
    if not (starts_alike(reference, trace) or all(array.is_complete for array in first)):
        return False
    steps = (step for name in trace.optimizers for step in trace.steps(name))
    return all(
        name in summed or array.is_complete
        for step in steps
        for summed in [{name for local in step.values() for name in local.sums}]
        for local in step.values()
        for name, array in local.gradients.items()
    )


def _is_of_tape(trace: Trace, optimizer: str) -> bool:
    return any(event.get("tape") for _, event in trace.of("step") if event["optimizer"] == optimizer)


def is_wanted(judgement: Judgement) -> bool:
    """Return whether a second look may tell more: a cause is unknown, or amplified rounding hides gradients."""
    return judgement.is_unexplained or (judgement.is_well and judgement.is_amplified)


def better(judgement: Judgement, followed: Judgement) -> Judgement:
    """Return the judgement that tells more.

    Single units on the other side of a kink stand out here too: what has no known cause then is left to the runs as they came.
    """
    if followed.is_well:
        first = judgement.first_divergence
        since = f" (in {first.tensor} from step {first.step} on)" if first is not None else ""
        return replace(followed, notes=(*followed.notes, _AGREES.format(first=since)))
    if followed.verdict == "divergent" and not followed.has_unexplained:
        return replace(followed, notes=(*followed.notes, _DIFFERS))
    return judgement
