"""Define the certificate: what the first steps of a verified run were, in one file of JSON and arrays without pickle.

The file is an `.npz` with these members, for S certified steps, T tensors with gradients and `NUM` projections:

    about          JSON: format, program, topology, replicas, seed, versions, optimizer, reduced, tensors, inputs, left_out
    projections    [S, T, NUM]: of each gradient, summed over the replicas; NaN where it is not certified
    norms, noise   [S, T]: its norm, and the norm that rounding alone may have, as the verification measured it
    start          [T, NUM]: projections of the variables before the first step; start_norms [T]: their norms
    examples       [S, 3]: the fingerprint of the global batch; [0, 3] where it is not certified
    losses         [S, 2]: the loss in Keras's logs, and its noise; NaN where there is none
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from gpudist_core.certificates.fingerprints import NUM, Floats, Integers
from gpudist_core.errors import UsageError

FORMAT = "gpudist.certificate/1"
STEPS = 5
"""A certificate has at most so many steps."""
UNITS = {"float32": 1.0, "tfloat32": 2.0**13, "bfloat16": 2.0**16}
"""Units in the last place of float32 that one has of a precision in which devices multiply."""
FACTOR = 10.0
"""A difference may be so many times the noise. `gpudist verify` has the same factor."""
MOST = 0.5
"""The largest tolerance, as a part of the norm: a gradient that is twice too large is seen in every precision."""
SAME = 80 * 2.0**-23
"""Numbers that no step has changed may differ by this part of their norm: initializers round differently on GPUs."""
_ARRAYS = ("projections", "norms", "noise", "start", "start_norms", "examples", "losses")


@dataclass(frozen=True)
class Tensor:
    """Name a variable with a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Input:
    """Name an argument of `Strategy.run` that holds examples.

    Attributes:
        position: Its place among the tensors with axes of the flattened arguments.
        shape: The shape of one example.
    """

    position: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Certificate:
    """Hold the first steps of a verified run. The module describes the arrays.

    Attributes:
        program: The program's name.
        topology: The verified topology.
        replicas: Its number of replicas.
        seed: The seed of the verification.
        versions: The versions of gpudist, TensorFlow and Keras.
        optimizer: The name of the optimizer.
        reduced: Whether the program gives the optimizer gradients that are already summed over the replicas.
        tensors: The variables with gradients, in the order in which the optimizer gets them.
        inputs: The arguments that hold the examples.
        left_out: What is not certified, and why.
    """

    program: str
    topology: str
    replicas: int
    seed: int
    versions: dict[str, str]
    optimizer: str
    reduced: bool
    tensors: tuple[Tensor, ...]
    inputs: tuple[Input, ...]
    left_out: tuple[str, ...]
    projections: Floats = field(repr=False)
    norms: Floats = field(repr=False)
    noise: Floats = field(repr=False)
    start: Floats = field(repr=False)
    start_norms: Floats = field(repr=False)
    examples: Integers = field(repr=False)
    losses: Floats = field(repr=False)

    @property
    def steps(self) -> int:
        """Return the number of certified steps."""
        return len(self.projections)

    def tolerances(self, step: int, precision: str) -> Floats:
        """Return how far a projection of each gradient may be from the certified one.

        Rounding grows with the unit in the last place of what devices multiply, so the measured noise is scaled by it.

        Args:
            step: The step, counted from 0.
            precision: A key of `UNITS`.

        Returns:
            A number for each tensor.
        """
        return np.asarray(np.minimum(FACTOR * UNITS[precision] * self.noise[step], MOST * self.norms[step]))

    def loss_tolerance(self, step: int, precision: str) -> float:
        """Return how far a loss may be from the certified one."""
        loss, noise = self.losses[step]
        return min(FACTOR * UNITS[precision] * float(noise), MOST * abs(float(loss)))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file. It stands there as a whole or not at all."""
        whole = asdict(self)
        arrays = {name: whole.pop(name) for name in _ARRAYS}
        partial = Path(f"{os.fspath(path)}.partial")
        with partial.open("wb") as file:  # by a file, as NumPy adds a suffix to a name
            np.savez(file, about=np.array(json.dumps({"format": FORMAT, **whole}).encode()), **arrays)
        partial.replace(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a file.

        Args:
            path: Written by `gpudist verify --certificate`.

        Returns:
            The certificate.

        Raises:
            UsageError: If it is not there, not a certificate, or damaged.
        """
        try:
            # NumPy leaves a damaged file open that it has opened itself.
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                header: dict[str, Any] = json.loads(file["about"].item())
                certificate = _from(cls, header, {name: file[name] for name in _ARRAYS})
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise UsageError(
                f"A certificate must be a file of the format {FORMAT}, as it was written",
                f"It cannot be read ({why}). Copy it again, or write it anew with `gpudist verify PROGRAM --certificate FILE`.",
                certificate=os.fspath(path),
            ) from error
        return certificate


def _from(cls: type[Certificate], header: dict[str, Any], arrays: dict[str, Any]) -> Certificate:
    """Return the certificate of a file's members; raise ValueError where they do not fit each other."""
    if header.pop("format", None) != FORMAT:
        raise ValueError("another format")
    names = {member.name for member in fields(cls)}
    header = {name: value for name, value in header.items() if name in names}
    header["tensors"] = tuple(Tensor(tensor["name"], tuple(tensor["shape"]), tensor["dtype"]) for tensor in header["tensors"])
    header["inputs"] = tuple(Input(place["position"], tuple(place["shape"]), place["dtype"]) for place in header["inputs"])
    header["left_out"] = tuple(header["left_out"])
    certificate = cls(**header, **arrays)
    steps, tensors = certificate.projections.shape[0], len(certificate.tensors)
    shapes = ((steps, tensors, NUM), (steps, tensors), (steps, tensors), (tensors, NUM), (tensors,))
    rest = ((steps if certificate.inputs else 0, 3), (steps, 2))
    if not steps or tuple(arrays[name].shape for name in _ARRAYS) != (*shapes, *rest):
        raise ValueError("its arrays do not fit its tensors")
    return certificate


class CertificateMismatch(RuntimeError):
    """Report the step in which a run leaves its certificate.

    Outside of `fit`, TensorFlow reports it as an error of its own, with this text in it, where a compiled step raises it.

    Args:
        step: The step, counted from 0.
        stage: `start`, `examples`, `gradient` or `loss`.
        tensor: What differs: a variable, an input or a loss.
        value: What this run has.
        certified: What the certificate has.
        tolerance: How far they may be apart.
        advice: What to look at.
    """

    def __init__(
        self, step: int, stage: str, tensor: str, value: object, certified: object, tolerance: float, advice: str
    ) -> None:
        self.step, self.stage, self.tensor = step, stage, tensor
        self.value, self.certified, self.tolerance = value, certified, tolerance
        super().__init__(
            f"Step {step} differs from the certificate. Received: stage={stage!r}, tensor={tensor!r}, value={value}, "
            f"certified={certified}, tolerance={tolerance:.3g}. {advice}"
        )
