"""Compute whether a recorded step fits into the memory of a GPU, and which changes make it fit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from emulate.errors import UsageError

Line = tuple[float, float]
"""Bytes that do not depend on the batch, and bytes of each example."""

_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([MGT]i?B)\s*", re.IGNORECASE)
_BATCHES_ON_GPU = 2
"""The batch of the step, and the next one that TensorFlow copies to the GPU meanwhile (MultiDeviceIterator)."""


def parse_memory(text: str) -> float:
    """Return the bytes of `--memory`. Raise UsageError for another form than `24GB`."""
    match = _FORM.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            "--memory must be a positive number with a unit: MB, GB, TB, MiB, GiB or TiB. "
            f"Received: --memory {text!r}. Example: --memory 24GB."
        )
    return float(match[1]) * _UNITS[match[2].upper()]


@dataclass(frozen=True)
class StepMemory:
    """Hold what a recorded step keeps in the memory of one device, in bytes.

    Attributes:
        weights: The variables of the model.
        other_variables: The optimizers' slots, and all other variables of the step.
        static: Constants and captured tensors.
        inputs: The examples of a batch.
        peaks: What else lives at the peak of one device: bytes that do not depend on the batch, bytes of each example, and how
            many of these are float32. The highest counts for a batch.
        reduced_peaks: The same of several devices, whose gradients are summed.
        scales: Whether the lines hold for other batches.
        uncounted: Types of operations with tensors of unknown size, which are not in the lines.
    """

    weights: float
    other_variables: float
    static: float
    inputs: Line
    peaks: tuple[tuple[float, float, float], ...]
    reduced_peaks: tuple[tuple[float, float, float], ...]
    scales: bool = True
    uncounted: tuple[str, ...] = ()

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> StepMemory:
        """Return what the file of a recorded run says."""
        lines = {name: tuple(map(tuple, entry[name])) for name in ("peaks", "reduced_peaks")}
        return StepMemory(**{**entry, **lines, "inputs": tuple(entry["inputs"]), "uncounted": tuple(entry["uncounted"])})


@dataclass(frozen=True)
class _Use:
    """Hold the memory of one way to train: bytes that always live, those of the input, and the lines of the peak."""

    kept: float
    inputs: Line
    peaks: tuple[Line, ...]

    def bytes_at(self, batch: int) -> float:
        fixed, each = self.peak(batch)
        return self.kept + self.inputs[0] + self.inputs[1] * batch + fixed + each * batch

    def peak(self, batch: int) -> Line:
        return max(self.peaks, key=lambda line: line[0] + line[1] * batch)

    def largest_batch(self, room: float) -> int | None:
        """Return the largest batch that fits; 0 where none does, None where all do."""
        free = room - self.kept - self.inputs[0]
        if any(fixed > free for fixed, _ in self.peaks):
            return 0
        slopes = ((free - fixed, each + self.inputs[1]) for fixed, each in self.peaks)
        return min((math.floor(left / each) for left, each in slopes if each > 0), default=None)


@dataclass(frozen=True)
class MemoryUse:
    """Hold the memory that a step needs on each GPU, and which changes make it fit.

    Attributes:
        batch: The recorded batch.
        total: Needed with this batch, in bytes.
        parts: The same by its purpose, in bytes.
        room: The memory of the GPU in bytes; None where it is unknown.
        largest_batch: The largest batch that fits; 0 where none does, None where it is not known.
        in_16_bits: Bytes where layers compute in bfloat16; None where they do already, or where it is not known.
        accumulation: Into how many parts the batch must be cut so that it fits one part after the other, and the bytes then;
            None where no number of parts fits, or where it is not known.
        scales: Whether other batches were computed.
        uncounted: Types of operations with tensors of unknown size, which are not counted.
    """

    batch: int
    total: float
    parts: Mapping[str, float]
    room: float | None
    largest_batch: int | None
    in_16_bits: float | None
    accumulation: tuple[int, float] | None
    scales: bool
    uncounted: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Return whether the recorded batch fits; None where the memory is unknown."""
        return None if self.room is None else self.total <= self.room

    def to_json(self) -> dict[str, Any]:
        """Return the memory as one JSON object."""
        return {**asdict(self), "fits": self.fits}

    def sentences(self) -> list[str]:
        """Return the memory in words: what is needed, whether it fits, and what is not counted."""
        parts = ", ".join(f"{name} {_text(size)}" for name, size in self.parts.items() if size)
        said = [f"Memory of each GPU at batch {self.batch:,}: {_text(self.total)} ({parts}).", self._verdict()]
        if not self.scales:
            said.append("Other batches were not computed: the graph of the step is made for this batch (drop_remainder=True).")
        if self.uncounted:
            said.append(f"Not counted: tensors of {', '.join(self.uncounted)}, whose size is not in the graph.")
        return [
            *said,
            "More is needed for workspace of cuDNN and cuBLAS, fragmentation and the CUDA context. No GPU was measured.",
        ]

    def _verdict(self) -> str:
        if self.room is None:
            return "Whether it fits is not known: the memory of the GPU is not known. Give it: --memory 24GB."
        if self.fits:
            largest = f" The largest batch that fits is {self.largest_batch:,}." if self.largest_batch else ""
            return f"Fits in {_text(self.room)}: yes.{largest}"
        ways = [f"batch {self.largest_batch:,}"] if self.largest_batch else []
        if self.in_16_bits is not None and self.in_16_bits <= self.room:
            ways.append(f"bfloat16 (keras.mixed_precision, {_text(self.in_16_bits)})")
        if self.accumulation is not None:
            count, size = self.accumulation
            ways.append(f"gradient accumulation over {count} batches of {self.batch // count:,} ({_text(size)})")
        if self.largest_batch == 0:
            ways = ways or ["no batch"]
        return f"Fits in {_text(self.room)}: no." + (f" It would with {', or '.join(ways)}." if ways else "")


