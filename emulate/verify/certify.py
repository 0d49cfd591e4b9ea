"""Make a certificate of a judged run: the fingerprints of its first steps, with what rounding may make of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from emulate.told import Told, told
from emulate.trace import Step, StoredArray, Trace
from emulate.verify.case import Case
from emulate.verify.causes.local_batches import BATCHNORM
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import Floats, StepOfAll, aligned, eps_of, gradients_of, names_of, norm, total, weights_before
from emulate.verify.noise import FACTOR, UNITS, Key, floors
from emulate.verify.verdict import BY_DESIGN, Run
from gpudist_core.certificates import MOST, NUM, START, STEPS, Certificate, Input, Integers, Tensor, examples_of, project

_LOGGED, _RETURNED = "batch/loss", "_train/local result"
"""The names under which the probe reports the losses in the logs of `fit`, and those that `gd.TrainStep` returns."""
_ROUNDED = f"rounding alone may change it by more than {MOST / FACTOR:.0%}"


class NotCertified(Exception):
    """Say why a run has no certificate."""


@dataclass(frozen=True)
class Evidence:
    """Hold a judged run.

    Attributes:
        case: What it was judged by.
        trace: The run with the program's own random numbers, as it is on other machines.
    """

    case: Case
    trace: Trace


def certify(evidence: Evidence | None, run: Run, path: Path) -> Told:
    """Write the certificate of a run that trains the same model.

    Args:
        evidence: The run; None if it was not compared, or has no run with the program's own random numbers.
        run: Its verdict.
        path: The file.

    Returns:
        A note for the user: what was written, or why nothing was.
    """
    try:
        if run.verdict not in ("equivalent", BY_DESIGN):
            raise NotCertified(f"the verdict is {run.verdict}")
        if evidence is None:
            raise NotCertified("the program did not end well with random numbers of its own")
        certificate = _Certifying(evidence, run).certificate()
    except NotCertified as why:
        return told("no-certificate")(f"No certificate was written: {why}.")
    certificate.write(path)
    left_out = f" It does not cover {'; '.join(certificate.left_out)}." if certificate.left_out else ""
    return told("certificate")(f"Certificate of {certificate.steps} steps written to {path}.{left_out}")


class _Certifying:
    """Collect the parts of one certificate."""

    def __init__(self, evidence: Evidence, run: Run) -> None:
        self._case, self._trace, self._run = evidence.case, evidence.trace, run
        self._case.choose_base()
        if len(self._trace.optimizers) != 1 or self._trace.optimizers == ["tape"]:
            raise NotCertified(f"it needs one Keras optimizer, and the program has {self._trace.optimizers}")
        (self._optimizer,) = self._trace.optimizers
        self._steps = complete(self._trace, self._optimizer)[:STEPS]
        self._names = names_of(self._steps[0])
        self._how = self._case.base.runs.how(self._optimizer)
        self._left_out: list[str] = []

    def certificate(self) -> Certificate:
        about, first = self._trace.about, self._steps[0]
        self._check_gradients()
        whole = [[self._gradient(step, name) for name in self._names] for step in self._steps]
        norms = np.array([[np.nan if gradient is None else norm(gradient.reshape(-1)) for gradient in step] for step in whole])
        noise = self._noise(norms)
        inputs, examples = self._examples()
        start = [_whole(weights_before(self._trace, self._optimizer, 0, name)) for name in self._names]
        return Certificate(
            program=self._trace.about["program"],
            topology=self._run.topology,
            replicas=self._case.num_replicas,
            seed=int(about["seed"]),
            versions=dict(about["versions"]),
            optimizer=self._optimizer,
            reduced=any(local.reduced for local in first.values()),
            tensors=tuple(self._tensor(name) for name in self._names),
            inputs=inputs,
            projections=self._projections(whole, norms, noise),
            norms=norms,
            noise=noise,
            start=np.array([_projected(array, name, START) for array, name in zip(start, self._names, strict=True)]),
            start_norms=np.array([np.nan if array is None else norm(array.reshape(-1)) for array in start]),
            examples=examples,
            losses=self._losses(),
            left_out=tuple(self._left_out),  # last: the other parts add to it
        )

    def _check_gradients(self) -> None:
        """Raise NotCertified where the optimizer gets what the fingerprints cannot describe."""
        arrays = [array for step in self._steps for local in step.values() for array in local.gradients.values()]
        if any(array.slices or array.parts for array in arrays):
            raise NotCertified("each replica holds another slice of a sharded table")
        if not all(array.is_finite for array in arrays):
            raise NotCertified(f"a gradient of the first {len(self._steps)} steps is not finite")
        if any(list(local.gradients) != self._names for step in self._steps for local in step.values()):
            raise NotCertified("not every replica has a gradient of every variable in every step")

    def _gradient(self, step: StepOfAll, name: str) -> Floats | None:
        """Return the sum over the replicas as float64, or None where not all elements were kept."""
        parts = list(gradients_of(step, name).values())
        if not all(part.is_complete for part in parts):
            parts = [local.sums[name] for local in step.values() if name in local.sums]
            if len(parts) < len({local.host for local in step.values()}):
                return None
        summed = np.sum([part.read().astype(np.float64) for part in parts], axis=0)
        return np.asarray(summed / len(step) if self._how == "mean" else summed)

    def _projections(self, whole: Sequence[Sequence[Floats | None]], norms: Floats, noise: Floats) -> Floats:
        """Return the projections, without gradients that are not known or not more than rounding."""
        projected = np.array(
            [
                [_projected(array, name, step) for array, name in zip(arrays, self._names, strict=True)]
                for step, arrays in enumerate(whole)
            ]
        )
        is_rounding = FACTOR * noise > MOST * norms
        projected[is_rounding] = np.nan
        for place, name in enumerate(self._names):
            missing = [str(step) for step in range(len(projected)) if np.isnan(projected[step, place]).any()]
            if missing:
                why = _ROUNDED if is_rounding[:, place].any() else "it was not recorded as a whole"
                self._left_out.append(f"the gradient of {name} in step {', '.join(missing)} ({why})")
        if np.isnan(projected).all():
            raise NotCertified(f"no gradient can be compared ({_ROUNDED}, or it was not recorded as a whole)")
        return projected

    def _noise(self, norms: Floats) -> Floats:
        """Return the norm of what rounding makes of each gradient, from all pairs of runs that differ by rounding alone."""
        spreads, scales, units = {}, {}, {}
        pairs = self._pairs()
        if not pairs:
            raise NotCertified("no two runs show what rounding alone makes of its gradients")
        for place, name in enumerate(self._names):
            key = Key("gradient", self._optimizer, name)
            scales[key] = dict(enumerate(norms[:, place]))
            spreads[key] = {step: self._spread(pairs, step, name) for step in range(len(norms))}
            # What is rounded to 16 bits, and how often, is measured: 8 units of them would be as much as half of the gradient.
            units[key] = min(eps_of("<f4"), eps_of(self._tensor(name).dtype))
        noise = floors(spreads, scales, units)
        return np.array([[noise[key][step] for key in noise] for step in range(len(norms))])

    def _pairs(self) -> list[tuple[Trace, Trace]]:
        case = self._case
        free, is_alike = case.plain, self._run.verdict == "equivalent"
        ours, reference = case.topology, case.reference
        is_by_share = any(cause.code == BATCHNORM.code for cause in self._run.causes)
        # What one device makes of other statistics is no rounding.
        if is_by_share and (normalized := case.normalize_alike()) is not None:
            runs, is_alike = normalized[1].runs, normalized[1].is_equivalent
            ours, reference, noise, free = runs.topology, runs.reference, runs.noise, runs.as_they_came.reference
        else:
            noise = case.lab.measure_noise(case.pair)
        pairs = [(trace, reference) for trace in noise]
        if is_alike and case.ledger is not None and case.ledger.is_same:
            pairs.append((ours, free))  # two runs that went their own ways, as that of another machine will
        return pairs

    def _spread(self, pairs: Sequence[tuple[Trace, Trace]], step: int, name: str) -> float:
        """Return the largest norm of the difference of two runs' gradients; NaN without two."""
        distances = []
        for ours, theirs in pairs:
            steps = [complete(trace, self._optimizer) for trace in (ours, theirs)]
            if any(step >= len(of_run) for of_run in steps):
                continue
            parts = [list(gradients_of(of_run[step], name).values()) for of_run in steps]
            if all(parts) and all(part.is_complete for part in itertools.chain(*parts)):
                arrays = aligned([*parts[0], *parts[1]])
                first, other = arrays[: len(parts[0])], arrays[len(parts[0]) :]
                distances.append(norm(total(first, self._how) - total(other, self._how)))
        return max(distances, default=math.nan)

    def _examples(self) -> tuple[tuple[Input, ...], Integers]:
        """Return the inputs that hold examples, and the fingerprint of each step's batch."""
        all_of = [local for step in self._steps for local in step.values()]
        first = all_of[0]
        why = None
        if any(local.reduced or local.runs > 1 or local.again for local in all_of):
            why = "gradients of several calls of Strategy.run are applied together, or outside of it"
        elif not first.row_inputs or any(local.row_inputs != first.row_inputs or local.rows is None for local in all_of):
            why = "they are not the same arguments of Strategy.run in every step"
        places = () if why else tuple(place for place in first.row_inputs if _is_dense(all_of, place))
        if not places:
            self._left_out.append(f"the examples ({why or 'they were not recorded as arrays of numbers'})")
            return (), np.zeros((0, 3), np.int64)
        kinds = [first.inputs[place] for place in places]
        inputs = tuple(
            Input(p, a.shape[1:], np.dtype(a.dtype).name) for p, a in zip(places, kinds, strict=True) if a is not None
        )
        return inputs, np.array([_batch(step, places) for step in self._steps], np.int64)

    def _losses(self) -> Floats:
        """Return the losses that `fit` or `gd.TrainStep` reports, and their noise."""
        own = [report for report in self._trace.reports if report.host == 0]
        losses = {report.made - 1: report.value for report in own if report.name == _LOGGED and report.made}
        # A report inside of a compiled step does not know whether the step was counted. There is one for each batch.
        returned = {report.step: report.value for report in own if report.name == _RETURNED}
        losses |= returned if len(returned) <= len(complete(self._trace, self._optimizer)) + 1 else {}
        if not {*range(max(len(self._steps) - 1, 1))} <= losses.keys():  # several steps a call
            losses = {}
            self._left_out.append("the loss (neither fit nor gd.TrainStep reports it after each step)")
        noise = {p.measure.step: p.noise for p in self._case.base.points if p.measure.key.tensor in (_LOGGED, _RETURNED)}
        pairs = [(losses.get(step, np.nan), noise.get(step, np.nan)) for step in range(len(self._steps))]
        return np.array([(loss, max(UNITS * eps_of("<f4") * abs(loss), np.nan_to_num(noise))) for loss, noise in pairs])

    def _tensor(self, name: str) -> Tensor:
        gradient = next(iter(gradients_of(self._steps[0], name).values()))
        variable = weights_before(self._trace, self._optimizer, 0, name)
        return Tensor(name, gradient.shape, np.dtype(gradient.dtype if variable is None else variable.dtype).name)


def _projected(array: Floats | None, name: str, step: int) -> Floats:
    return np.full(NUM, np.nan) if array is None else project(array, name, step)


def _whole(array: StoredArray | None) -> Floats | None:
    return None if array is None or not array.is_complete else array.read().astype(np.float64)


def _is_dense(steps: Sequence[Step], place: int) -> bool:
    """Return whether an input is kept whole, as numbers, on every replica in every step."""
    arrays = [step.inputs[place] for step in steps]
    return all(array is not None and array.is_complete and np.dtype(array.dtype).kind in "fiub" for array in arrays)


def _batch(step: StepOfAll, places: Sequence[int]) -> Integers:
    """Return the fingerprint of the global batch."""
    parts = [[array.read() for place in places if (array := local.inputs[place]) is not None] for local in step.values()]
    return np.asarray(np.sum([examples_of(part) for part in parts], axis=0, dtype=np.int64))
