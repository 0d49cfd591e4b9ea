"""The GPUs of this machine are found by the driver's library, and CUDA_VISIBLE_DEVICES is read as CUDA reads it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.devices import Gpu, Inventory, find_gpus
from emulate.devices.inventory import MIB, visible
from tests.emulate.devices.made_gpus import gpu, gpus

FOUR = gpus(4).gpus


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1,2,3", [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-0002", [2]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("1,9,0", [1]),
        ("1,x,0", [1]),
        ("1,1", []),
        ("GPU-", []),
        ("NoDevFiles", []),
        ("¹", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(wanted: str | None, numbers: list[int]) -> None:
    assert [one.index for one in visible(FOUR, wanted)] == numbers


@given(st.one_of(st.none(), st.text(max_size=30), st.text("0123,-GPU ", max_size=20)))
def test_whatever_the_variable_holds_each_gpu_is_shown_once_at_most(wanted: str | None) -> None:
    shown = visible(FOUR, wanted)
    assert set(shown) <= set(FOUR)
    assert len(set(shown)) == len(shown)


def test_a_mig_instance_is_named_by_its_own_uuid() -> None:
    parts = (Gpu(0, "MIG-aa", "A100 (MIG)", 0, 0, is_part=True), Gpu(0, "MIG-ab", "A100 (MIG)", 0, 0, is_part=True))
    assert visible(parts, "MIG-ab") == parts[1:]
    assert visible(parts, "MIG-a") == ()


def test_tf32_is_there_from_ampere_on() -> None:
    assert gpu().has_tf32
    assert not Gpu(0, "GPU-0", "V100", 0, 0, (7, 0)).has_tf32


class Driver:
    """NVML's functions, answered from a list of GPUs: what is free, and the MIG instances."""

    compute_mode: int | None = pynvml.NVML_COMPUTEMODE_DEFAULT

    def __init__(self, *found: tuple[int, list[int]]) -> None:
        self._found = found
        self.lost: set[int] = set()
        self.in_mig_mode = {index for index, (_, instances) in enumerate(found) if instances}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in vars(type(self)).items():
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, answer.__get__(self))

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._found)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        if index in self.lost:
            raise pynvml.NVMLError_GpuIsLost
        free, instances = self._found[index]
        return SimpleNamespace(uuid=f"GPU-{index}", free=free, instances=instances, is_split=index in self.in_mig_mode)

    def nvmlDeviceGetName(self, device: Any) -> str:  # noqa: N802
        return "A100"

    def nvmlDeviceGetCudaComputeCapability(self, device: Any) -> tuple[int, int]:  # noqa: N802
        return 8, 0

    def nvmlDeviceGetComputeMode(self, device: Any) -> int:  # noqa: N802
        if self.compute_mode is None:
            raise pynvml.NVMLError_NotSupported
        return int(self.compute_mode)

    def nvmlDeviceGetUUID(self, device: Any) -> str:  # noqa: N802
        return str(device.uuid)

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:  # noqa: N802
        return [int(device.is_split), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:  # noqa: N802
        if index >= len(device.instances):
            raise pynvml.NVMLError_NotFound
        return SimpleNamespace(uuid=f"MIG-{index}", free=device.instances[index])

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:  # noqa: N802
        if device.free < 0:
            raise pynvml.NVMLError_NotSupported
        return SimpleNamespace(total=80_000 * MIB, free=device.free * MIB)


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_what_the_driver_says_is_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver((10, []), (20, [])).install(monkeypatch)
    found = find_gpus()
    assert found.driver == "570.1"
    assert found.gpus[1] == Gpu(1, "GPU-1", "A100", 80_000 * MIB, 20 * MIB, (8, 0))


def test_mig_instances_take_the_place_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver((10, [5, 6]), (20, [])).install(monkeypatch)
    assert [(one.uuid, one.is_part, one.free // MIB) for one in find_gpus().gpus] == [
        ("MIG-0", True, 5),
        ("MIG-1", True, 6),
        ("GPU-1", False, 20),
    ]


def test_gpus_for_one_process_at_a_time_are_known_and_those_for_none_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver((10, []))
    driver.install(monkeypatch)
    driver.compute_mode = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert [one.is_exclusive for one in find_gpus().gpus] == [True]
    driver.compute_mode = pynvml.NVML_COMPUTEMODE_PROHIBITED
    assert find_gpus().why == (
        "no GPU can be used: GPU 0 (A100, whose compute mode is prohibited: `nvidia-smi -c DEFAULT` as root changes that)"
    )


def test_a_gpu_of_which_the_driver_cannot_tell_is_named_and_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver((10, []), (20, []), (30, []))
    driver.install(monkeypatch)
    driver.lost = {1}
    found = find_gpus()
    assert [one.uuid for one in found.gpus] == ["GPU-0", "GPU-2"]
    assert found.left_out == ("GPU 1 (of which the driver cannot tell more: GPU is lost)",)
    assert found.beside == f"; left out: {found.left_out[0]}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert (len(find_gpus().gpus), find_gpus().left_out) == (2, ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_gpus().why == "no GPU can be used: GPU 1 (of which the driver cannot tell more: GPU is lost)"


def test_a_gpu_whose_compute_mode_is_not_told_takes_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver((10, []))
    driver.install(monkeypatch)
    driver.compute_mode = None
    assert [one.is_exclusive for one in find_gpus().gpus] == [False]


def test_a_gpu_in_mig_mode_without_instances_is_left_out_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver((10, []), (20, []))
    driver.install(monkeypatch)
    driver.in_mig_mode = {0}
    found = find_gpus()
    assert [one.uuid for one in found.gpus] == ["GPU-1"]
    [said] = found.left_out
    assert said == (
        "GPU 0 (A100, in MIG mode without an instance: `nvidia-smi mig -cgi PROFILE -C` as root makes one, "
        "`nvidia-smi -mig 0` ends the mode)"
    )


def test_a_gpu_that_shares_the_processors_memory_has_that_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver((-1, [])).install(monkeypatch)
    assert find_gpus().gpus[0].free > 0


def test_gpus_that_are_hidden_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver((10, []), (20, [])).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert find_gpus() == Inventory((), "570.1", "CUDA_VISIBLE_DEVICES='-1' hides all 2")


def test_a_driver_without_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver().install(monkeypatch)
    assert find_gpus().why == "the NVIDIA driver finds no GPU"


def test_a_machine_without_a_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert find_gpus() == Inventory(why="no NVIDIA driver answers: NVML Shared Library Not Found")


def test_the_driver_is_asked_without_tensorflow_and_without_cuda() -> None:
    script = (
        "import sys; from emulate.devices import find_gpus; find_gpus();"
        "mapped = open('/proc/self/maps').read();"
        "print('tensorflow' in sys.modules, 'libcuda.so' in mapped)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
