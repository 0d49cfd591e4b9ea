"""Give a host this machine's GPUs, whole or in slices of fixed memory. Only this module touches the GPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from emulate.devices import upstream
from emulate.devices.gpus import VISIBLE, EmulatedGpus
from emulate.devices.inventory import keep_kernels_in
from emulate.devices.plan import DevicePlan, GpuShare, Note
from emulate.errors import Unavailable
from emulate.imports import tf

NONE = "-1"
"""No GPU, as CUDA_VISIBLE_DEVICES says it."""


def hide_gpus() -> None:
    """Leave this process without GPUs: where the CPU emulates them TensorFlow must not take the memory of real ones."""
    _find_gpus(NONE)


def _find_gpus(shown: str) -> list[Any]:
    """Have TensorFlow find the GPUs that the variable shows.

    CUDA reads it when it is first asked which GPUs there are. A program that sets it before it imports TensorFlow means the
    GPUs of its host, not those of the machine; it finds the variable as it was.
    """
    if shown != NONE:
        from gpudist_core.environments import load_cuda_libraries

        load_cuda_libraries()
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = shown
    try:
        return list(upstream.context().list_physical_devices("GPU"))
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


def layout(share: GpuShare, splits: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the logical GPUs to make of each physical one.

    Args:
        share: The host's GPUs.
        splits: By the device's number the MiB of the parts into which the program itself splits it.

    Returns:
        For each physical GPU the MiB of its logical ones; empty for one that stays whole. Parts of a slice that ask for more
        than the slice has get equal shares of it.
    """
    made: list[list[int]] = [[] for _ in share.visible]
    for device, owner in enumerate(share.owners):
        slice_ = share.slices[owner][share.owners[:device].count(owner)] if share.slices else None
        parts = list(splits.get(device, ()))
        if slice_ is not None and (not parts or sum(parts) > slice_):
            parts = [slice_ // max(1, len(parts))] * max(1, len(parts))
        made[owner] += parts
    return tuple(map(tuple, made))


class PhysicalGpus(EmulatedGpus):
    """Present one host's real GPUs to the program: as many as the topology says, each whole or a slice.

    Args:
        plan: What the host was given, with its share of the GPUs.
        note: Says something that the report shows.

    Raises:
        Unavailable: When TensorFlow does not see the GPUs of the share.
    """

    kind = "GPU"

    def __init__(self, plan: DevicePlan, note: Note) -> None:
        assert plan.gpus is not None, "a host on GPUs has a share of them"
        self._share = plan.gpus
        shown = ",".join(self._share.visible)
        keep_kernels_in(self._share.kernels)
        super().__init__(plan, note, shown)
        self._real = _find_gpus(shown)
        if len(self._real) != len(self._share.visible):
            raise Unavailable(
                f"TensorFlow must see the GPUs that a host is given. Received: "
                f"gpus={', '.join(self._share.visible)}, of which TensorFlow sees {len(self._real)}. "
                "Check `gpudist devices`; TensorFlow's CUDA libraries come with tensorflow[and-cuda]."
            )
        self._configure()
        self._look_before_start()

    def _look_before_start(self) -> None:
        """Hide GPUs that the program hides with CUDA_VISIBLE_DEVICES also from operations without a device."""
        context, lock = upstream.context(), threading.RLock()

        def start() -> None:
            with lock:
                if vars(context).pop("ensure_initialized", None) is not None:
                    self.hide_unseen()
            context.ensure_initialized()

        context.ensure_initialized = start

    def hide_unseen(self) -> None:
        """Keep TensorFlow from the GPUs that the program hides by the variable, before the runtime or a server takes them."""
        if not upstream.is_initialized() and self._visible is None and len(self._all) < self.plan.num_devices:
            self._show_only(self._all)

    def split_cpu(self) -> None:
        """Keep the CPU as it is: only the GPUs changed."""
        self.version += 1
        self._configure()

    def split_cpu_as_program(self, parts: list[Any]) -> None:
        """Split the CPU as the program asks: the devices of the topology are not made of it."""
        context = upstream.context()
        context.set_logical_device_configuration(context.list_physical_devices("CPU")[0], parts)
        self.cpu_split = len(parts)

    @property
    def num_cpus(self) -> int:
        """Return the number of logical CPUs."""
        return self.cpu_split or 1

    @property
    def num_for_strategies(self) -> int:
        """Return on how many devices a strategy without named devices trains."""
        return self.num_logical or self.num_cpus

    def logical(self, real: Callable[[str], Sequence[Any]]) -> list[Any]:
        """Return the logical GPUs that the program made visible; with several hosts, those of all, as TensorFlow lists them."""
        return self._listed([gpu for gpu in real("GPU") if int(gpu.name.rpartition(":")[2]) < self.num_logical])

    def details(self, real: Callable[[Any], dict[str, Any]], device: Any) -> dict[str, Any]:
        """Return the details of the physical GPU that a device is, or is part of."""
        self._check_known([device])
        return dict(real(self._owner_of(device)))

    def set_growth(self, device: Any, enable: bool) -> None:
        """Set memory growth of a whole GPU. A slice has its memory from the start."""
        super().set_growth(device, enable)
        if not self._share.is_sliced:
            upstream.context().set_memory_growth(self._owner_of(device), enable)

    def _owner_of(self, device: Any) -> Any:
        number = int(device.name.rsplit(":", 1)[1])
        return self._real[self._share.owners[min(number, len(self._share.owners) - 1)]]

    def _configure(self) -> None:
        """Tell TensorFlow, which is possible until its runtime is up."""
        context = upstream.context()
        splits = {int(d.name.rsplit(":", 1)[1]): [p.memory_limit for p in parts] for d, parts in self._splits.items()}
        for gpu, parts in zip(self._real, layout(self._share, splits), strict=True):
            if parts:
                wanted = [tf.config.LogicalDeviceConfiguration(memory_limit=size) for size in parts]
                context.set_logical_device_configuration(gpu, wanted)
        if self._visible is not None:
            self._show_only(self._visible)

    def _show_only(self, devices: Sequence[Any]) -> None:
        shown = self._real if self._share.is_sliced else [self._owner_of(device) for device in devices]
        upstream.context().set_visible_devices(shown if devices else [], "GPU")
