"""The jobs of ci/: they stop at once where there is no GPU, take no verdict of a CPU for one of a GPU, and start every task."""

from __future__ import annotations

import os
import re
import runpy
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulate.devices.made_gpus import gpus

CI = Path(__file__).parents[2] / "ci"
LIMIT = 200

# Stands in for a python on a machine with GPUs: the job's own checks run, and of all else it is said that it was asked for.
STAND_IN = """#!{python}
import json, os, sys
if sys.argv[1] == "-":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
print("ran:", *sys.argv[1:])
if "--json" in sys.argv:
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump({{"device": os.environ["RAN_ON"]}}, file)
sys.exit(1 if any("bugs/" in one for one in sys.argv) else 0)
"""

# Starts the tasks of a step as Slurm does, all of them on this machine.
SRUN = """#!{python}
import os, subprocess, sys
number = 2
command = [one for one in sys.argv[1:] if not one.startswith("--")]
assert "--kill-on-bad-exit=1" in sys.argv and "--distribution=block" in sys.argv
step = {{
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_NUM_TASKS": str(number),
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": str(number),
    "SLURMD_NODENAME": "localhost",
}}
ranks = [{{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}} for i in range(number)]
tasks = [subprocess.Popen(command, env={{**os.environ, **step, **rank}}) for rank in ranks]
sys.exit(max(task.wait() for task in tasks))
"""


def program(path: Path, text: str) -> Path:
    """A program of this text."""
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a job as a runner does, on a machine that shows it no GPU."""
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.run(list(map(str, command)), env=settings, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_a_runner_without_gpus_is_told_so_before_any_test_runs() -> None:
    done = run(CI / "gpu.sh", PYTHON=sys.executable, PYTHONPATH=str(CI.parent))
    assert done.returncode == 5
    assert done.stderr.startswith("A GPU runner must have a GPU. Received: none (")
    assert "2. " not in done.stdout


def test_the_job_runs_the_tests_strictly_on_gpus(tmp_path: Path) -> None:
    done = run(CI / "gpu.sh", PYTHON=str(program(tmp_path / "python", STAND_IN)), RAN_ON="gpu")
    assert done.returncode == 0, done.stderr
    ran = [line.removeprefix("ran: ") for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert ran[:2] == ["ci/see_gpus.py", "-m emulate devices"]
    assert any("custom_loop_cnn.py" in line for line in ran)  # a convolution, whose kernels are others
    assert "-m pytest -q fixtures/outsider --gpudist-device gpu --gpudist-strict --gpudist-deadline 3600" in ran
    assert all("--device gpu" in line and "--timeout 3600" in line for line in ran if "emulate verify" in line)
    assert done.stdout.endswith("Passed. All of it ran on GPUs.\n")


def test_a_runner_whose_driver_cannot_compile_the_kernels_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"tensorflow": "2.21.0", "gpus": [{}], "built_for": ["sm_70", "compute_80"], "cuda": "12.5.1", "driver_cuda": "12.4"}
    monkeypatch.setattr("emulate.devices.find_gpus", lambda: gpus(1))
    monkeypatch.setattr("emulate.devices.what_tensorflow_says", lambda: old)
    [line] = runpy.run_path(str(CI / "see_gpus.py"))["complaints"]()
    assert line.startswith(
        "TensorFlow must see every GPU and have kernels for it. Received: TensorFlow has no kernels for H100 (compute "
        "capability 9.0), and the driver (570.1), which is of CUDA 12.4, cannot compile them"
    )


def test_a_runner_whose_tensorflow_lacks_a_library_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = {"tensorflow": "2.21.0", "with_cuda": True, "gpus": [], "missing": ["libcusolver.so.11"]}
    monkeypatch.setattr("emulate.devices.find_gpus", lambda: gpus(1))
    monkeypatch.setattr("emulate.devices.what_tensorflow_says", lambda: blind)
    [line] = runpy.run_path(str(CI / "see_gpus.py"))["complaints"]()
    assert line.startswith("TensorFlow must see every GPU and have kernels for it. Received: the driver has 1 GPU and ")
    assert "it cannot load libcusolver.so.11: install tensorflow[and-cuda]" in line


def test_a_verdict_that_the_cpu_gave_fails_the_job(tmp_path: Path) -> None:
    done = run(CI / "gpu.sh", PYTHON=str(program(tmp_path / "python", STAND_IN)), RAN_ON="cpu")
    assert done.returncode == 1
    assert "Each verdict must come from GPUs. Received: device='cpu' in " in done.stderr
    assert "Passed. All of it ran on GPUs." not in done.stdout


@pytest.mark.slow
def test_the_slurm_job_trains_one_model_in_all_its_tasks(tmp_path: Path) -> None:
    program(tmp_path / "srun", SRUN)
    done = run(
        CI / "slurm.sbatch",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        PYTHON=sys.executable,
        PYTHONPATH=str(CI.parent),
        SLURM_SUBMIT_DIR=str(CI.parent),
    )
    assert done.returncode == 0, done.stderr
    # Two tasks write to one pipe: a line of one may begin before the other's has its end.
    said = re.findall(r"2 replicas: loss \d+\.\d{4} to \d+\.\d{4}", done.stdout)
    assert len(said) == 2
    assert len(set(said)) == 1
