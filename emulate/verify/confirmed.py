"""Compare two runs with as few noise runs as say enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emulate.probe.trace import Trace
from emulate.verify.arithmetic import explain
from emulate.verify.compare import Comparison, compare


@dataclass(frozen=True)
class Rerun:
    """Hold runs repeated with one suspect switched off; `confirm` makes noise runs with a larger perturbation.

    Attributes:
        source: The run on one device with its own gradients, where `reference` applies the topology's.
        reported: Makes runs of the program itself, for what it reports between its steps.
    """

    reference: Trace
    topology: Trace
    noise: Sequence[Trace] = ()
    confirm: Callable[[], Sequence[Trace]] = tuple
    source: Trace | None = None
    reported: Callable[[], Sequence[Trace]] = tuple

    def compare(self) -> Comparison:
        """Compare both sides. Look again at gradients that may cancel over the batch, and at late reports."""
        kinks = self.reference.follows
        of_steps = confirmed(self.reference, self.topology, self.noise, self.confirm, self.source, kinks=kinks)
        return with_noise_of_reports(of_steps, self.reported)


def confirmed(
    reference: Trace,
    topology: Trace,
    noise: Sequence[Trace],
    confirm: Callable[[], Sequence[Trace]],
    source: Trace | None,
    *,
    kinks: bool,
    is_known: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Compare, with as few noise runs as say enough, and with a larger perturbation where kinks or what cancels may be all."""
    first = compare(reference, topology, noise[:1], source=source)
    if first.is_equivalent or is_known():
        return first
    if kinks and reference.follows and _may_be_kinks(first):
        for confirmation in (confirm()[:1], confirm()):  # one often shows all
            comparison = compare(reference, topology, noise[:1], confirmation=confirmation, source=source)
            if comparison.is_equivalent or _is_explained_from_the_first(comparison):
                return comparison
    first = compare(reference, topology, noise, source=source) if len(noise) > len(noise[:1]) else first
    if not (first.cancels or (kinks and _may_be_kinks(first))):
        return first
    more = confirm()
    return compare(reference, topology, noise, confirmation=more, source=source) if more else first


def with_noise_of_reports(comparison: Comparison, of_program: Callable[[], Sequence[Trace]]) -> Comparison:
    """Compare again with runs of the program itself, where reports alone differ, late ones too. One often says enough."""
    number = 1
    while comparison.differs_in_late_reports and len(reported := of_program()[:number]) == number:
        runs = comparison.runs
        comparison = compare(
            runs.reference, runs.topology, runs.noise, confirmation=runs.confirmation, source=runs.source, reported=reported
        )
        number += 2
    return comparison


def _may_be_kinks(comparison: Comparison) -> bool:
    """Return whether units on the other side of a kink may be what differs first.

    What a model explains exactly is no accident of rounding; it may still begin after a step that is.
    """
    return comparison.needs_confirmation and not _is_explained_from_the_first(comparison)


def _is_explained_from_the_first(comparison: Comparison) -> bool:
    """Return whether a model of the gradients explains the first step that differs."""
    return comparison.first is not None and any(fit.step == comparison.first.step for fit in explain(comparison).fits)
