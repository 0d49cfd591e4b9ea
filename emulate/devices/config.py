"""Answer a program's calls to `tf.config` and `tf.test`: it sees emulated GPUs.

Calls of TensorFlow, Keras and gpudist pass through, which see real devices. With GPUs faked for everybody Keras chooses XLA and
CuDNN kernels that are not there.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from emulate.devices import upstream
from emulate.devices.gpus import EmulatedGpus
from emulate.devices.names import DeviceNames
from emulate.imports import tf


class DeviceAnswers:
    """Provide one method for each function of `tf.config` and `tf.test` about GPUs, under the same name.

    A method gets TensorFlow's own function first, for what is not about GPUs.
    """

    def __init__(self, gpus: EmulatedGpus, names: DeviceNames) -> None:
        self._gpus = gpus
        self._names = names
        self._peak = 0

    def list_physical_devices(self, real: Any, device_type: str | None = None) -> list[Any]:
        if device_type == "GPU":
            return self._gpus.physical
        return _others(real(device_type)) + (self._gpus.physical if device_type is None else [])

    def list_logical_devices(self, real: Any, device_type: str | None = None) -> list[Any]:
        if device_type not in (None, "GPU"):
            return list(real(device_type))
        gpus = self._gpus.logical(real)
        return gpus if device_type == "GPU" else _others(real()) + gpus

    def get_visible_devices(self, real: Any, device_type: str | None = None) -> list[Any]:
        if device_type == "GPU":
            return self._gpus.visible
        return _others(real(device_type)) + (self._gpus.visible if device_type is None else [])

    def set_visible_devices(self, real: Any, devices: Any, device_type: str | None = None) -> None:
        wanted = [devices] if hasattr(devices, "device_type") else list(devices)
        for device in wanted:
            if device_type is not None and device.device_type != device_type:
                raise ValueError(f"Unrecognized device: {device!r}")
        if device_type in (None, "GPU"):
            self._gpus.show([d for d in wanted if d.device_type == "GPU"])
        # The CPU is never hidden: the emulated GPUs are made of it.

    def get_logical_device_configuration(self, real: Any, device: Any) -> Any:
        return self._gpus.split_of(device) if _is_gpu(device) else real(device)

    def set_logical_device_configuration(self, real: Any, device: Any, logical_devices: Any) -> None:
        if _is_gpu(device):
            self._gpus.split(device, list(logical_devices))
        else:
            self._gpus.split_cpu_as_program(list(logical_devices))

    def get_memory_growth(self, real: Any, device: Any) -> bool | None:
        return self._gpus.growth_of(device) if _is_gpu(device) else real(device)

    def set_memory_growth(self, real: Any, device: Any, enable: bool) -> None:
        if _is_gpu(device):
            self._gpus.set_growth(device, enable)
        else:
            real(device, enable)

    def get_device_details(self, real: Any, device: Any) -> dict[str, Any]:
        return self._gpus.details(real, device) if _is_gpu(device) else real(device)

    def get_memory_info(self, real: Any, device: str) -> dict[str, int]:
        name = self._names.real(device)
        if self._gpus.kind == "GPU":
            return dict(real(name))
        with open("/proc/self/statm", encoding="ascii") as file:  # an emulated GPU's memory is that of the host
            current = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self._peak = max(self._peak, current)
        return {"current": current, "peak": self._peak}

    def reset_memory_stats(self, real: Any, device: str) -> None:
        name = self._names.real(device)
        if self._gpus.kind == "GPU":
            real(name)
        self._peak = 0

    def get_memory_usage(self, real: Any, device: str) -> int:
        name = self._names.real(device)
        return int(real(name)) if self._gpus.kind == "GPU" else self.get_memory_info(real, device)["current"]

    def is_gpu_available(self, real: Any, cuda_only: bool = False, min_cuda_compute_capability: Any = None) -> bool:
        capabilities = [
            tuple(self._gpus.details(tf.config.experimental.get_device_details, device)["compute_capability"])
            for device in self._gpus.visible
        ]
        return any(tuple(min_cuda_compute_capability or ()) <= capability for capability in capabilities)

    def gpu_device_name(self, real: Any) -> str:
        return "/device:GPU:0" if self._gpus.num_logical else ""

    def is_built_with_cuda(self, real: Any) -> bool:
        return True

    def is_built_with_gpu_support(self, real: Any) -> bool:
        return True

    def list_local_devices(self, real: Any, session_config: Any = None) -> list[Any]:
        attributes = upstream.device_attributes()
        # The function makes every device it lists anew, and would take a GPU's memory once more.
        without = tf.compat.v1.ConfigProto()
        without.CopyFrom(session_config or without)
        without.device_count["GPU"] = 0
        return list(real(without)) + [
            attributes(name=f"/device:GPU:{i}", device_type="GPU", physical_device_desc=f"device: {i}, name: gpudist GPU")
            for i in range(self._gpus.num_logical)
        ]


def answer_program(answers: DeviceAnswers) -> None:
    """Put the answers in place of TensorFlow's functions, wherever its public interface spells them."""
    methods = {name: method for name, method in vars(DeviceAnswers).items() if not name.startswith("_")}
    replaced: dict[int, Callable[..., Any]] = {}
    for module in upstream.defining_modules():
        for name in methods.keys() & vars(module).keys():
            real = getattr(module, name)
            replaced.setdefault(id(real), _for_program(real, functools.partial(methods[name], answers)))
    for module in upstream.defining_modules() + upstream.public_modules():
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])


def _for_program(real: Callable[..., Any], emulated: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return emulated(real, *args, **kwargs) if is_program(1) else real(*args, **kwargs)

    return answer


def _others(devices: Iterable[Any]) -> list[Any]:
    return [device for device in devices if not _is_gpu(device)]


def _is_gpu(device: Any) -> bool:
    return getattr(device, "device_type", None) == "GPU"


_FRAMEWORK = frozenset({"tensorflow", "keras", "tf_keras", "emulate"})
_TRANSPARENT = "tensorflow.python.autograph."


def is_program(depth: int) -> bool:
    """Return whether the function `depth` frames above the caller belongs to the program.

    Autograph calls a program's functions on its behalf, so its frames are looked through.

    Args:
        depth: 1 for the caller of the function that asks.

    Returns:
        True for the program, False for TensorFlow, Keras and this package.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        name = _module(frame)
        if not name.startswith(_TRANSPARENT):
            return name.partition(".")[0] not in _FRAMEWORK
        frame = frame.f_back
    return True


def calling_module(depth: int) -> str:
    """Return the name of the calling module, with `depth` as for `is_program`."""
    return _module(sys._getframe(depth + 1))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
