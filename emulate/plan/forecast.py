"""Forecast speed, efficiency, time and costs of a recorded program on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from emulate.errors import UsageError
from emulate.plan.machines import Machine
from emulate.plan.memory import MemoryUse, memory_use
from emulate.plan.model import Estimate, StepModel, Work
from emulate.plan.recorded import InputRate, Measured, Recorded

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 100_000)
GOOD_EFFICIENCY = 0.9
USUAL_UTILISATION = 0.3
"""Share of the peak that training reaches: 14 to 65 % on the machines of benchmarks/data (ResNet-50, 24.6 x 10^9 operations an
example; BERT), 30 % in the middle."""
LAUNCH_SECONDS = 1e-5
"""Time in which TensorFlow hands one operation to a GPU: about 5 microseconds for the launch of a CUDA kernel and as many for
the executor. A step of a small model takes as long as its launches."""
_LARGEST_BATCH = 1 << 20
SCHEMA = "gpudist.plan/1"


@dataclass(frozen=True)
class Row:
    """Hold the forecast for one number of GPUs.

    Attributes:
        num_gpus: In all hosts together.
        num_hosts: How many hosts that takes.
        examples_per_second: Of all GPUs together.
        efficiency: Examples a second by those of so many single GPUs.
        limit: What loses most: `compute` (nothing else loses 10 %), `communication`, `stragglers` or `input`.
        communication_seconds: The part of a step that waits for communication.
        hours: Time for the given number of examples.
        dollars: Their price; None where the machine has none.
        batch_for_efficiency: The smallest batch on each GPU with 90 % efficiency; None where none has it.
    """

    num_gpus: int
    num_hosts: int
    examples_per_second: Estimate
    efficiency: Estimate
    limit: str
    communication_seconds: Estimate
    hours: Estimate
    dollars: Estimate | None
    batch_for_efficiency: int | None


@dataclass(frozen=True)
class Forecast:
    """Hold a forecast, and what it rests on.

    Attributes:
        recorded: The program.
        machine: The machine.
        examples: For how many examples time and price are given.
        rows: One for each number of GPUs.
        one_gpu_per_second: Examples that one GPU computes in a second. `efficiency` compares with it.
        memory: What one GPU needs; None where the graph of the step is not known.
        input_per_second: Examples that one host reads in a second, given or measured; None where neither is.
        basis: Sentences: what the forecast rests on.
    """

    recorded: Recorded
    machine: Machine
    examples: int
    rows: tuple[Row, ...]
    one_gpu_per_second: float
    memory: MemoryUse | None
    input_per_second: float | None
    basis: tuple[str, ...]

    def by_num_gpus(self) -> list[Row]:
        """Return one row for each number of GPUs, the smallest first."""
        return sorted({row.num_gpus: row for row in self.rows}.values(), key=lambda row: row.num_gpus)

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as one JSON object."""
        program = self.recorded
        return {
            "schema": SCHEMA,
            "program": program.program,
            "machine": self.machine.name,
            "batch_per_gpu": program.batch,
            "parameters": program.parameters,
            "flops_per_step": program.flops,
            "collectives": program.collectives,
            "gradients": [asdict(gradient) for gradient in program.gradients],
            "examples": self.examples,
            "one_gpu_per_second": self.one_gpu_per_second,
            "rows": [asdict(row) for row in self.rows],
            "memory": None if self.memory is None else self.memory.to_json(),
            "input_per_second": self.input_per_second,
            "basis": list(self.basis),
        }


