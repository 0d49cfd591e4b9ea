"""Look again at a run whose weights soon differ a lot, by amplified rounding or by a mistake.

The reference runs again, and its optimizers apply what this run's have applied. Its weights stay this run's then but for the
rounding of one update, so that each step is compared by itself: its gradients at the same weights, and what the optimizer makes
of the same gradients. What agrees so in every step trains the same model, however far apart the runs have drifted by rounding;
and a mistake of a late step, which would drown in what the steps before have amplified, stands out.
"""

from __future__ import annotations

from dataclasses import replace

from emulate.probe import Follow, Trace
from emulate.verify.aggregation import aggregation
from emulate.verify.judge import Judgement

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
