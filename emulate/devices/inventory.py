"""List the GPUs of this machine as the driver (NVML) reports them. This starts no CUDA, so that the process can still fork.

Of a GPU for which TensorFlow ships no kernels the driver compiles them from PTX at first use, if it can. TensorFlow names what
it was built for `sm_80`, machine code alone, or `compute_90`, machine code and PTX (its configure.py). The wheels of 2.20 and
2.21 have machine code for compute capability 6.0, 7.0, 8.0, 8.9 and 9.0, and PTX of 9.0 (of version 8.5, which is that of CUDA
12.5): what comes after Hopper depends on the driver. TensorFlow's log says of this that it "could take 30 minutes or longer".
On an H200 with an empty cache a first verification took 21 s in all (2.20): nothing had to be compiled.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

MIB = 1 << 20
_PROHIBITED = ", whose compute mode is prohibited: `nvidia-smi -c DEFAULT` as root changes that"
_NO_INSTANCE = (
    ", in MIG mode without an instance: `nvidia-smi mig -cgi PROFILE -C` as root makes one, `nvidia-smi -mig 0` ends the mode"
)


@dataclass(frozen=True)
class Gpu:
    """Describe one GPU, or one MIG instance of a GPU.

    Attributes:
        index: The number of the GPU in the driver's order, that of the PCI bus.
        uuid: What CUDA_VISIBLE_DEVICES takes.
        name: The model.
        total: Bytes of memory.
        free: Bytes that nobody uses now.
        capability: CUDA's compute capability.
        is_part: Whether it is a MIG instance, of which CUDA shows one to a process.
        is_exclusive: Whether it takes one process at a time (compute mode EXCLUSIVE_PROCESS, which many clusters set).
        unusable: Why nothing can run on it; empty where it can.
    """

    index: int
    uuid: str
    name: str
    total: int
    free: int
    capability: tuple[int, int] = (0, 0)
    is_part: bool = False
    is_exclusive: bool = False
    unusable: str = ""

    @property
    def has_tf32(self) -> bool:
        """Return whether float32 matrix products may be rounded to TF32 (Ampere and later)."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Inventory:
    """List the GPUs that this process may use.

    Attributes:
        gpus: In the order of CUDA_VISIBLE_DEVICES, else of the driver.
        driver: The driver's version; None where there is none.
        why: Why there is no GPU; empty where there is one.
        left_out: Each GPU that is there and cannot be used, with the reason.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    why: str = ""
    left_out: tuple[str, ...] = ()

    def idle(self, uuids: Collection[str] | None = None) -> Inventory:
        """Return the inventory as if nobody used these GPUs. None means all GPUs."""
        freed = [replace(gpu, free=gpu.total) if uuids is None or gpu.uuid in uuids else gpu for gpu in self.gpus]
        return replace(self, gpus=tuple(freed))

    @property
    def beside(self) -> str:
        """Return the text about GPUs that are left out beside usable ones; empty if there are none."""
        return f"; left out: {', '.join(self.left_out)}" if self.gpus and self.left_out else ""


def find_gpus() -> Inventory:
    """Ask the driver, and leave out what CUDA_VISIBLE_DEVICES hides and what nothing can run on.

    Returns:
        The GPUs, or why there is none.

    Example:
        >>> inventory = find_gpus()
        >>> bool(inventory.gpus) != bool(inventory.why)
        True
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Inventory(why=f"no NVIDIA driver answers: {error}")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        all_gpus = [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _told(pynvml, index)]
    except pynvml.NVMLError as error:
        return Inventory(why=f"the NVIDIA driver cannot say which GPUs there are: {error}")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return _shown(all_gpus, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _shown(all_gpus: Sequence[Gpu], driver: str, wanted: str | None) -> Inventory:
    shown = visible(all_gpus, wanted)
    if not all_gpus:
        return Inventory((), driver, "the NVIDIA driver finds no GPU")
    if not shown:
        return Inventory((), driver, f"CUDA_VISIBLE_DEVICES={wanted!r} hides all {len(all_gpus)}")
    gpus = tuple(gpu for gpu in shown if not gpu.unusable)
    left_out = tuple(f"GPU {gpu.index} ({gpu.name}{gpu.unusable})" for gpu in shown if gpu.unusable)
    return Inventory(gpus, driver, "" if gpus else f"no GPU can be used: {', '.join(left_out)}", left_out)


def visible(gpus: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves. Like CUDA, ignore everything after an entry that matches none.

    Args:
        gpus: All GPUs.
        wanted: The variable; None where it is not set.

    Returns:
        Those it names, in its order: by number, or by the beginning of a UUID. Numbers count in the order of the PCI bus.
    """
    if wanted is None:
        return tuple(gpus)
    named: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None:
            break
        if gpu in named:  # CUDA then shows none at all
            return ()
        named.append(gpu)
    return tuple(named)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    matching = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _told(nvml: Any, index: int) -> list[Gpu]:
    """Return what the driver reports about one GPU.

    A GPU that it cannot report (it fell off the bus) does not affect others.
    """
    try:
        return list(_gpus_at(nvml, index))
    except nvml.NVMLError as error:
        return [Gpu(index, "", "", 0, 0, unusable=f"of which the driver cannot tell more: {error}")]


def _gpus_at(nvml: Any, index: int) -> Iterator[Gpu]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name, capability = _text(nvml.nvmlDeviceGetName(device)), tuple(nvml.nvmlDeviceGetCudaComputeCapability(device))
    mode, is_split = nvml.NVML_COMPUTEMODE_DEFAULT, False
    with contextlib.suppress(nvml.NVMLError_NotSupported):  # by a GPU of a virtual machine
        mode = nvml.nvmlDeviceGetComputeMode(device)
    with contextlib.suppress(nvml.NVMLError_NotSupported):
        is_split = nvml.nvmlDeviceGetMigMode(device)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    parts = [] if is_split else [device]
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device) if is_split else 0):
        with contextlib.suppress(nvml.NVMLError_NotFound):
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, i))
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED or not parts:
        why = _NO_INSTANCE if is_split else _PROHIBITED
        yield Gpu(index, _text(nvml.nvmlDeviceGetUUID(device)), name, 0, 0, capability, unusable=why)
        return
    exclusive = mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    for part in parts:
        total, free = _memory(nvml, part)
        shown = f"{name} (MIG)" if is_split else name
        yield Gpu(index, _text(nvml.nvmlDeviceGetUUID(part)), shown, total, free, capability, is_split, exclusive)


def _memory(nvml: Any, device: Any) -> tuple[int, int]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
    except nvml.NVMLError_NotSupported:  # a GPU that shares the processor's memory
        shared = psutil.virtual_memory()
        return int(shared.total), int(shared.available)
    return int(memory.total), int(memory.free)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


CACHE_PATH, CACHE_SIZE, CACHE_OFF = "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE", "CUDA_CACHE_DISABLE"
_MOST_BYTES = 4 << 30  # CUDA's own limit; its default is a quarter of that, and what does not fit is compiled again


def to_compile(gpus: Iterable[Gpu], answer: Mapping[str, Any]) -> list[Gpu]:
    """Return the GPUs whose kernels the driver must compile from PTX: one of each model.

    Args:
        gpus: Some GPUs.
        answer: What `what_tensorflow_says` answered.

    Returns:
        Those whose compute capability has another first number than each one that TensorFlow was built for, or is below them.
    """
    built = answer.get("built_for", ())
    exact = [_capability(target) for target in built]
    ptx = [_capability(target) for target in built if target.startswith("compute_")]
    needy = (
        gpu
        for gpu in gpus
        if not any(capability[0] == gpu.capability[0] and capability <= gpu.capability for capability in exact)
        and any(capability <= gpu.capability for capability in ptx)
    )
    return list({(gpu.name, gpu.capability): gpu for gpu in needy}.values())


def why_not_compiled(gpus: Iterable[Gpu], answer: Mapping[str, Any], driver: str | None) -> str:
    """Return why the driver cannot compile the missing kernels: it is older than the PTX.

    Args:
        gpus: Some GPUs.
        answer: What `what_tensorflow_says` answered.
        driver: The driver's version.

    Returns:
        The reason; empty where it can, where no kernels are lacking, and where one of the versions is not known.
    """
    needy, built_with, driver_cuda = to_compile(gpus, answer), _version(answer.get("cuda")), _version(answer.get("driver_cuda"))
    if not needy or not built_with or not driver_cuda or driver_cuda >= built_with:
        return ""
    return (
        f"TensorFlow has no kernels for {_models(needy)}, and the driver ({driver}), which is of CUDA {_dotted(driver_cuda)}, "
        f"cannot compile them: that takes a driver of CUDA {_dotted(built_with)} or newer (12.5 came with R555). Install one, "
        "or leave those GPUs out by CUDA_VISIBLE_DEVICES"
    )


def about_compiling(gpus: Iterable[Gpu], answer: Mapping[str, Any]) -> str:
    """Return what to expect of the first use of these GPUs; empty if TensorFlow has kernels for all."""
    needy = to_compile(gpus, answer)
    if not needy:
        return ""
    return (
        f"TensorFlow has no kernels for {_models(needy)}: the driver compiles each at its first use, which in all could take "
        "30 minutes or longer, as TensorFlow says"
    )


def _models(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{gpu.name} (compute capability {_dotted(gpu.capability)})" for gpu in gpus)


def _capability(built: str) -> tuple[int, int]:
    number = built.partition("_")[2].rstrip("af")
    return int(number[:-1]), int(number[-1])


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(".")[:2] if part.isdecimal())


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def kernel_folder(hidden: Sequence[Path], environment: Mapping[str, str]) -> Path | None:
    """Return the folder where hosts keep kernels compiled by the driver, so that later runs find them.

    Args:
        hidden: Folders of which hosts see a view: what they write there goes with the run.
        environment: That of the hosts.

    Returns:
        CUDA_CACHE_PATH where the user set it, else the first that can be written and that no view hides: CUDA's own folder
        (`~/.nv/ComputeCache`, which programs outside of gpudist share), one in the user's cache folder, one in the folder for
        temporary files. None where there is none, and where CUDA_CACHE_DISABLE is set.
    """
    if environment.get(CACHE_OFF, "0") not in ("", "0"):
        return None
    if environment.get(CACHE_PATH):
        given = Path(environment[CACHE_PATH])
        return None if _is_hidden(given, hidden) else given
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    caches = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    own = Path(tempfile.gettempdir(), f"kernels-of-gpudist-{os.geteuid()}")
    places = (home / ".nv" / "ComputeCache", caches / "gpudist" / "kernels", own)
    return next((place for place in places if not _is_hidden(place, hidden) and _can_keep(place)), None)


def _is_hidden(place: Path, hidden: Sequence[Path]) -> bool:
    return any(Path(os.path.realpath(place)).is_relative_to(view) for view in hidden)


def _can_keep(place: Path) -> bool:
    """Return whether only this user can write there: kernels from another user would be executed."""
    if not place.is_absolute():
        return False
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place.stat().st_uid == os.geteuid() and os.access(place, os.W_OK | os.X_OK)
    except OSError:
        return False


def keep_kernels_in(folder: str) -> None:
    """Tell CUDA, before this process asks it anything; what the user set holds.

    Args:
        folder: The folder; empty leaves it to CUDA.
    """
    if folder:
        os.environ.setdefault(CACHE_PATH, folder)
        os.environ.setdefault(CACHE_SIZE, str(_MOST_BYTES))
