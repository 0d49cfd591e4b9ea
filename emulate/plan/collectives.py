"""Compute how long an all-reduce takes: NCCL's own cost model, or a table of measurements where there is one.

The links of a machine are read from words such as `NVLink 2 hybrid cube mesh` or `8 x 200 Gb/s InfiniBand`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass

from emulate.errors import UsageError

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


# NCCL's own model of links, in GB/s and direction: NVIDIA/nccl src/graph/topo.h at 069a3d4 (SM60_NVLINK_BW and following,
# PCI_BW, NET_BW). They are what NCCL reaches, somewhat below the data sheets.
_NVLINK_GB_PER_S = {1: 18.0, 2: 20.0, 3: 20.0, 4: 20.6, 5: 40.1}
_BRIDGE_GB_PER_S = 4 * 12.0  # SM86_NVLINK_BW; an RTX 3090 or A6000 has four links, all to one neighbour
_PCIE_3_X16_GB_PER_S = 12.0  # PCI_BW; each generation doubles it
_NETWORK_SHARE = 12.0 / 12.5  # NET_BW: 12 GB/s of 100 Gb/s
# Links of one GPU, from NVIDIA's data sheets of P100, V100, A100, H100 and B200.
_NVLINKS = {1: 4, 2: 6, 3: 12, 4: 18, 5: 18}
_GENERATION_OF_GPU = {"P100": 1, "V100": 2, "A100": 3, "A800": 3, "H100": 4, "H200": 4, "H800": 4, "B200": 5, "GB200": 5}
_INFINIBAND_GBIT = {"QDR": 32, "FDR": 56, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
_NEIGHBOURS_IN_CUBE_MESH = 4  # Each GPU of a DGX-1 is wired to four others (NVIDIA's DGX-1 white paper, figure 4).
_SOCKETS = {"one": 1, "single": 1, "two": 2, "dual": 2, "four": 4}
_SOCKET_CROSSING = 0.5  # NCCL: SKL_QPI_BW 10 and BDW_QPI_BW 6 beside PCI_BW 24 and 12
# What a processor passes on between its GPUs, in GB/s, whatever the generation of PCIe: the geometric mean of NCCL's
# SKL_QPI_BW 10 and AMD_BW 16.
_THROUGH_HOST_GB_PER_S = 12.6


@dataclass(frozen=True)
class Inside:
    """Describe how the GPUs of one host exchange data.

    Attributes:
        kind: `nvlink` or `pcie`.
        gb_per_s: What one GPU sends over its links while it receives as much, in GB/s.
        gpus: The number of GPUs in the host.
        cube_mesh: Whether only some GPUs are neighbours, as in a DGX-1.
        bridged: GB/s between two GPUs with a bridge of their own; 0 without bridges.
        peer_to_peer: Whether GPUs reach each other directly. Else data takes the way through the host's memory.
        sockets: The number of processors that the GPUs are spread over.
    """

    kind: str
    gb_per_s: float
    gpus: int
    cube_mesh: bool = False
    bridged: float = 0.0
    peer_to_peer: bool = True
    sockets: int = 1

    @property
    def hops(self) -> int:
        """Return how many links one hop crosses: two on the way through the host's memory."""
        return 1 if self.kind == "nvlink" or self.peer_to_peer else 2

    def bus_gb_per_s(self, num_gpus: int) -> float:
        """Return the bandwidth of a ring through so many GPUs of the host, in GB/s.

        Without peer-to-peer access every byte passes the processor, which the GPUs of a socket share.
        """
        if num_gpus == 2 and self.bridged:
            return self.bridged
        if self.cube_mesh:
            return self.gb_per_s * min(1.0, (num_gpus - 1) / _NEIGHBOURS_IN_CUBE_MESH)
        if self.kind == "nvlink" or self.peer_to_peer:
            return self.gb_per_s
        per_socket = max(1, self.gpus // self.sockets)
        crossing = _SOCKET_CROSSING if num_gpus > per_socket else 1.0
        return min(self.gb_per_s, _THROUGH_HOST_GB_PER_S) / min(num_gpus, per_socket) * crossing


@dataclass(frozen=True)
class Between:
    """Describe the network between hosts.

    Attributes:
        gb_per_s: What one host sends over all its network cards while it receives as much, in GB/s.
        spread: The factor by which the real bandwidth may be larger or smaller, because the words give a range.
    """

    gb_per_s: float
    spread: float = 1.0


def parse_inside(text: str, gpu: str, gpus_per_host: int) -> Inside:
    """Read the links inside a host.

    Args:
        text: For example `NVSwitch, NVLink 3` or `PCIe 4.0 x16, two sockets, no P2P`.
        gpu: The name of the GPU, which tells the generation of NVLink where the text does not.
        gpus_per_host: How many GPUs a host has.

    Returns:
        The links.

    Raises:
        UsageError: If the text names neither NVLink nor PCIe, or NVLink of an unknown generation.

    Example:
        >>> parse_inside("NVLink 2 hybrid cube mesh", "V100 16GB", 8).bus_gb_per_s(8)
        120.0
    """
    words = text.lower()
    has_nvlink = re.search(r"nvlink|nvswitch|sxm", words) and not re.search(r"(no|without) nvlink", words)
    if has_nvlink and "bridge" not in words:
        generation = _nvlink_generation(text, gpu)
        bandwidth = _NVLINKS[generation] * _NVLINK_GB_PER_S[generation]
        return Inside("nvlink", bandwidth, gpus_per_host, cube_mesh="cube" in words or "mesh" in words)
    if not re.search(r"pcie|pci express|pci-e", words) and not has_nvlink:
        raise UsageError(
            f"link_inside must name NVLink, NVSwitch or PCIe. Received: link_inside={text!r}. "
            "Examples: 'NVSwitch, NVLink 3', 'NVLink 2 hybrid cube mesh', 'PCIe 4.0 x16, two sockets, no P2P'."
        )
    match = re.search(r"pci(?:e|-e| express)?\s*(?:gen\s*)?(\d)(?:\.0)?", words)
    lanes = re.search(r"x\s?(16|8|4)\b", words)
    bandwidth = _PCIE_3_X16_GB_PER_S * 2.0 ** (int(match[1]) - 3 if match else 0) * (int(lanes[1]) / 16 if lanes else 1)
    sockets = re.search(r"(one|single|two|dual|four|[1-9])[\s-]*sockets?", words)
    # NVIDIA's driver gives GeForce cards of 2018 and later no peer-to-peer access over PCIe.
    is_geforce = re.search(r"\brtx\s*[2345]0\d0\b", gpu.lower())
    return Inside(
        "pcie",
        bandwidth,
        gpus_per_host,
        bridged=_BRIDGE_GB_PER_S if has_nvlink else 0.0,
        peer_to_peer=not (re.search(r"(no|without) (p2p|peer)", words) or is_geforce),
        sockets=(_SOCKETS.get(sockets[1]) or int(sockets[1])) if sockets else 1,
    )


def _nvlink_generation(text: str, gpu: str) -> int:
    match = re.search(r"nvlink[\s-]*(\d)", text.lower())
    generation = int(match[1]) if match else next((n for name, n in _GENERATION_OF_GPU.items() if name in gpu.upper()), 0)
    if generation not in _NVLINKS:
        raise UsageError(
            f"NVLink must have a generation of 1 to 5. Received: link_inside={text!r}, gpu={gpu!r}. "
            "Write 'NVLink 3', for example."
        )
    return generation


def parse_between(text: str) -> Between:
    """Read the network between hosts.

    Args:
        text: For example `8 x 200 Gb/s InfiniBand`, `10 to 25 Gb/s Ethernet`, `EDR InfiniBand` or `25GbE`. Of a range the
            geometric mean is taken.

    Returns:
        The network.

    Raises:
        UsageError: If the text has no bandwidth.

    Example:
        >>> parse_between("8 x 200 Gb/s InfiniBand").gb_per_s
        192.0
    """
    words = text.lower()
    cards = re.search(r"(\d+)\s*x\s*(?=[\d.]|[qfehnx]dr\b|efa)", words)
    speeds = re.findall(r"([\d.]+)(?:\s*(?:to|-)\s*([\d.]+))?\s*(gbit|gb/s|gbps|gbe|g\b|gigabit)", words)
    names = [speed for name, speed in _INFINIBAND_GBIT.items() if re.search(rf"\b{name.lower()}\b", words)]
    if not speeds and not names:
        raise UsageError(
            f"link_between must give a bandwidth. Received: link_between={text!r}. "
            "Examples: '25 Gb/s Ethernet', '10 to 25 Gb/s Ethernet', '8 x 200 Gb/s InfiniBand', 'EDR InfiniBand'."
        )
    low = float(speeds[0][0]) if speeds else float(names[0])
    high = float(speeds[0][1] or low) if speeds else low
    in_bytes = 8 if re.search(r"\d\s*GB/s", text) else 1
    gbit = math.sqrt(low * high) * (int(cards[1]) if cards else 1) * in_bytes
    return Between(gb_per_s=gbit / 8 * _NETWORK_SHARE, spread=math.sqrt(high / low))
