"""Compare two arms of a program: the same program with other arguments or another environment, on the same topology.

The first arm runs as it is. The second one applies the first one's gradients, replica by replica, instead of its own, which
are recorded. So in each step both have the same weights, and a difference shows in the step in which it arises. Two arms that
end far apart because the training amplifies rounding agree here in every step.

The noise floor comes from runs of the first arm that follow it, too, with first weights and gradients off by a unit in the last
place. It is not measured on the second arm: where that loses digits in what it computes (a variance as a difference of two
large numbers), its own noise would hide that. The rows of a batch stay in order, which may matter: weights that are off round
all that is computed of them in another way.

No cause is looked for. Causes are about replicas, and here both sides have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import final

from emulate.recorder import Follow
from emulate.told import Told, told
from emulate.topology import Topology
from emulate.trace import Facts, Trace
from emulate.verify.compare import compare
from emulate.verify.compared_runs import Rounding, stated_aggregation
from emulate.verify.ends import unjudged, unseen_code
from emulate.verify.judge import NEEDED
from emulate.verify.lab import CONFIRMING_ULPS
from emulate.verify.ledgers import ledgers
from emulate.verify.recorded import CONFIRMING_RUNS, NOISE_RUNS, Recorded, RunPair, differing
from emulate.verify.references import can_lead
from emulate.verify.result import RunResult, trace_of
from emulate.verify.run_spec import AS_IT_STANDS, Arm, Noise, RunSpec, Variation
from emulate.verify.runner import Runner
from emulate.verify.verdict import OF_REFERENCE, Difference, Finding, Reference, Run

_NOT_FOLLOWED = told("arms-not-followed")("every step: the second arm cannot have the weights of the first one: {}")
_BROKEN = told("gpudist-failed")("everything: gpudist itself failed at {0[0]} ({0[1]}), so what was recorded has holes")
_UNSEEN = told("none-seen")("{}: none was seen in both arms")
_UNEQUAL = ("optimizer-in-one-run", "gradient-in-one-run", "steps-in-one-run")
"""Codes of what only one arm has: then they are no arms of the same training."""
_FIX = "Look at what the arms compute there. With --precision float64 rounding becomes smaller, and a fault stays as it is."


@final
class Arms(Recorded):
    """Run two arms on one topology, and the first one's noise runs; each run is made once.

    Args:
        runner: Starts processes.
        seed: The seed of the verification.
        topology: Where both run.
        arm: The second one.
    """

    def __init__(self, runner: Runner, seed: int, topology: Topology, arm: Arm) -> None:
        super().__init__()
        self._runner, self._seed, self._topology, self._arm = runner, seed, topology, arm
        self._runs: dict[RunSpec, Future[RunResult]] = {}

    def judge(self) -> tuple[Reference, Run, list[Told]]:
        """Run and compare the arms; return what the second did, the verdict on the first, and what holds for both."""
        first = second = self._run(AS_IT_STANDS).result()
        trace, reference = trace_of(first), Reference("none", topology=str(self._topology), against=self._arm.text)
        why = None if trace is None else _refusal(trace)
        following = Variation(follow=None if trace is None or why is not None else Follow(trace.directory, each=True))
        if following.follow is not None:
            running, _ = self._run(following, arm=self._arm), self._run(following, Noise(1, permutes=False))
            second = running.result()
            made = 0 if second.trace is None else second.trace.num_steps
            reference = replace(reference, status=second.status, steps=made, failure=second.failure)
        run = replace(
            unjudged(first, second),
            verdict={"ok": "unverified", "hung": "hung"}.get(second.status, "failed"),
            reason=None if second.status == "ok" else first.reason if second is first else OF_REFERENCE,
            replicas=0 if trace is None else len(trace.replicas),
            steps=0 if trace is None else trace.num_steps,
            not_compared=() if why is None else (why,),
            notes=tuple(dict.fromkeys([*first.notes, *second.notes])),
            against=self._arm.text,
        )
        other = trace_of(second) if second is not first else None
        if trace is not None and other is not None:
            run = self._compared(run, RunPair(trace, other, following, following))
        return reference, run, unseen_code(first)

    def has_dear_noise(self, pair: RunPair) -> bool:
        """Return True: each noise run is a start of the program."""
        return True

    def measure_noise(self, pair: RunPair, number: int = NOISE_RUNS) -> Sequence[Trace]:
        """Make the first noise runs, as far as they are not made yet; return those that end well."""
        runs = [self._run(pair.variation, Noise(k + 1, permutes=False)) for k in range(number)]
        return [trace for run in runs if (trace := trace_of(run.result())) is not None]

    def confirm(self, pair: RunPair, number: int = CONFIRMING_RUNS) -> Sequence[Trace]:
        """Make noise runs with a larger perturbation; return those that end well."""
        noise = [Noise(NOISE_RUNS + k + 1, CONFIRMING_ULPS, permutes=False) for k in range(number)]
        return [trace for each in noise if (trace := trace_of(self._run(pair.variation, each).result())) is not None]

    def _run(self, variation: Variation, noise: Noise | None = None, arm: Arm | None = None) -> Future[RunResult]:
        spec = RunSpec(self._topology, variation, noise, arm=arm)
        plan = replace(variation.plan(self._seed), initial=None, leads=True, keeps_xla=True)
        if noise is not None and variation.follow is not None:
            units, trace = Rounding.of(Trace(variation.follow.trace)).units, variation.follow.trace
            plan = replace(plan, initial=trace, noise_seed=noise.number, perturb=noise.ulps * units, short=units > 1)
        if spec not in self._runs:
            self._runs[spec] = self._runner.start(spec.label(), self._topology, plan, arm=arm)
        return self._runs[spec]

    def _compared(self, run: Run, pair: RunPair) -> Run:
        """Return the verdict. The comparison has the first arm as its reference, since the noise is that arm's."""
        first, second = pair.reference, pair.topology
        comparison = self.compare(pair, kinks=True)
        lost = (
            point.difference() for point in compare(second, first).exceeding if point.measure.non_finite
        )  # in the first alone
        found = min((*filter(None, [_turned(comparison.first)]), *lost), key=lambda each: each.step, default=None)
        apart = [_of_arms(text) for text in comparison.not_compared]
        needed = [kind for kind in NEEDED if kind != "loss" or first.reports or second.reports]
        missing = [text for text in apart if text.code in _UNEQUAL]
        missing += [_UNSEEN.format(kind) for kind in needed if kind not in comparison.kinds()]
        missing += map(_BROKEN.format, Facts.of(first, second).broken.items())
        verdict = "divergent" if found is not None else "unverified" if missing else "equivalent"
        ledger = next((each for each in ledgers(second, first).values() if each.is_known), None)
        return replace(
            run,
            verdict=verdict,
            samples=run.samples if ledger is None else ledger.samples,
            worst=_turned(comparison.worst_by_rounding if verdict == "equivalent" else comparison.worst),
            first_divergence=found,
            causes=() if found is None else (_finding(found, differing(first, second)),),
            not_compared=tuple(dict.fromkeys([*missing, *apart])),
            notes=tuple(dict.fromkeys([*run.notes, *map(_of_arms, comparison.notes)])),
            course=comparison.course,
            non_finite_after=comparison.non_finite_after,
        )


