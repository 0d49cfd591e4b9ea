"""Jobs on Slurm: slurmctld and two slurmd of Debian's packages, in namespaces."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from emulate import verify
from emulate.cli import main
from emulate.cluster import Preload
from tests.acceptance.test_certificate import LOOP, RIGHT
from tests.emulate.launch.programs import TELLS
from tests.emulate.launch.slurm_cluster import SlurmCluster, slurm_cluster

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ["launch", "train.py", "--slurm", "--topology", "2x1", "--device", "cpu", "--name", "job"]
JOB = "gpudist-jobs/job"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path, slurm: SlurmCluster) -> Path:
    slurm.wait_until_idle()
    (tmp_path / "train.py").write_text(TELLS)
    return tmp_path


def test_each_node_gets_its_task_and_the_programs_arguments(slurm: SlurmCluster, folder: Path) -> None:
    done = slurm.gpudist(*LAUNCH, "--time-limit", "5m", "--memory", "500M", "--cpus", "1", "--", "a b", "$c", cwd=folder)
    assert done.returncode == 0, done.stdout
    told = [json.loads(line.split("told ")[1].rpartition(" [")[0]) for line in done.stdout.splitlines() if "told " in line]
    workers = told[0]["cluster"]["worker"]
    assert [worker.partition(":")[0] for worker in workers] == ["n1", "n2"]
    assert told == [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in (0, 1)]
    assert done.stdout.count("['a b', '$c']") == 2
    assert slurm.gpudist("launch", "--status", JOB, cwd=folder).stdout.strip() == "succeeded"
    assert slurm.gpudist("launch", "--logs", JOB, cwd=folder).stdout.count("done") == 2


def test_a_host_that_fails_ends_the_others(slurm: SlurmCluster, folder: Path) -> None:
    done = slurm.gpudist(*LAUNCH, "--", "fails", cwd=folder)
    assert done.returncode == 3, done.stdout
    assert "failed: Slurm says FAILED" in done.stdout
    assert "srun: error: n2: task 1: Exited with exit code 4" in done.stdout
    slurm.wait_until_idle()
    assert slurm.job_processes() == []


def test_a_job_that_leaves_with_75_is_queued_again(slurm: SlurmCluster, folder: Path) -> None:
    with slurm.popen([sys.executable, "-m", "emulate", *LAUNCH, "--restarts", "1", "--", "leaves"], folder) as process:
        slurm.start_requeued_jobs_at_once(process)
        out = process.stdout.read() if process.stdout else ""
    assert (process.returncode, out.count("told"), out.count("done")) == (0, 4, 2), out


def test_a_detached_job_goes_on_and_its_end_is_known_after_slurm_has_forgotten_it(slurm: SlurmCluster, folder: Path) -> None:
    done = slurm.gpudist(*LAUNCH, "--detach", cwd=folder)
    assert done.returncode == 0, done.stdout
    slurm.wait_for("done", 2, folder / JOB)
    slurm.wait_until_idle()
    assert slurm.gpudist("launch", "--status", JOB, cwd=folder).stdout.strip() == "succeeded"
    about = json.loads((folder / JOB / "job.json").read_text())
    (folder / JOB / "job.json").write_text(json.dumps({**about, "number": "999999"}))
    assert slurm.gpudist("launch", "--status", JOB, cwd=folder).stdout.strip() == "succeeded"
    (folder / JOB / "exit-code").unlink()
    assert "has left no exit code" in slurm.gpudist("launch", "--status", JOB, cwd=folder).stdout


def test_what_slurm_refuses_is_said_in_its_own_words(slurm: SlurmCluster, folder: Path) -> None:
    done = slurm.gpudist(*LAUNCH, "--partition", "nothing", cwd=folder)
    assert done.returncode == 5
    assert "sbatch must succeed. Received: sbatch: error: invalid partition specified: nothing" in done.stdout


@pytest.mark.parametrize("how", ["Ctrl-C", "--cancel", "scancel"])
def test_a_job_that_is_ended_leaves_nothing_running(how: str, slurm: SlurmCluster, folder: Path) -> None:
    with slurm.popen([sys.executable, "-m", "emulate", *LAUNCH, "--", "stays"], folder) as process:
        slurm.wait_for("told", 2, folder / JOB)
        assert slurm.gpudist("launch", "--status", JOB, cwd=folder).stdout.strip() == "running: on n[1-2]"
        if how == "Ctrl-C":
            [own] = psutil.Process(process.pid).children()  # nsenter has forked
            own.send_signal(signal.SIGINT)
        elif how == "--cancel":
            assert slurm.gpudist("launch", "--cancel", JOB, cwd=folder).stdout.startswith("Cancelled Slurm job ")
        else:
            slurm.run("scancel", json.loads((folder / JOB / "job.json").read_text())["number"])
        out = process.stdout.read() if process.stdout else ""
    assert process.returncode == (130 if how == "Ctrl-C" else 3), out
    assert "[host 1] told" in out
    slurm.wait_until_idle()
    assert slurm.job_processes() == []
    assert "cancelled" in slurm.gpudist("launch", "--status", JOB, cwd=folder).stdout


def test_a_node_that_dies_ends_the_job(slurm: SlurmCluster, folder: Path) -> None:
    with slurm.popen([sys.executable, "-m", "emulate", *LAUNCH, "--", "stays"], folder) as process:
        slurm.wait_for("told", 2, folder / JOB)
        slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
        out = process.stdout.read() if process.stdout else ""
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert process.returncode == 3, out
    assert "failed: Slurm says NODE_FAIL" in out
    slurm.wait_until_idle()
    until = time.monotonic() + 30
    while slurm.job_processes() and time.monotonic() < until:
        time.sleep(0.2)
    assert slurm.job_processes() == []


@pytest.mark.slow  # the rest of a record is seen in test_record.py
def test_a_program_that_is_equivalent_here_is_so_on_the_cluster(
    slurm: SlurmCluster, tmp_path: Path, preload: Preload, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.wait_until_idle()
    programs, job = ROOT / "fixtures" / "programs", tmp_path / "job"
    here = verify(programs / "multiworker_loop.py", topology="2x2", steps=5, traces=tmp_path / "here", preload=preload)
    assert here.is_equivalent
    options = ["--slurm", "--topology", "2x2", "--device", "cpu", "--record", "5", "--folder", str(job)]
    done = slurm.gpudist("launch", "multiworker_loop.py", *options, cwd=programs)
    assert done.returncode == 0, done.stdout
    assert "worker 1 of 2, 4 replicas in all" in done.stdout
    for reference in ("reference", "2x2"):
        assert main(["compare", str(tmp_path / "here" / reference), str(job / "trace")]) == 0
        assert "2x2  equivalent in the first 5 steps" in capsys.readouterr().out


@pytest.mark.slow  # the checks themselves are seen on emulated hosts in tests/acceptance/test_certificate.py
def test_a_certificate_lets_the_same_training_pass_on_the_cluster_and_stops_any_other(
    slurm: SlurmCluster, tmp_path: Path, preload: Preload
) -> None:
    slurm.wait_until_idle()
    (tmp_path / "train.py").write_text(LOOP)
    certificate = tmp_path / "train.certificate"
    here = verify(tmp_path / "train.py", "2x1", args=[*RIGHT, ""], preload=preload, certificate=certificate)
    assert here.is_equivalent
    options = ["--slurm", "--topology", "2x1", "--device", "cpu"]  # TensorFlow gives each host one device there

    def launched(*args: str) -> tuple[int, str]:
        done = slurm.gpudist("launch", "train.py", *options, "--", *args, str(certificate), cwd=tmp_path)
        slurm.wait_until_idle()
        assert slurm.job_processes() == []
        return done.returncode, done.stdout

    code, output = launched(*RIGHT)
    assert (code, output.count("checked no more")) == (0, 2), output
    seed, _, data_seed, dropout = RIGHT
    for stage, args in (("gradient", (seed, "wrong", data_seed, dropout)), ("start", ("2", *RIGHT[1:]))):
        code, output = launched(*args)
        assert code == 3, output
        assert f"Step 0 differs from the certificate. Received: stage='{stage}'" in output, output
