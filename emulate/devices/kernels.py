"""Handle kernels that TensorFlow does not ship for a GPU: the driver compiles them from PTX at first use, if it can.

TensorFlow names what it was built for `sm_80`, machine code alone, or `compute_90`, machine code and PTX (its configure.py).
The wheels of 2.20 and 2.21 have machine code for compute capability 6.0, 7.0, 8.0, 8.9 and 9.0, and PTX of 9.0 (of version 8.5,
which is that of CUDA 12.5): what comes after Hopper depends on the driver. TensorFlow's log says of this that it "could take 30
minutes or longer". On an H200 with an empty cache a first verification took 21 s in all (2.20): nothing had to be compiled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emulate.devices.inventory import Gpu

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
