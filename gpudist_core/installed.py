"""Find the installed TensorFlow and Keras without an import, and check whether gpudist supports them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

OLDEST = {"tensorflow": (2, 16), "keras": (3, 8)}
# They belong together. gpudist verifies programs with them. What uses Keras in gpudist_core needs Keras 3.
OLDEST_OF_KERAS_2 = {"tensorflow": (2, 15), "keras": (2, 15)}
_TITLES = {"tensorflow": "TensorFlow", "keras": "Keras"}
_INSTALL = {
    "tensorflow": "pip install --upgrade 'gpudist[tensorflow]' (tensorflow-cpu, tf-nightly and vendors' builds also work)",
    "keras": "pip install --upgrade 'keras>=3.8'",
}


def installed_version(module: str) -> str | None:
    """Return the version of the module that `import` finds, whichever distribution it came with.

    Args:
        module: The name of a top-level module, for example `tensorflow`.

    Returns:
        Its version; None where no such module is installed.
    """
    imported = getattr(sys.modules.get(module), "__version__", None)
    return str(imported) if imported is not None else _version_on_disk(module, tuple(sys.path))


def own_version() -> str:
    """Return gpudist's version; `source` where its sources were not installed."""
    try:
        return importlib.metadata.version("gpudist")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def unsupported(*, with_keras_2: bool = False) -> str | None:
    """Return one sentence on what must be installed; None where this TensorFlow and this Keras are supported.

    Args:
        with_keras_2: Whether TensorFlow 2.15 is supported with its Keras 2.15.

    Returns:
        The sentence.
    """
    versions = {module: installed_version(module) for module in OLDEST}
    if with_keras_2 and {module: release(version or "") for module, version in versions.items()} == OLDEST_OF_KERAS_2:
        return None
    for module, oldest in OLDEST.items():
        version = versions[module]
        if version is None or release(version) < oldest:
            rule = f"{_TITLES[module]} {oldest[0]}.{oldest[1]} or newer must be installed"
            return f"{rule}. Received: {module}={version!r}, python={sys.executable!r}. Run: {_INSTALL[module]}."
    return foreign_backend(*_keras_backend())


def foreign_backend(backend: str, where: str) -> str | None:
    """Return one sentence on a Keras that does not compute with TensorFlow; None where it does, and for Keras 2.

    Args:
        backend: What is set; empty for nothing.
        where: The name of the variable or the file that sets it.

    Returns:
        The sentence.
    """
    if backend in ("", "tensorflow") or os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        return None
    return f"Keras must run on TensorFlow. Received: backend={backend!r}, set by {where}. Set KERAS_BACKEND=tensorflow."


def _keras_backend() -> tuple[str, str]:
    """Return the backend that Keras will take, and what sets it: KERAS_BACKEND, else its configuration file."""
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend, "KERAS_BACKEND"
    file = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser() / "keras.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Keras takes its defaults then, too
        return "", ""
    return str(settings.get("backend", "")) if isinstance(settings, dict) else "", str(file)


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: (2, 22) of `2.22.0-dev20261120`; (0, 0) where it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


@functools.lru_cache
def _version_on_disk(module: str, search_path: tuple[str, ...]) -> str | None:
    folder = next((Path(entry) for entry in search_path if (Path(entry) / module / "__init__.py").is_file()), None)
    if folder is None:
        # An import hook may find it. A keras.py of the user or a folder that pip left empty is not meant.
        spec = importlib.util.find_spec(module)
        is_package = spec is not None and spec.origin is not None and spec.submodule_search_locations is not None
        return _version_by_import(module) if is_package else None
    named = {
        listing.parent.name.removesuffix(".dist-info").partition("-")[2]
        for listing in folder.glob("*.dist-info/top_level.txt")
        if module in listing.read_text().split()
    }
    # Without metadata, or with that of two distributions (tensorflow and tf-nightly write one folder), the module itself knows.
    return named.pop() if len(named) == 1 else _version_by_import(module)


def _version_by_import(module: str) -> str | None:
    """Return what the module says in a process of its own, so that this one does not import it."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print({module}.__version__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.split()[-1] if result.returncode == 0 else None
