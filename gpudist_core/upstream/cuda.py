"""Open a CUDA library that TensorFlow 2.21's wheel needs and does not find: without it TensorFlow sees no GPU.

`pip install tensorflow[and-cuda]` installs libcusolver. But the object that opens it (libtensorflow_framework.so.2) searches
only the folders of the other libraries: "Cannot dlopen some GPU libraries. Skipping registering GPU devices". A library that is
already open is not searched for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from pathlib import Path

DRIVER = "libcuda.so.1"


@functools.cache
def load_cuda_libraries() -> tuple[str, ...]:
    """Open the library before TensorFlow first looks for GPUs. Without an NVIDIA driver nothing happens.

    It starts nothing on a GPU, so a process may fork after it.

    Returns:
        The paths of the opened libraries.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return ()
    return tuple(str(path) for path in _files("cusolver", "libcusolver.so.*") if _opens(path))


def _files(package: str, pattern: str) -> list[Path]:
    """Return libraries from one of NVIDIA's packages in this environment."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(f"nvidia.{package}")
        folders = (spec.submodule_search_locations if spec is not None else None) or []
        return sorted(path for folder in folders for path in (Path(folder) / "lib").glob(pattern))
    return []


def _opens(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path))
    except OSError:  # TensorFlow itself says so, and more
        return False
    return True