def make_forecast(
    recorded: Recorded,
    machine: Machine,
    points: Sequence[Measured] = (),
    *,
    counts: Sequence[int] | None = None,
    examples: int = 1_000_000,
    input_per_second: float | None = None,
    memory: float | None = None,
) -> Forecast:
    """Forecast a program on a machine.

    Args:
        recorded: The program's step on one device.
        machine: Where it is to run.
        points: What the user has measured there.
        counts: Numbers of GPUs. Default: powers of two, up to 100,000; one host where the machine has no network.
        examples: For how many examples time and price are given.
        input_per_second: Examples that one host can read in a second. Default: what was measured in the recorded run.
        memory: The memory of one GPU in bytes. Default: the machine's.

    Returns:
        The forecast.

    Raises:
        UsageError: If neither a measurement nor the graph of the program says how long a step takes.
    """
    measured = recorded.input_rate.examples_per_second if isinstance(recorded.input_rate, InputRate) else None
    rate = input_per_second or measured
    before = StepModel(machine, _work(recorded, machine, points, rate))
    model = before
    for point in points:
        if point.num_gpus > 1:
            own = point.batch or model.work.batch
            seconds = own * point.num_gpus / point.examples_per_second
            model = replace(model, weights=model.at_batch(own).learn(point.num_gpus, seconds).weights)
    counts = counts or [count for count in COUNTS if machine.between is not None or count <= machine.gpus_per_host]
    rows = tuple(_row(model, count, examples) for count in counts)
    basis = (*_basis(recorded, before, model, points), _about_input(recorded, input_per_second))
    one_gpu = recorded.batch / model.compute_seconds().middle
    return Forecast(recorded, machine, examples, rows, one_gpu, _memory(recorded, machine, max(counts), memory), rate, basis)


def _memory(recorded: Recorded, machine: Machine, num_gpus: int, room: float | None) -> MemoryUse | None:
    if recorded.memory is None:
        return None
    return memory_use(
        recorded.memory,
        batch=recorded.batch,
        gradient_bytes=recorded.gradient_bytes,
        num_gpus=num_gpus,
        room=room or (None if machine.memory_gb is None else machine.memory_gb * 1e9),
        in_16_bits=recorded.in_16_bits,
    )


def _work(recorded: Recorded, machine: Machine, points: Sequence[Measured], rate: float | None) -> Work:
    on_one_gpu = next((point for point in points if point.num_gpus == 1), None)
    seconds = recorded.batch / on_one_gpu.examples_per_second if on_one_gpu else _estimated_seconds(recorded, machine)
    # NcclAllReduce (num_packs=1) and CollectiveAllReduce (bytes_per_pack=0) send all gradients as one message.
    return Work(
        step_seconds=seconds,
        shortest_seconds=min(seconds, recorded.kernels * LAUNCH_SECONDS),
        batch=recorded.batch,
        gradient_bytes=recorded.gradient_bytes,
        gathered_bytes=recorded.gathered_bytes,
        collectives=1,
        is_measured=on_one_gpu is not None,
        input_per_second=rate,
    )


def peak(recorded: Recorded, machine: Machine) -> tuple[str, float] | None:
    """Return dtype and peak that a program computes with, in operations a second; None where the GPU is unknown.

    TensorFlow computes float32 products in TF32 where the GPU can (tf.config.experimental.enable_tensor_float_32_execution).
    """
    tflops = dict(machine.tflops)
    wanted = ("float16",) if recorded.in_16_bits else ("tf32", "float32")
    return next(((name, tflops[name] * 1e12) for name in (*wanted, "float32") if name in tflops), None)


def _estimated_seconds(recorded: Recorded, machine: Machine) -> float:
    best = peak(recorded, machine)
    if recorded.flops is None or best is None:
        why = "the graph of its step is not known" if recorded.flops is None else f"the speed of {machine.gpu!r} is not known"
        raise UsageError(
            f"The speed of one GPU must be known. Received: program={recorded.program!r}, machine={machine.name!r}: {why}. "
            "Measure one GPU and give it: --measured '1: X examples/s at batch B'."
        )
    return max(recorded.flops / (best[1] * USUAL_UTILISATION), recorded.kernels * LAUNCH_SECONDS)


def _row(model: StepModel, count: int, examples: int) -> Row:
    machine, batch = model.machine, model.work.batch
    rate = model.step_seconds(count).inverse(batch * count)
    hours = rate.inverse(examples / 3600)
    price = None if machine.dollars_per_hour is None else machine.dollars_per_hour * machine.hosts(count)
    return Row(
        num_gpus=count,
        num_hosts=machine.hosts(count),
        examples_per_second=rate,
        efficiency=model.efficiency(count),
        limit=_limit(model, count),
        communication_seconds=model.exposed_seconds(count),
        hours=hours,
        dollars=None if price is None else Estimate(hours.low * price, hours.middle * price, hours.high * price),
        batch_for_efficiency=_smallest_batch(model, count),
    )


