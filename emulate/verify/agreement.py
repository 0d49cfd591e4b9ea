"""Check that replicas agree: replicated variables must have the same bits on every replica after every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emulate.probe.trace import Trace, Variable
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll


@dataclass(frozen=True)
class Disagreement:
    """Describe a variable whose value differs between replicas.

    Attributes:
        step: The step after which it differs, -1 for the initial value.
        groups: Who agrees with whom: lists of replicas (for the initial value `host h replica r`).
        tensors: How many variables differ then.
    """

    tensor: str
    step: int
    optimizer: str | None
    groups: tuple[tuple[str, ...], ...]
    tensors: int


@dataclass(frozen=True)
class Agreement:
    """Hold the result; `checked` counts the steps in which at least two replicas could be compared."""

    initial: Disagreement | None
    first: Disagreement | None
    checked: int


def agreement(trace: Trace) -> Agreement:
    """Check a trace. Only trainable variables count: moving statistics and metrics may differ between replicas."""
    initial = trace.variables("initial")
    start = _differing({f"host {host} replica {replica}": values for (host, replica), values in sorted(initial.items())})
    before = _found(start, -1, None) if start else None
    disagreements: list[Disagreement] = []
    checked = 0
    for optimizer in trace.optimizers:
        for k, step in enumerate(complete(trace, optimizer)):
            checked += len(step) > 1
            apart = _differing(_values(step))
            if apart:
                disagreements.append(_found(apart, k, optimizer))
                break
    return Agreement(before, min(disagreements, key=lambda d: d.step) if disagreements else None, checked)


def _values(step: StepOfAll) -> dict[str, Mapping[str, Variable]]:
    return {f"replica {replica}": local.weights for replica, local in sorted(step.items())}


def _differing(values: Mapping[str, Mapping[str, Variable]]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return each variable that differs, with the groups of replicas that agree."""
    groups: dict[str, dict[str, list[str]]] = {}
    for who, variables in values.items():
        for name, variable in variables.items():
            if variable.trainable:
                groups.setdefault(name, {}).setdefault(variable.digest, []).append(who)
    return {name: tuple(tuple(g) for g in by_digest.values()) for name, by_digest in groups.items() if len(by_digest) > 1}


def _found(apart: Mapping[str, tuple[tuple[str, ...], ...]], step: int, optimizer: str | None) -> Disagreement:
    tensor = next(iter(apart))
    return Disagreement(tensor, step, optimizer, apart[tensor], len(apart))