def memory_use(
    step: StepMemory, *, batch: int, gradient_bytes: float, num_gpus: int, room: float | None, in_16_bits: bool
) -> MemoryUse:
    """Return the memory that a recorded step needs on each GPU.

    Args:
        step: The recorded step.
        batch: Its number of examples.
        gradient_bytes: The size of all dense gradients.
        num_gpus: In all hosts together. Several pack their gradients.
        room: The memory of a GPU in bytes; None where it is unknown.
        in_16_bits: Whether layers compute in 16 bits already.

    Returns:
        The memory, and which changes make it fit.
    """
    # ConcatAndSplitPacker (cross_device_utils.py, TensorFlow 2.21) copies all gradients into one tensor and out of it again.
    packing: tuple[Line, ...] = ((2.0 * gradient_bytes, 0.0),) if num_gpus > 1 else ()
    inputs = (_BATCHES_ON_GPU * step.inputs[0], _BATCHES_ON_GPU * step.inputs[1])
    kept = step.weights + step.other_variables + step.static
    peaks = step.reduced_peaks if num_gpus > 1 else step.peaks
    use = _Use(kept, inputs, (*((fixed, each) for fixed, each, _ in peaks), *packing))
    # The variables stay in 32 bits. Each layer casts its weights, which lives until the backward pass.
    short = _Use(kept + step.weights / 2, inputs, (*((fixed, each - floats / 2) for fixed, each, floats in peaks), *packing))
    fixed, each = use.peak(batch)
    largest, accumulation = None, None
    if step.scales and room is not None:
        largest = use.largest_batch(room)
        accumulated = _Use(kept + gradient_bytes, inputs, use.peaks)
        counts = (count for count in range(2, batch + 1) if batch % count == 0)
        sizes = ((count, accumulated.bytes_at(batch // count)) for count in counts)
        accumulation = next(((count, size) for count, size in sizes if size <= room), None)
    return MemoryUse(
        batch=batch,
        total=use.bytes_at(batch),
        parts={
            "weights": step.weights,
            "optimizer and other variables": step.other_variables,
            "static tensors": step.static,
            "input": inputs[0] + inputs[1] * batch,
            "activations": each * batch,
            "gradients and packing buffer" if (fixed, each) in packing else "gradients and temporary tensors": fixed,
        },
        room=room,
        largest_batch=largest,
        in_16_bits=short.bytes_at(batch) if step.scales and not in_16_bits else None,
        accumulation=accumulation,
        scales=step.scales,
        uncounted=step.uncounted,
    )


def _text(size: float) -> str:
    """Return a size with three digits: 1.23 GB."""
    unit = next((name for name in ("TB", "GB", "MB") if size >= 0.995 * _UNITS[name]), "kB")
    return f"{float(f'{size / _UNITS.get(unit, 1e3):.3g}'):g} {unit}"