def _limit(model: StepModel, count: int) -> str:
    """Return what loses most of a step, where more than 10 % are lost."""
    step, own = model.step_seconds(count).middle, model.compute_seconds().middle
    if model.input_seconds(count) >= 0.99 * step and model.input_seconds(count) > own:
        return "input"
    if model.efficiency(count).middle >= GOOD_EFFICIENCY:
        return "compute"
    exposed = model.exposed_seconds(count).middle
    return "communication" if exposed >= step - own - exposed else "stragglers"


def _smallest_batch(model: StepModel, count: int) -> int | None:
    """Return the smallest batch whose efficiency is good, by bisection; None where none is."""

    def is_good(batch: int) -> bool:
        return model.at_batch(batch).efficiency(count).middle >= GOOD_EFFICIENCY

    if not is_good(_LARGEST_BATCH):
        return None
    low, high = 0, _LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_good(middle) else (middle, high)
    return high


def _basis(recorded: Recorded, before: StepModel, model: StepModel, points: Sequence[Measured]) -> list[str]:
    """Return what the forecast rests on, sentence by sentence."""
    said = [
        *(_about(collective) for collective in recorded.collectives),
        "Links: " + ("a measured table of this machine and NCCL's model." if model.machine.tables else "NCCL's model."),
    ]
    if before.work.is_measured:
        on_one_gpu = next(point for point in points if point.num_gpus == 1)
        said.append(f"One GPU: measured ({on_one_gpu}).")
        if on_one_gpu.batch not in (None, recorded.batch):
            said.append(f"The time of an example at batch {on_one_gpu.batch} was taken for batch {recorded.batch} too.")
    else:
        said.append(_about_estimate(recorded, before))
    others = [point for point in points if point.num_gpus > 1]
    if others:
        count = max(point.num_gpus for point in others)
        was, now = before.step_seconds(count).factor, model.step_seconds(count).factor
        changed = "narrowed" if now < was else "widened"
        said.append(
            f"Measured besides: {'; '.join(map(str, others))}. At {count} GPUs this {changed} the interval from a factor of "
            f"{was:.2f} to {now:.2f}."
        )
    elif before.work.is_measured:
        said.append("A measurement on several GPUs narrows the interval: add --measured 'N: X examples/s at batch B'.")
    said.append("Interval: holds in 90 of 100 cases. The guide to gpudist plan compares with published measurements.")
    return said


def _about_input(recorded: Recorded, given: float | None) -> str:
    rate = recorded.input_rate
    if given is not None:
        return f"Input: {_in_full(given)} examples/s for each host (--input-rate)."
    if not isinstance(rate, InputRate):
        return f"Input: NOT measured: {rate}. The forecast has no limit by input. Give one: --input-rate 'X examples/s'."
    return (
        f"Input: {_in_full(rate.examples_per_second)} examples/s for each host, measured on this machine with {rate.cores} CPU "
        "cores. The host of the GPUs has another CPU: measure there and give --input-rate 'X examples/s'."
    )


def _in_full(number: float) -> str:
    """Return a number with four digits that count, without an exponent."""
    return f"{float(f'{number:.4g}'):,g}" if number < 1000 else f"{float(f'{number:.4g}'):,.0f}"


def _about(collective: dict[str, Any]) -> str:
    size = f"{collective['bytes'] / 1e6:.4g} MB"
    if collective["kind"] == "all-reduce":
        return f"Gradients: {collective['gradients']} tensors, {size}. TensorFlow sends them in one all-reduce a step."
    return f"A sparse gradient: {size}. TensorFlow gathers it from all GPUs, so that more GPUs receive more."


def _about_estimate(recorded: Recorded, before: StepModel) -> str:
    dtype, speed = peak(recorded, before.machine) or ("", 0.0)
    left_out = f" Not counted: {', '.join(recorded.uncounted)}." if recorded.uncounted else ""
    by_launches = recorded.kernels * LAUNCH_SECONDS >= before.work.step_seconds
    rests_on = (
        f"{recorded.kernels} kernels of 10 microseconds, which take longer than their computing"
        if by_launches
        else f"{recorded.flops or 0:.3g} floating-point operations a step and {USUAL_UTILISATION:.0%} of the {dtype} peak of "
        f"{before.machine.gpu} ({speed / 1e12:g} x 10^12/s)"
    )
    return (
        f"One GPU: NOT measured, therefore the interval is wide. Estimated from {rests_on}.{left_out} "
        "Measure one GPU: --measured '1: X examples/s at batch B'."
    )
