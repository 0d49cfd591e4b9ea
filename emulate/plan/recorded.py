"""Read what a plan needs: batch, gradients and operations of a recorded run on one device, and the user's own measurements."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emulate.errors import UsageError
from emulate.plan.memory import StepMemory

if TYPE_CHECKING:
    from emulate.trace import StoredArray, Trace

_ROW_NUMBER_BYTES = 8  # int64, as in tf.IndexedSlices
_BYTES = {"bfloat16": 2}  # NumPy has no such type


@dataclass(frozen=True)
class Gradient:
    """Describe the gradient of one variable.

    Attributes:
        name: The variable.
        elements: How many numbers are sent.
        num_bytes: Their size in bytes, of a sparse gradient with the numbers of its rows.
        is_sparse: Whether only some rows of the variable have one. TensorFlow gathers these from all GPUs.
    """

    name: str
    elements: int
    num_bytes: int
    is_sparse: bool = False


@dataclass(frozen=True)
class InputRate:
    """Hold how fast the recorded run's machine reads the program's data.

    Attributes:
        examples_per_second: Of the program's own pipeline, nothing else running.
        cores: The number of its CPU cores.
    """

    examples_per_second: float
    cores: int


@dataclass(frozen=True)
class Recorded:
    """Describe a training step as one device made it.

    Attributes:
        program: The name of the program.
        parameters: The number of trained parameters.
        batch: The number of examples in a step.
        gradients: In the order of the variables.
        flops: Floating-point operations of forward and backward pass of a step; None where its graph is not known.
        kernels: Operations of the graph that a GPU is given in a step.
        uncounted: Types of operations in the graph that are not in `flops`, though they compute.
        in_16_bits: Whether the layers compute in 16 bits.
        memory: What the step keeps in memory; None where its graph is not known.
        input_rate: How fast the program's data is read, or why that was not measured.
    """

    program: str
    parameters: int
    batch: int
    gradients: tuple[Gradient, ...]
    flops: float | None
    kernels: int = 0
    uncounted: tuple[str, ...] = ()
    in_16_bits: bool = False
    memory: StepMemory | None = None
    input_rate: InputRate | str = "the run did not do so"

    @property
    def gradient_bytes(self) -> int:
        """Return the size of all dense gradients in bytes."""
        return sum(gradient.num_bytes for gradient in self._dense)

    @property
    def gathered_bytes(self) -> int:
        """Return the size of all sparse gradients in bytes."""
        return sum(gradient.num_bytes for gradient in self._sparse)

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """Return the collectives of a step in order: one for all dense gradients, one for each sparse one."""
        one = {"kind": "all-reduce", "bytes": self.gradient_bytes, "gradients": len(self._dense)}
        each = [{"kind": "all-gather", "bytes": gradient.num_bytes, "gradients": 1} for gradient in self._sparse]
        return [one, *each] if self._dense else each

    @property
    def _dense(self) -> list[Gradient]:
        return [gradient for gradient in self.gradients if not gradient.is_sparse]

    @property
    def _sparse(self) -> list[Gradient]:
        return [gradient for gradient in self.gradients if gradient.is_sparse]


_SERVERS = re.compile(r"ParameterServerStrategy|parameter_server_strategy")


def check_all_reduce(program: str, trace: Trace | None, failure: str | None) -> None:
    """Check that a program can be planned: that it does not train with parameter servers.

    Args:
        program: Its name.
        trace: The trace of its run on one device; None where there is none.
        failure: The traceback with which the run ended, if it did: on one device, without servers, such a program ends.

    Raises:
        UsageError: If it trains with parameter servers.
    """
    strategies = [event["name"] for _, event in trace.of("strategy")] if trace is not None else []
    if _SERVERS.search("\n".join([*strategies, failure or ""])):
        raise UsageError(
            "A program to plan must sum its gradients by all-reduce, as MirroredStrategy does. Received: "
            f"program={program!r} with ParameterServerStrategy. Plan it with another strategy."
        )


def read_recorded(trace: Trace, operations: Path, *, batch: int | None = None) -> Recorded:
    """Read a recorded run.

    Args:
        trace: The trace of a run on one device with at least one step.
        operations: The file with its floating-point operations, if there is one.
        batch: The number of examples in a step. Default: what the trace has seen.

    Returns:
        What a plan needs.

    Raises:
        UsageError: If the run made no step, or nobody knows the batch.
    """
    steps = [trace.steps(name)[0] for name in trace.optimizers if trace.steps(name)]
    first_steps = [step[min(step)] for step in steps]
    gradients = tuple(_gradient(name, array) for step in first_steps for name, array in step.gradients.items())
    if not gradients:
        raise UsageError(
            f"A program to plan must train. Received: program={trace.about.get('program')!r}, without a step with gradients. "
            "Is the training behind an argument? Pass arguments of the program after `--`."
        )
    batch_size = batch or trace.batch
    if not batch_size:
        raise UsageError(
            f"The batch must be known. Received: program={trace.about.get('program')!r}, whose examples gpudist could not see. "
            "Give --batch, the number of examples in a step on one GPU."
        )
    counted = json.loads(operations.read_text(encoding="utf-8")) if operations.is_file() else {}
    initial = next(iter(trace.variables("initial").values()), {})
    trained = [initial[gradient.name].array for gradient in gradients if gradient.name in initial]
    facts = [event for _, event in trace.of("program")]
    in_16_bits = any(event.get("float16") or event.get("bfloat16") for event in facts)
    return Recorded(
        program=str(trace.about.get("program")),
        parameters=sum(math.prod(array.shape) for array in trained if array is not None),
        batch=batch_size,
        gradients=gradients,
        flops=counted.get("flops") or None,
        kernels=counted.get("kernels", 0),
        uncounted=tuple(counted.get("uncounted", ())),
        in_16_bits=in_16_bits,
        memory=StepMemory.from_json(counted["memory"]) if "memory" in counted else None,
        input_rate=_input_rate(trace, batch_size),
    )


def _input_rate(trace: Trace, batch: int) -> InputRate | str:
    measured: list[dict[str, Any]] = [event for _, event in trace.of("input")]
    if not measured:
        return "the run ended before"
    event = measured[0]
    if "failure" in event:
        return str(event["failure"])
    # An element that has not the step's number of examples is cut or joined to batches elsewhere: each is one step's.
    examples = event["examples"] if event["first"] == batch else event["elements"] * batch
    return InputRate(examples / event["seconds"], event["cores"])


def _gradient(name: str, array: StoredArray) -> Gradient:
    elements = math.prod(array.shape)
    size = elements * (_BYTES.get(array.dtype) or np.dtype(array.dtype).itemsize)
    if array.rows is None:
        return Gradient(name, elements, size)
    return Gradient(name, elements, size + _ROW_NUMBER_BYTES * array.shape[0], is_sparse=True)


_FORM = re.compile(r"\s*(\d+)\s*:\s*(\d+(?:\.\d+)?)\s*examples\s*/\s*s(?:\s+at\s+batch\s+(\d+))?\s*", re.IGNORECASE)
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*examples\s*/\s*s\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Measured:
    """Hold one measurement of the user's.

    Attributes:
        num_gpus: On how many GPUs it was made.
        examples_per_second: Of all GPUs together.
        batch: Examples on each GPU in a step; None for the batch of the recorded run.
    """

    num_gpus: int
    examples_per_second: float
    batch: int | None = None

    def __str__(self) -> str:
        """Return the text as a user writes it."""
        at_batch = "" if self.batch is None else f" at batch {self.batch}"
        return f"{self.num_gpus}: {self.examples_per_second:g} examples/s{at_batch}"


def parse_measured(texts: Sequence[str]) -> tuple[Measured, ...]:
    """Read measurements.

    Args:
        texts: Each `N: X examples/s at batch B`; without `at batch B` the batch of the recorded run.

    Returns:
        The measurements by increasing number of GPUs.

    Raises:
        UsageError: If a text has another form, or two are of one number of GPUs.

    Example:
        >>> parse_measured(["8: 1485 examples/s at batch 32"])[0].examples_per_second
        1485.0
    """
    points: dict[int, Measured] = {}
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None or int(match[1]) < 1 or float(match[2]) <= 0 or int(match[3] or 1) < 1:
            raise UsageError(
                "--measured must have the form 'N: X examples/s at batch B', with positive numbers. Received: --measured "
                f"{text!r}. N is the number of GPUs, B the batch on each. Example: --measured '1: 195 examples/s at batch 64'."
            )
        point = Measured(int(match[1]), float(match[2]), int(match[3]) if match[3] else None)
        if point.num_gpus in points:
            raise UsageError(
                "--measured must be given once for each number of GPUs. "
                f"Received: {str(points[point.num_gpus])!r} and {text!r}. Leave one out."
            )
        points[point.num_gpus] = point
    return tuple(points[count] for count in sorted(points))


def parse_rate(text: str) -> float:
    """Return the rate of `--input-rate`, in examples a second. Raise UsageError for another form than `5000 examples/s`."""
    match = _RATE.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            f"--input-rate must have the form 'X examples/s', with a positive number. Received: --input-rate {text!r}. "
            "Example: --input-rate '5000 examples/s'."
        )
    return float(match[1])
