"""`--device gpu` from end to end on machines without GPUs, and on made-up ones: an error with the numbers, exit code 5."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate import Cluster, verify
from emulate.errors import Unavailable, UsageError
from tests.emulate.devices.made_gpus import gpus

PROGRAM = str(Path(__file__).parents[3] / "fixtures" / "programs" / "eager_loop.py")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.mark.parametrize("arguments", [("verify", "--topology", "1x2", "--topology", "2x2"), ("run", "--topology", "2x2")])
def test_a_command_ends_with_5_and_says_what_is_lacking(arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    line = [sys.executable, "-m", "emulate", command, PROGRAM, *options, "--device", "gpu"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 5
    assert done.stdout == ""
    assert "--device gpu needs GPUs that TensorFlow can use. Received: device='gpu' for " in done.stderr
    assert "2x2 (4 devices), and " in done.stderr
    assert "Use --device cpu, or a machine with GPUs: `gpudist devices` says what this one has." in done.stderr


@pytest.mark.parametrize("use", [lambda device: Cluster("1x2", device=device), lambda device: verify(PROGRAM, device=device)])
def test_python_raises_the_same(use: Callable[[str], Any]) -> None:
    with pytest.raises(Unavailable, match=r"Received: device='gpu' for 1x[24] \([24] devices\), and "):
        use("gpu")
    with pytest.raises(UsageError, match=r"device must be one of cpu, gpu, auto\. Received: device='tpu'"):
        use("tpu")


def test_auto_without_gpus_is_the_cpu_without_a_word() -> None:
    with Cluster("1x2", device="auto") as cluster:
        assert (cluster.device, cluster.notes) == ("cpu", [])


def test_a_verification_stops_when_its_hosts_do_not_see_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has one, TensorFlow's libraries are found by the parent and not by the hosts, say."""
    monkeypatch.setattr("emulate.devices.machine.find_gpus", lambda: gpus(1))
    monkeypatch.setattr("emulate.cluster.gpus.find_gpus", lambda: gpus(1))
    monkeypatch.setattr("emulate.devices.machine.what_tensorflow_says", lambda: {"tensorflow": "2.21.0", "gpus": [{}]})
    with pytest.raises(Unavailable, match=r"TensorFlow must see the GPUs that a host is given\. Received: gpus=GPU-0000"):
        verify(PROGRAM, "1x2", device="gpu", steps=1)


def test_tensorflow_takes_deterministic_kernels_from_the_environment_that_compared_runs_have() -> None:
    """Else every run on GPUs would differ from its own repeat."""
    from emulate.verify.host import COMPARABLE_ON_GPUS

    script = "from tensorflow.python.framework import config; print(config.is_op_determinism_enabled())"
    environment = {**os.environ, **COMPARABLE_ON_GPUS}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["True"]
