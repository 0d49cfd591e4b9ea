"""The GPUs of a cluster: held from before the first host starts until the last one is gone."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from emulate.cluster.plan import ClusterPlan
from emulate.devices import GpuLease, GpuShare, find_gpus, share_out


class KeepsGpus(Protocol):
    """Whoever keeps clusters that do nothing and may be on GPUs."""

    def let_go_of_gpus(self) -> None:
        """End them, and return when they have ended."""


_keepers: weakref.WeakSet[KeepsGpus] = weakref.WeakSet()
_lock = threading.Lock()


def ask_before_waiting(keeper: KeepsGpus) -> None:
    """Have somebody let go of idle clusters on GPUs, from whatever thread, when another cluster of this process needs them.

    Args:
        keeper: Who is asked, for as long as it is there.
    """
    with _lock:
        _keepers.add(keeper)


def _ask_keepers() -> None:
    with _lock:
        asked = list(_keepers)
    for keeper in asked:
        keeper.let_go_of_gpus()


@dataclass(frozen=True)
class GpuHold:
    """What a cluster has of this machine's GPUs.

    Attributes:
        shares: One for each host that trains.
        text: What the user should know about it.
    """

    shares: tuple[GpuShare, ...]
    text: str
    _lease: GpuLease

    @property
    def kind(self) -> str:
        """What devices are: `gpu` or `gpu slice`."""
        return "gpu slice" if self.shares[0].is_sliced else "gpu"

    @classmethod
    def take(cls, plan: ClusterPlan) -> GpuHold:
        """Wait for the GPUs, count their free memory, and share them out.

        Args:
            plan: What is to run on them.

        Returns:
            The hold, to be let go.

        Raises:
            Unavailable: When they do not suffice, or are not free in time.
        """
        lease = GpuLease([gpu.uuid for gpu in find_gpus().gpus], ask=_ask_keepers)
        try:
            allotment = share_out(find_gpus(), plan.topology)
        except BaseException:
            lease.close()
            raise
        return cls(allotment.hosts, allotment.text, lease)

    def adopt(self) -> None:
        """The calling thread runs the cluster from now on."""
        self._lease.adopt()

    def let_go(self) -> None:
        """Give them to the next cluster."""
        self._lease.close()
