"""The GPUs of a cluster: held from before the first host starts until the last one is gone."""

from __future__ import annotations

from dataclasses import dataclass

from emulate.cluster.plan import ClusterPlan
from emulate.devices import GpuLease, GpuShare, find_gpus, share_out


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
        lease = GpuLease([gpu.uuid for gpu in find_gpus().gpus])
        try:
            allotment = share_out(find_gpus(), plan.topology)
        except BaseException:
            lease.close()
            raise
        return cls(allotment.hosts, allotment.text, lease)

    def let_go(self) -> None:
        """Give them to the next cluster."""
        self._lease.close()