def compare_arms(
    runner: Runner, seed: int, topologies: Sequence[Topology], arm: Arm
) -> tuple[Reference, list[Run], list[Told]]:
    """Compare two arms on each topology.

    Args:
        runner: Starts processes.
        seed: The seed of the verification.
        topologies: Where they run.
        arm: The second one.

    Returns:
        What the second arm did on the first topology, the verdict on each, and what holds for all of them.
    """
    runner.limit.voters, runner.limit.num_runs = 1, 2 * len(topologies) + 1  # the first arm alone decides where all stop
    judged = [Arms(runner, seed, topology, arm).judge() for topology in topologies]
    return judged[0][0], [run for _, run, _ in judged], list(dict.fromkeys(note for *_, notes in judged for note in notes))


def _refusal(trace: Trace) -> Told | None:
    """Return why another run cannot apply this one's gradients; None if it can."""
    if not trace.num_steps:
        broken = Facts.of(trace).broken.items()
        return _BROKEN.format(*broken) if broken else _NOT_FOLLOWED.format("gpudist saw no step of an optimizer")
    if any(stated_aggregation(trace, name) == "tape" for name in trace.optimizers):
        return _NOT_FOLLOWED.format("no optimizer applies its gradients")
    return None if can_lead(trace, trace) else _NOT_FOLLOWED.format("its gradients are too large to be kept")


def _turned(difference: Difference | None) -> Difference | None:
    """Return a difference with the second arm as the reference."""
    return difference and replace(difference, value=difference.reference_value, reference_value=difference.value)


def _of_arms(text: Told) -> Told:
    """Return a sentence about two topologies as one about two arms."""
    if text.code in _UNEQUAL:
        return Told(text.code, f"{text.rpartition(' (')[0]} (only one arm has it)")
    return Told(text.code, text.replace("on one device too", "in both arms").replace("on one device", "of the first arm"))


def _finding(found: Difference, before: str | None) -> Finding:
    where = f"the gradient of {found.tensor}" if found.kind == "gradient" else f"the {found.kind} {found.tensor}"
    size = found.error / max(found.noise, 1e-300)
    evidence = f"Error {found.error:.2g}, noise floor {found.noise:.2g} ({size:.0f}x), at the same weights before the step."
    also = "" if before is None else f" The arms differ in {before}, too."
    return Finding("unexplained", f"The arms differ from step {found.step} on in {where}.", evidence + also, _FIX)
