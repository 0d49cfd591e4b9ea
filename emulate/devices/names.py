"""Translate device names: from what a program writes ("/gpu:1", "GPU:1", "/device:GPU:1", ...) to the logical device here.

Every device name that reaches TensorFlow to place an operation passes through `DeviceNames`. This holds for everybody,
TensorFlow's own code included: a GPU's name can only have come from the program.
"""

from __future__ import annotations

import functools
from typing import Any

from emulate.devices import upstream
from emulate.devices.gpus import EmulatedGpus
from emulate.errors import UsageError
from emulate.imports import tf
from emulate.point import instead_of

_HERE = (None, "localhost")


class DeviceNames:
    """Translate names of emulated GPUs to names of logical CPUs. Names of real GPUs are only checked.

    TensorFlow does not validate device names: an unknown one lands on CPU:0 in silence. Here it is an error, and in the
    reference, which has one device, it means that one.
    """

    def __init__(self, gpus: EmulatedGpus) -> None:
        self._gpus = gpus
        self._known: dict[str, str] = {}
        self._version = gpus.version

    def real(self, device: Any) -> Any:
        """Return the device that is really used.

        Args:
            device: A name, a DeviceSpec or a logical device; anything else is returned as it is.

        Returns:
            The name of a logical CPU, or of a device on another host.

        Raises:
            UsageError: When this host has no such device.
        """
        text = device if isinstance(device, str) else _name_of(device)
        if not text:
            return device
        if self._version != self._gpus.version:
            self._known.clear()
            self._version = self._gpus.version
        if text not in self._known:  # this is called for every operation that is traced
            self._known[text] = self._translate(text)
        return self._known[text]

    def of_strategy(self, devices: Any) -> list[Any]:
        """Return the devices that a strategy uses for those that a program names.

        Args:
            devices: The names, or logical devices, that the program gave.

        Returns:
            Names of logical CPUs, in that order; in the reference one.

        Raises:
            UsageError: When this host has fewer.
        """
        named = [devices] if isinstance(devices, str) else list(devices)
        if self._gpus.plan.reference:
            reals = [self.real(device) for device in reversed(named)]
            return list({int(tf.DeviceSpec.from_string(name).device_index or 0): name for name in reals}.values())[::-1]
        if len(named) > max(self._gpus.num_cpus, self._gpus.num_logical):
            names = [d if isinstance(d, str) else _name_of(d) for d in named]
            raise UsageError(
                f"A strategy uses at most the devices that its host has. Received: {len(named)} devices {names}, and this host "
                f"has {self._there()}. Name fewer, or verify on a topology with {len(named)} devices per host."
            )
        return [self.real(device) for device in named]

    def all_for_strategy(self, prefix: str = "", hosts: int = 1) -> list[str]:
        """Return the devices of a strategy without named devices: those of one host, or of so many virtual ones."""
        kind = self._gpus.kind if self._gpus.num_logical else "CPU"
        return [f"{prefix}/device:{kind}:{i}" for i in range(self._gpus.num_for_strategies * hosts)]

    def _translate(self, text: str) -> str:
        spec = tf.DeviceSpec.from_string(text)
        if spec.device_type not in ("GPU", "CPU"):
            return text
        index = self._index(spec, text)
        kind = "CPU" if spec.device_type == "CPU" else self._gpus.kind
        if spec.device_type == kind and index == spec.device_index:
            return text
        return str(spec.replace(device_type=kind, device_index=index).to_string())

    def _index(self, spec: Any, text: str) -> int | None:
        if spec.device_index is None:
            return None if spec.device_type == "CPU" else 0
        index = int(spec.device_index)
        available = self._gpus.num_logical if spec.device_type == "GPU" else self._gpus.num_cpus
        if index < available or spec.job not in _HERE:
            return index
        if self._gpus.plan.reference:
            return 0
        raise UsageError(
            f"A device that a program names must be there. Received: device={text!r}, and this host has {self._there()}. "
            f"Name one of these, or verify on a topology with more devices per host, 1x{index + 1} say."
        )

    def _there(self) -> str:
        logical = self._gpus.num_logical
        gpus = f"GPU:0 to GPU:{logical - 1}" if logical > 1 else ("GPU:0 only" if logical else "no visible GPU")
        cpus = self._gpus.num_cpus
        return gpus + (f" and CPU:0 to CPU:{cpus - 1}" if cpus > 1 else " and CPU:0")


def _name_of(device: Any) -> str | None:
    """Return the name of a DeviceSpec or a logical device; None for anything else."""
    name = device.to_string() if hasattr(device, "to_string") else getattr(device, "name", None)
    return name if isinstance(name, str) else None


def translate_placement(names: DeviceNames) -> None:
    """Have `tf.device`, `Graph.device`, strategies and datasets place on the logical CPU that a name means."""
    for cls in (upstream.context_class(), upstream.graph_class()):

        @instead_of(cls, "device")
        def device(real: Any, self: Any, name: Any) -> Any:
            if not callable(name):
                return real(self, names.real(name))

            @functools.wraps(name)
            def chosen(operation: Any) -> Any:  # TF 1's device functions choose a device for each operation
                return names.real(name(operation))

            return real(self, chosen)

    def translated(real: Any, *args: Any, **kwargs: Any) -> Any:
        """Translate the first argument, and perhaps others, which are devices."""
        return real(*map(names.real, args), **{key: names.real(value) for key, value in kwargs.items()})

    instead_of(upstream.device_util(), "canonicalize")(translated)
    for module in (upstream.prefetching(), *upstream.data_modules()):
        instead_of(module, "copy_to_device")(translated)
