"""Hold the GPUs of a cluster from before its first host starts until its last host is gone."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from emulate.cluster.plan import ClusterPlan
from emulate.cluster.views import outermost
from emulate.devices import (
    PATIENCE,
    Allotment,
    Gpu,
    GpuLease,
    GpuShare,
    about_compiling,
    ask_until,
    find_gpus,
    is_short,
    kernel_folder,
    share_out,
    what_tensorflow_says,
)


class KeepsGpus(Protocol):
    """Define who keeps idle clusters that may be on GPUs."""

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
    """Hold a cluster's share of this machine's GPUs."""

    _plan: ClusterPlan
    _allotment: Allotment
    _gpus: tuple[Gpu, ...]
    _lease: GpuLease

    @functools.cached_property
    def shares(self) -> tuple[GpuShare, ...]:
        """Return one share for each host that trains."""
        return tuple(replace(share, kernels=str(self._kernels or "")) for share in self._allotment.hosts)

    @functools.cached_property
    def text(self) -> str:
        """Return what the user should know about the GPUs."""
        if not self.compiling:
            return self._allotment.text
        kept = f"they are kept in {self._kernels}" if self._kernels else "no folder keeps them for later runs (CUDA_CACHE_PATH)"
        until = "Until then runs need a longer --timeout (in pytest --gpudist-deadline)."
        return f"{self._allotment.text} {self.compiling}; {kept}. {until}"

    @functools.cached_property
    def compiling(self) -> str:
        """Return what the first use of the GPUs waits for; empty if TensorFlow has kernels for all."""
        return about_compiling(self._gpus, what_tensorflow_says())

    @functools.cached_property
    def _kernels(self) -> Path | None:
        views = outermost(self._plan.views)
        hidden = [] if Path("/") in views else views  # the root folder gets no view
        return kernel_folder(hidden, {**os.environ, **self._plan.environment})

    @property
    def kind(self) -> str:
        """Return the kind of the devices: `gpu` or `gpu slice`."""
        return "gpu slice" if self._allotment.is_sliced else "gpu"

    @classmethod
    def take(cls, plan: ClusterPlan) -> GpuHold:
        """Wait for the GPUs, count their free memory, and share them out.

        Where they are short only because memory is in use, it may be that of a cluster that has just ended: some seconds more.

        Args:
            plan: What is to run on them.

        Returns:
            The hold, to be let go.

        Raises:
            Unavailable: When they do not suffice, or are not free in time.
        """
        lease = GpuLease([gpu.uuid for gpu in find_gpus().gpus], ask=_ask_keepers)
        try:
            there = ask_until(find_gpus, lambda inventory: not is_short(inventory, plan.topology), PATIENCE)
            allotment = share_out(there, plan.topology)
        except BaseException:
            lease.close()
            raise
        chosen = {uuid for share in allotment.hosts for uuid in share.visible}
        return cls(plan, allotment, tuple(gpu for gpu in there.gpus if gpu.uuid in chosen), lease)

    def adopt(self) -> None:
        """Note that the calling thread runs the cluster from now on."""
        self._lease.adopt()

    def let_go(self) -> None:
        """Give them to the next cluster."""
        self._lease.close()
