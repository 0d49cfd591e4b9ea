"""What this machine has is said without importing TensorFlow here, and what cannot run on it is said with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from emulate.devices import Inventory, machine
from emulate.devices.machine import describe_gpus
from emulate.topology import MAX_HOSTS
from tests.emulate.devices.made_gpus import gpu, gpus, inventory

SEES_TWO = {"tensorflow": "2.21.0", "gpus": [{}, {}]}


def test_the_machine_is_described_without_importing_tensorflow_here() -> None:
    script = (
        "import json, sys; from emulate.devices import describe_machine; about = describe_machine();"
        "print(json.dumps([about, 'tensorflow' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    about, imported = json.loads(done.stdout)
    assert not imported
    assert about["tensorflow"]
    assert about["cpus"] >= 1
    assert 0 < about["memory_bytes"]["available"] <= about["memory_bytes"]["total"]
    assert 1 <= about["emulation"]["hosts"] <= MAX_HOSTS
    assert ("found" in about["gpus"]) != ("why" in about["gpus"])


def test_tensorflow_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ASK_TENSORFLOW", "raise ImportError('no tensorflow here')")
    answer = machine._ask.__wrapped__(None)
    assert answer == {"tensorflow": None, "gpus": [], "tensorflow_error": "ImportError: no tensorflow here"}


def test_without_gpus_the_reason_is_said() -> None:
    assert describe_gpus(Inventory(why="no driver"), SEES_TWO) == {"available": False, "why": "no driver"}


def test_of_each_topology_it_is_said_whether_it_runs_on_whole_gpus_or_slices() -> None:
    about = describe_gpus(gpus(2, free=8_000), SEES_TWO)
    assert about["driver"] == "570.1"
    assert about["seen_by_tensorflow"] == 2
    assert [one["name"] for one in about["found"]] == ["H100", "H100"]
    assert about["topologies"]["one_gpu_each"] == ["1x1", "1x2", "2x1"]
    assert about["topologies"]["slices"]["2x2"] == "2.8 GiB each"
    assert about["nccl"] == (
        "sums on 1x2 with MirroredStrategy, on 2x1 where MultiWorkerMirroredStrategy is told to use it; parts of a GPU are "
        "summed without it"
    )


def test_gpus_that_tensorflow_cannot_use_are_told_with_the_library_it_lacks() -> None:
    about = describe_gpus(gpus(2), {"tensorflow": "2.21.0", "with_cuda": True, "gpus": [], "missing": ["libcudart.so.12"]})
    assert about["seen_by_tensorflow"] == 0
    assert "the driver has 2 GPUs and TensorFlow sees 0 of them (it cannot load libcudart.so.12: " in about["unusable"]
    assert "unusable" not in describe_gpus(gpus(2), SEES_TWO)


def test_what_is_too_large_for_the_gpus_is_said() -> None:
    about = describe_gpus(gpus(1, free=9_000), SEES_TWO)
    assert about["topologies"]["too_large"] == ["4x1", "4x2", "8x1"]
    assert about["nccl"] == "refuses slices and MIG instances of one GPU"


def test_nccl_is_not_promised_to_hosts_on_mig_instances() -> None:
    about = describe_gpus(inventory(gpu(0, is_part=True), gpu(1, is_part=True)), SEES_TWO)
    assert about["topologies"]["one_gpu_each"] == ["1x1", "2x1"]
    assert about["nccl"] == "refuses slices and MIG instances of one GPU"


def test_gpus_that_are_left_out_are_named() -> None:
    assert describe_gpus(replace(gpus(1), left_out=("GPU 3 (lost)",)), SEES_TWO)["left_out"] == ["GPU 3 (lost)"]
    assert "left_out" not in describe_gpus(gpus(1), SEES_TWO)


def test_it_is_said_where_the_driver_compiles_kernels_and_where_it_cannot() -> None:
    new = {**SEES_TWO, "built_for": ["sm_70", "compute_80"], "cuda": "12.5.1", "driver_cuda": "12.8"}
    assert describe_gpus(gpus(1), new)["kernels"].startswith("TensorFlow has no kernels for H100 (compute capability 9.0): the")
    assert "cannot compile them" in describe_gpus(gpus(1), {**new, "driver_cuda": "12.4"})["kernels"]
    assert "kernels" not in describe_gpus(gpus(1), {**new, "built_for": ["sm_90"]})
