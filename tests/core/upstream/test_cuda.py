"""A CUDA library that TensorFlow's wheel does not find is opened before TensorFlow looks for GPUs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from gpudist_core import environments
from tests.versions import since


@pytest.fixture(autouse=True)
def _ask_anew() -> None:
    environments.load_cuda_libraries.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a package of NVIDIA's, whose library is one that every Linux has."""
    folder = tmp_path / "nvidia" / "cusolver" / "lib"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "libcusolver.so.11").symlink_to("/proc/self/exe")  # no library: it does not open
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    return folder


def test_nothing_is_opened_where_there_is_no_driver(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "CUDA_DRIVER", "libnobody-has-this.so.1")
    assert environments.load_cuda_libraries() == ()


def test_what_does_not_open_is_left_to_tensorflow_to_say(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "CUDA_DRIVER", "libc.so.6")
    assert environments.load_cuda_libraries() == ()


def test_with_a_driver_the_library_of_nvidias_package_is_opened(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "CUDA_DRIVER", "libc.so.6")
    library = packages / "libcusolver.so.12"
    (loaded,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so.6" in line}
    library.symlink_to(loaded)
    assert environments.load_cuda_libraries() == (str(library),)


def test_tensorflow_itself_does_not_find_it() -> None:
    """When this fails upstream has mended it: `load_cuda_libraries` of gpudist_core/environments.py can go."""
    spec = importlib.util.find_spec("tensorflow")
    assert spec is not None
    assert spec.origin is not None
    opener = Path(spec.origin).with_name("libtensorflow_framework.so.2").read_bytes()
    assert b"nvidia/cusparse/lib" in opener
    assert (b"nvidia/cusolver/lib" not in opener) is since("tensorflow", "2.21")
