"""Compute how long an all-reduce takes: NCCL's own cost model, or a table of measurements where there is one."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from emulate.plan.links import Between, Inside

# Microseconds, NVIDIA/nccl src/graph/tuning.cc at 01afd20 (baseLat, hwLat): by algorithm and protocol, simple and LL.
_BASE_US = {("ring", "simple"): 8.4, ("ring", "ll"): 3.6, ("tree", "simple"): 0.0, ("tree", "ll"): 4.4}
_HOP_US = {
    "nvlink": {("ring", "simple"): 3.4, ("ring", "ll"): 0.47, ("tree", "simple"): 28.0, ("tree", "ll"): 0.52},
    "pcie": {("ring", "simple"): 5.7, ("ring", "ll"): 1.0, ("tree", "simple"): 28.0, ("tree", "ll"): 1.0},
    "network": {("ring", "simple"): 9.6, ("ring", "ll"): 2.7, ("tree", "simple"): 50.0, ("tree", "ll"): 5.0},
}
# Shares of the bandwidth, same file: LL sends a flag with every word and keeps little in flight, a tree has 0.9 of a ring.
_BANDWIDTH_SHARE = {("ring", "simple"): 1.0, ("ring", "ll"): 0.25, ("tree", "simple"): 0.9, ("tree", "ll"): 0.9 / 3.8}


@dataclass(frozen=True)
class BandwidthTable:
    """Hold measured bus bandwidths of all-reduce by message size.

    Attributes:
        num_gpus: How many GPUs took part.
        points: (bytes, GB/s) in increasing order of bytes. Bus bandwidth is bytes x 2(n-1)/n by seconds.
    """

    num_gpus: int
    points: tuple[tuple[float, float], ...]

    def bus_gb_per_s(self, message_bytes: float) -> float:
        """Return the bus bandwidth at a message size, interpolated between logarithms, in GB/s.

        Above the largest message the bandwidth stays, below the smallest the time stays.
        """
        sizes, speeds = zip(*self.points, strict=True)
        if message_bytes < sizes[0]:
            return float(speeds[0] * message_bytes / sizes[0])
        if message_bytes >= sizes[-1]:
            return float(speeds[-1])
        at = max(1, bisect_left(sizes, message_bytes))
        part = math.log(message_bytes / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
        return float(speeds[at - 1] * (speeds[at] / speeds[at - 1]) ** part)


@dataclass(frozen=True)
class Ring:
    """Describe the way of an all-reduce: so many GPUs in so many hosts.

    Attributes:
        num_gpus: In all hosts together.
        num_hosts: How many hosts they are in.
        inside: The links inside a host; None where hosts have one GPU.
        between: The network; None where one host is enough.
        tables: Measurements, which are preferred for their numbers of GPUs.
    """

    num_gpus: int
    num_hosts: int
    inside: Inside | None
    between: Between | None
    tables: tuple[BandwidthTable, ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Return the bus bandwidth of large messages: the slowest link of the ring, in GB/s."""
        per_host = self.num_gpus // self.num_hosts
        speeds = [self.inside.bus_gb_per_s(per_host)] if self.inside and per_host > 1 else []
        speeds += [self.between.gb_per_s] if self.between and self.num_hosts > 1 else []
        return min(speeds)


def all_reduce_seconds(ring: Ring, message_bytes: float) -> tuple[float, float]:
    """Return the time of one all-reduce: the part of latency, and the part that the bandwidth decides.

    Takes the fastest of NCCL's algorithms and protocols, as NCCL does; a measured table where one has this number of GPUs.

    Args:
        ring: The way; at least two GPUs.
        message_bytes: The size of one message in bytes.

    Returns:
        Seconds of latency and seconds of transfer.
    """
    count = ring.num_gpus
    for table in ring.tables:
        if table.num_gpus == count:
            whole = message_bytes * 2 * (count - 1) / count / table.bus_gb_per_s(message_bytes) / 1e9
            transfer = message_bytes * 2 * (count - 1) / count / table.points[-1][1] / 1e9
            return max(0.0, whole - transfer), transfer
    return min((_nccl_seconds(ring, message_bytes, *way) for way in _BANDWIDTH_SHARE), key=sum)


def _nccl_seconds(ring: Ring, message_bytes: float, algorithm: str, protocol: str) -> tuple[float, float]:
    """Return latency and transfer as ncclTopoTuneModel (tuning.cc) computes them."""
    way = (algorithm, protocol)
    per_host = ring.num_gpus // ring.num_hosts
    inside = _HOP_US[ring.inside.kind][way] * ring.inside.hops if ring.inside else 0.0
    network = _HOP_US["network"][way]
    if algorithm == "ring":
        steps, between = 2 * (ring.num_gpus - 1), 2 * (ring.num_hosts - 1)
        micros = (steps - between) * inside + between * network
        factor = 2 * (ring.num_gpus - 1) / ring.num_gpus
    else:
        micros = 2 * ((per_host - 1) * inside + math.log2(ring.num_hosts) * network)
        factor = 2.0
    transfer = message_bytes * factor / (ring.gb_per_s * _BANDWIDTH_SHARE[way] * 1e9)
    return (_BASE_US[way] + micros) / 1e6, transfer
