"""What this machine has is said without importing TensorFlow here, and what cannot run on it is said with the reason."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from emulate.devices import Inventory, choice
from emulate.devices.machine import describe_gpus
from emulate.topology import MAX_HOSTS
from tests.emulate.devices.made_gpus import gpus


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
    monkeypatch.setattr(choice, "_ASK_TENSORFLOW", "raise ImportError('no tensorflow here')")
    answer = choice._ask.__wrapped__(None)
    assert answer == {"tensorflow": None, "gpus": [], "tensorflow_error": "ImportError: no tensorflow here"}


def test_without_gpus_the_reason_is_said() -> None:
    assert describe_gpus(Inventory(why="no driver"), 0) == {"available": False, "why": "no driver"}


def test_of_each_topology_it_is_said_whether_it_runs_on_whole_gpus_or_slices() -> None:
    about = describe_gpus(gpus(2, free=8_000), 2)
    assert about["driver"] == "570.1"
    assert about["seen_by_tensorflow"] == 2
    assert [one["name"] for one in about["found"]] == ["H100", "H100"]
    assert about["topologies"]["one_gpu_each"] == ["1x1", "1x2", "2x1"]
    assert about["topologies"]["slices"]["2x2"] == "2.8 GiB each"
    assert about["nccl"] == (
        "sums on 1x2 with MirroredStrategy, on 2x1 where MultiWorkerMirroredStrategy is told to use it; slices of a GPU are "
        "summed without it"
    )


def test_what_is_too_large_for_the_gpus_is_said() -> None:
    about = describe_gpus(gpus(1, free=9_000), 1)
    assert about["topologies"]["too_large"] == ["4x1", "4x2", "8x1"]
    assert about["nccl"] == "refuses slices of one GPU"
