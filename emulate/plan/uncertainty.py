"""Hold what nobody tells a planner about a training: drawn once, the same in every run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SAMPLES = 8192
_DIMS = 9
# The constants below say how sure one can be before anything is measured. They are round numbers, set by judgement with the
# measurements of benchmarks/data at hand. benchmarks/plan_constants.py halves and doubles each, and chooses them without the
# machine that is then predicted: the figures move little.
STRAGGLING_MEDIAN, STRAGGLING_SPREAD = 0.02, 1.6
"""Share of a step that eight GPUs lose in waiting for the slowest, and its logarithmic spread: 0.1 to 28 % in 90 of 100 cases.

2 % is what steps of equal work differ by on GPUs with a boost clock; the long tail are examples of unequal size and input."""
BANDWIDTH_SPREAD = 0.5
"""Logarithmic spread of the real bandwidth around NCCL's model: half to twice of it in 84 of 100 cases."""
RING_SPREAD = 0.6
"""How much better or worse a ring gets with each doubling of its GPUs, as a logarithm: drivers place rings differently."""
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
    normal = _standard_normal(uniform)
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


def _standard_normal(uniform: Floats) -> Floats:
    grid = np.linspace(0.0005, 0.9995, 1999)
    return np.asarray(np.interp(uniform, grid, [NormalDist().inv_cdf(p) for p in grid]), dtype=np.float64)


def expected_largest(count: int) -> float:
    """Return the expected largest of so many standard normal numbers (G. Blom's approximation, 1958); 0 for one."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
