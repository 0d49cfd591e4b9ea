"""Add up what the replicas of all hosts report of a step, and compare it with the certificate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpudist_core.certificates.certificate import SAME, Certificate, CertificateMismatch, Floats, Integers
from gpudist_core.checkpoints.exchange import TextExchange
from gpudist_core.errors import UsageError

_CLOSE = 1e-3
_EXPLAIN = "To see why, record these steps with `gpudist launch --record 5`, and compare the trace with `gpudist compare`."


@dataclass(frozen=True)
class Fingerprints:
    """Hold what one replica reports of a step, or what several report together."""

    projections: Floats
    start: Floats
    examples: Integers

    @classmethod
    def total(cls, parts: list[Fingerprints]) -> Fingerprints:
        """Return the sum of the parts. The variables before the first step are those of the first part."""
        projections = np.sum([part.projections for part in parts], axis=0)
        return cls(projections, parts[0].start, np.sum([part.examples for part in parts], axis=0, dtype=np.int64))


class StepChecker:
    """Compare each step as soon as the last replica of this host has reported it.

    Args:
        certificate: The certificate.
        precision: The precision in which the devices multiply.
        local: The number of replicas of this host.
        exchange: Exchanges the hosts' sums.
        end: Called after the last certified step.

    Attributes:
        num_compared: The number of steps that agree.
    """

    def __init__(
        self, certificate: Certificate, precision: str, local: int, exchange: TextExchange, end: Callable[[], None]
    ) -> None:
        self._certificate, self._precision, self._local = certificate, precision, local
        self._exchange, self._end = exchange, end
        self._reports: dict[int, dict[int, Fingerprints]] = {}
        self._lock = threading.Lock()
        self.num_compared = 0

    def take(self, step: int, replica: int, report: Fingerprints) -> None:
        """Take a replica's report.

        Args:
            step: The number of the step.
            replica: The number of the replica.
            report: What it reports.

        Raises:
            CertificateMismatch: In the last replica of a host, on every host alike.
            UsageError: If a replica reports a step twice.
        """
        with self._lock:
            reports = self._reports.setdefault(step, {})
            if replica in reports:
                raise UsageError(
                    "Each replica must apply its gradients once in a step",
                    "Apply them in the function given to Strategy.run, outside of functions that replicas share.",
                    step=step,
                    replica=replica,
                )
            reports[replica] = report
            if len(reports) < self._local:
                return
            del self._reports[step]
            self._compare(step, self._of_all_hosts([reports[number] for number in sorted(reports)]))
            self.num_compared += 1
            if step == self._certificate.steps - 1:
                self._end()

    def compare_loss(self, step: int, loss: float) -> None:
        """Compare the loss that a step logs, after its gradients. Raise CertificateMismatch for another one."""
        certified, tolerance = float(self._certificate.losses[step, 0]), self._certificate.loss_tolerance(step, self._precision)
        if np.isfinite(certified) and not abs(loss - certified) <= tolerance:
            advice = "The gradients of this step are the certified ones: compare how the loss is reported."
            raise CertificateMismatch(step, "loss", "loss", f"{loss:.6g}", f"{certified:.6g}", tolerance, advice)

    def _of_all_hosts(self, reports: list[Fingerprints]) -> Fingerprints:
        own = Fingerprints.total(reports)
        values = (own.projections.tolist(), own.start.tolist(), own.examples.tolist())
        gathered = self._exchange.all_gather("the check of a certified step", values)
        return Fingerprints.total([Fingerprints(np.array(p), np.array(s), np.array(e, np.int64)) for p, s, e in gathered])

    def _compare(self, step: int, seen: Fingerprints) -> None:
        certificate = self._certificate
        if step == 0:
            at = _worst(seen.start, certificate.start, SAME * certificate.start_norms)
            if at is not None:
                seed = f"It was verified with --seed {certificate.seed}."
                advice = f"The variables begin otherwise: another seed, or restored ones. {seed}"
                raise self._mismatch(0, "start", at, seen.start, certificate.start, SAME * certificate.start_norms, advice)
        if certificate.inputs and not np.array_equal(seen.examples, certificate.examples[step]):
            raise CertificateMismatch(
                step,
                "examples",
                "global batch",
                _as_text(seen.examples),
                _as_text(certificate.examples[step]),
                0.0,
                "The global batch has other examples. Compare files, shuffling, seed, batch size and how hosts share the data.",
            )
        certified, tolerances = certificate.projections[step], certificate.tolerances(step, self._precision)
        if (at := _worst(seen.projections, certified, tolerances)) is not None:
            advice = f"{_ratio(seen.projections[at[0]], certified[at[0]])}{_EXPLAIN}"
            raise self._mismatch(step, "gradient", at, seen.projections, certified, tolerances, advice)

    def _mismatch(
        self, step: int, stage: str, at: tuple[int, int], seen: Floats, certified: Floats, tolerances: Floats, advice: str
    ) -> CertificateMismatch:
        name = self._certificate.tensors[at[0]].name
        value, expected = (f"{float(values[at]):.6g}" for values in (seen, certified))
        return CertificateMismatch(step, stage, name, value, expected, float(tolerances[at[0]]), advice)


def _worst(seen: Floats, certified: Floats, tolerances: Floats) -> tuple[int, int] | None:
    """Return tensor and projection that leave their tolerance most, or None. NaN is certified nowhere, and within nothing."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        off = np.abs(seen - certified)
        leaves = np.isfinite(certified) & ~(off <= tolerances[:, None])
        excess = np.where(leaves, np.where(np.isfinite(off), off / tolerances[:, None], np.inf), -1.0)
    if not leaves.any():
        return None
    tensor, number = np.unravel_index(int(np.argmax(excess)), excess.shape)
    return int(tensor), int(number)


def _ratio(seen: Floats, certified: Floats) -> str:
    """Say that a gradient is a multiple of the certified one, where it is."""
    ratio = float(seen @ certified / (certified @ certified or 1.0))
    is_multiple = np.linalg.norm(seen - ratio * certified) <= _CLOSE * np.linalg.norm(seen)
    return f"The gradient is {ratio:.4g}x the certified one. " if is_multiple else ""


def _as_text(examples: Integers) -> str:
    count, keys, _ = (int(number) for number in examples)
    return f"'{count} examples, {keys % 2**64:016x}'"
