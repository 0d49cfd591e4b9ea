"""Predict the time of a training step on many GPUs from its time on one.

What nobody tells a planner about a training is drawn once, the same in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from emulate.plan.collectives import Ring, all_reduce_seconds
from emulate.plan.machines import Machine

BACKWARD_SHARE = 2 / 3
"""Share of a step in which gradients arise: the backward pass computes two products for each product of the forward pass."""
USUAL_COLLECTIVES = 80
"""All-reduces of a step where nobody counted them: half of the variables of ResNet-50 (161), for some tools join gradients."""
ALL_REDUCE, SERVERS, LOCAL_SERVERS = "all-reduce", "servers", "local-servers"
_PCIE_GB_PER_S = 12.0  # A server's process reaches a GPU through the host: NCCL's PCI_BW.
ALWAYS_WAITED = 0.5
_FLOOR = 1e-9  # No sample is ruled out: where a measurement fits none, all stay possible instead of none.


@dataclass(frozen=True)
class Work:
    """Describe the training step of a program on one GPU.

    Attributes:
        step_seconds: The time of a step on one GPU, in seconds.
        batch: The number of examples in it.
        gradient_bytes: The size of all gradients that are summed, as they are sent, in bytes.
        gathered_bytes: The size of one GPU's sparse gradients in bytes: each GPU gets those of all others.
        exchange: `all-reduce`; `servers`: parameter servers, at most one on each host; or `local-servers`: variables on
            the CPU of the one host.
        collectives: How many messages they are sent in; None where nobody counted.
        is_measured: Whether somebody measured `step_seconds`. Else the GPU's speed is uncertain, too.
        sends_early: Whether each gradient is sent during the backward pass, as Horovod does. Else most wait for the last.
        shortest_seconds: The time below which no smaller batch brings a step on one GPU.
        input_per_second: Examples a second that one host can read; None where that does not limit.
    """

    step_seconds: float
    batch: float
    gradient_bytes: float
    exchange: str = ALL_REDUCE
    collectives: int | None = None
    is_measured: bool = True
    sends_early: bool = False
    shortest_seconds: float = 0.0
    gathered_bytes: float = 0.0
    input_per_second: float | None = None


@dataclass(frozen=True)
class Estimate:
    """Hold a predicted number with its interval: 90 of 100 such intervals are meant to hold."""

    low: float
    middle: float
    high: float

    @property
    def factor(self) -> float:
        """Return how many times larger the upper end of the interval is."""
        return self.high / self.low

    def inverse(self, factor: float) -> Estimate:
        """Return `factor` by this: of seconds a rate."""
        return Estimate(factor / self.high, factor / self.middle, factor / self.low)


@dataclass(frozen=True)
class StepModel:
    """Predict the time of a step on any number of GPUs of a machine.

    Attributes:
        machine: The machine.
        work: The step on one GPU.
        weights: How likely each version of what is not known has become by measurements.

    Example:
        >>> from emulate.plan.machines import find_machine
        >>> model = StepModel(find_machine("dgx1-v100"), Work(0.31, 128, 4 * 25.6e6))
        >>> 0.31 < model.step_seconds(8).middle < 0.34
        True
    """

    machine: Machine
    work: Work
    weights: Floats = field(default_factory=lambda: np.ones(SAMPLES), repr=False)

    def at_batch(self, batch: float) -> StepModel:
        """Return the model for another batch on each GPU: computing and sparse gradients grow with it."""
        times = batch / self.work.batch
        seconds = max(self.work.shortest_seconds, self.work.step_seconds * times)
        gathered = self.work.gathered_bytes * times
        return replace(self, work=replace(self.work, batch=batch, step_seconds=seconds, gathered_bytes=gathered))

    def learn(self, num_gpus: int, seconds: float) -> StepModel:
        """Return the model after a measurement (Bayes' rule).

        Args:
            num_gpus: On how many GPUs it was made.
            seconds: The time of a step of the model's batch, in seconds.

        Returns:
            The model with other weights.
        """
        error = np.log(seconds / self.samples(num_gpus)) / NOISE
        likelihood = np.exp(-0.5 * (error**2 - np.min(error**2)))
        return replace(self, weights=self.weights * likelihood + _FLOOR)

    def step_seconds(self, num_gpus: int) -> Estimate:
        """Return the predicted time of a step, in seconds, with its interval."""
        return self._estimate(self.samples(num_gpus) * np.exp(draws().noise))

    def compute_seconds(self) -> Estimate:
        """Return the time that one GPU computes in a step, in seconds."""
        return self._estimate(self._own())

    def exposed_seconds(self, num_gpus: int) -> Estimate:
        """Return the time of a step in which the GPUs wait for their communication, in seconds."""
        return self._estimate(self._exposed(num_gpus))

    def efficiency(self, num_gpus: int) -> Estimate:
        """Return the throughput by that of so many single GPUs: 1 is the best."""
        return self._estimate(self._own() / (self.samples(num_gpus) * np.exp(draws().noise)))

    def input_seconds(self, num_gpus: int) -> float:
        """Return the time in which a host reads the examples of a step, in seconds; 0 where that does not limit."""
        rate = self.work.input_per_second
        return 0.0 if rate is None else self.work.batch * min(num_gpus, self.machine.gpus_per_host) / rate

    def samples(self, num_gpus: int) -> Floats:
        """Return the time of a step in every version of what is not known, in seconds."""
        own = self._own()
        if num_gpus > 1:
            # A step ends with its slowest GPU: of n times that vary, the largest grows like the expected largest of n normals.
            growth = expected_largest(num_gpus) / expected_largest(8)
            waited = draws().straggling * (ALWAYS_WAITED + (1 - ALWAYS_WAITED) * growth)
            own = own * (1 + waited) + self._exposed(num_gpus)
        return np.maximum(own, self.input_seconds(num_gpus))

    def _own(self) -> Floats:
        if self.work.is_measured:
            return np.full(SAMPLES, self.work.step_seconds)
        return np.asarray(self.work.step_seconds * np.exp(draws().compute), dtype=np.float64)

    def _exposed(self, num_gpus: int) -> Floats:
        """Return the communication that nothing hides, in seconds."""
        if num_gpus == 1:
            return np.zeros(SAMPLES)
        ring = self.machine.ring(num_gpus)
        if self.work.exchange == LOCAL_SERVERS:
            # Each gradient goes to the CPU as soon as it exists, over the GPU's own link: hidden unless it takes longer.
            over_pcie = 2 * self.work.gradient_bytes / (_PCIE_GB_PER_S * 1e9)
            return np.maximum(0.0, over_pcie - BACKWARD_SHARE * self._own())
        if self.work.exchange == SERVERS:
            return self._of_servers(ring)
        whole = self._all_reduces(ring)
        overlap = draws().overlap * (1.0 if self.work.sends_early else OVERLAP_MAX)
        return whole - np.minimum(overlap * whole, BACKWARD_SHARE * self._own())

    def _all_reduces(self, ring: Ring) -> Floats:
        count = self.work.collectives or USUAL_COLLECTIVES
        latency, transfer = all_reduce_seconds(ring, self.work.gradient_bytes / count)
        per_host = ring.num_gpus / ring.num_hosts
        # A ring of four is the middle of those that one host can have. Between hosts the network decides.
        speed = np.exp(draws().bandwidth + (draws().ring * math.log2(per_host / 4) if ring.num_hosts == 1 else 0.0))
        if ring.num_hosts > 1:
            speed = speed * self._network()
        gathered = (ring.num_gpus - 1) * self.work.gathered_bytes / (ring.gb_per_s * 1e9)
        return np.asarray(count * latency * draws().latency + (count * transfer + gathered) / speed, dtype=np.float64)

    def _network(self) -> Floats:
        spread = math.log(self.machine.between.spread) if self.machine.between else 0.0
        return np.asarray(np.exp((spread + NETWORK_SPREAD) * draws().network), dtype=np.float64)

    def _of_servers(self, ring: Ring) -> Floats:
        """Return the time of parameter servers: the sum inside a host, then gradients out and variables back."""
        seconds = np.zeros(SAMPLES)
        per_host = ring.num_gpus // ring.num_hosts
        if per_host > 1:
            seconds = self._all_reduces(Ring(per_host, 1, ring.inside, None))
            seconds = seconds + 2 * self.work.gradient_bytes / (_PCIE_GB_PER_S * 1e9)
        if ring.between is not None and ring.num_hosts > 1:
            # TensorFlow's own benchmarks have one server on each host. Others have fewer, down to one: half of the versions.
            servers = ring.num_hosts ** (1 - np.maximum(0.0, 2 * draws().servers - 1))
            sent = 2 * self.work.gradient_bytes * (ring.num_hosts - 1) / servers
            seconds = seconds + sent / (ring.between.gb_per_s * 1e9 * self._network())
        return seconds

    def _estimate(self, values: Floats) -> Estimate:
        order = np.argsort(values)
        shares = np.cumsum(self.weights[order])
        at = [min(SAMPLES - 1, int(np.searchsorted(shares, share * shares[-1]))) for share in (TAIL, 0.5, 1 - TAIL)]
        low, middle, high = (float(values[order[index]]) for index in at)
        return Estimate(low, middle, high)


Floats = NDArray[np.float64]

SAMPLES = 8192
_DIMS = 9
TAIL = 0.04
"""Share of the versions below an interval, and above it.

0.05 would do if the versions held all that differs between machines. benchmarks/plan_left_out.py chooses the largest share with
which 90 of 100 intervals hold in each source of measurements."""
# The constants below say how sure one can be before anything is measured. They are round numbers, set by judgement with the
# measurements of benchmarks/data/public_throughput.csv at hand. benchmarks/plan_constants.py halves and doubles each, and
# chooses all of them without the source that is then predicted: that predicts no better.
STRAGGLING_MEDIAN, STRAGGLING_SPREAD = 0.02, 1.6
"""Share of a step that eight GPUs lose in waiting for the slowest, and its logarithmic spread: 0.1 to 28 % in 90 of 100 cases.

2 % is what steps of equal work differ by on GPUs with a boost clock; the long tail are examples of unequal size and input."""
BANDWIDTH_SPREAD = 0.5
"""Logarithmic spread of the real bandwidth around NCCL's model: half to twice of it in 84 of 100 cases."""
RING_SPREAD = 0.6
"""Logarithmic spread of the bandwidth of a ring, for each doubling of its GPUs: drivers place rings differently."""
LATENCY_SPREAD = 0.5
"""Logarithmic spread of the latency of all collectives of a step: NCCL's own table was measured on other processors."""
OVERLAP_MAX = 0.25
"""At most this share of the communication runs beside the backward pass.

TensorFlow's MirroredStrategy packs all gradients into one pack and waits for the last (NcclAllReduce, num_packs=1;
bytes_per_pack=0), so that little of it can."""
NOISE = 0.04
"""Logarithmic spread of a published measurement: twice 2 to 3 %, for it is divided by another one."""
NETWORK_SPREAD = 0.3
"""Logarithmic spread of a network's bandwidth beyond the range that its name gives: TCP reaches half to all of it."""
COMPUTE_SPREAD = 0.6
"""Logarithmic spread of a GPU's speed where nobody measured it: 1/3 to 3 times in 93 of 100 cases."""


@dataclass(frozen=True)
class Draws:
    """Hold `SAMPLES` equally likely versions of what is not known, each an array of that length.

    Attributes:
        straggling: The share of a step that eight GPUs lose in waiting for each other.
        bandwidth: Logarithm of the real bandwidth relative to NCCL's model.
        ring: Change of that logarithm with each doubling of the GPUs in a host.
        latency: The factor of NCCL's latencies.
        overlap: The share of the communication beside the backward pass, of what is possible at most.
        servers: Uniform in (0, 1), from which the number of parameter servers is made.
        noise: Logarithm of a measurement's error.
        network: A standard normal number, from which the network's bandwidth is made.
        compute: Logarithm of the GPU's speed, where nobody measured it.
    """

    straggling: Floats
    bandwidth: Floats
    ring: Floats
    latency: Floats
    overlap: Floats
    servers: Floats
    noise: Floats
    network: Floats
    compute: Floats


@cache
def draws() -> Draws:
    """Return the samples: points of an additive recurrence, which fill the space evenly and need no seed.

    Source: M. Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018 (R_d sequence).
    """
    ratio = 2.0
    for _ in range(60):
        ratio = (1 + ratio) ** (1 / (_DIMS + 1))
    steps = np.outer(np.arange(1, SAMPLES + 1), ratio ** -np.arange(1.0, _DIMS + 1))
    uniform = np.asarray((0.5 + steps) % 1.0, dtype=np.float64)
    grid = np.linspace(0.0005, 0.9995, 1999)
    normal = np.asarray(np.interp(uniform, grid, [NormalDist().inv_cdf(p) for p in grid]), dtype=np.float64)
    return Draws(
        straggling=STRAGGLING_MEDIAN * np.exp(STRAGGLING_SPREAD * normal[:, 0]),
        bandwidth=BANDWIDTH_SPREAD * normal[:, 1],
        ring=RING_SPREAD * normal[:, 2],
        latency=np.exp(LATENCY_SPREAD * normal[:, 3]),
        overlap=uniform[:, 4],
        servers=uniform[:, 5],
        noise=NOISE * normal[:, 6],
        network=normal[:, 7],
        compute=COMPUTE_SPREAD * normal[:, 8],
    )


def expected_largest(count: int) -> float:
    """Return the expected largest of so many standard normal numbers (G. Blom's approximation, 1958); 0 for one."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
