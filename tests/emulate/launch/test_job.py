"""A job is checked before anything is submitted: one sentence for each mistake, exit code 2."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from emulate.cli import main
from emulate.launch import default_name

EXAMPLES = [
    line
    for page in ("slurm", "kubernetes")
    for line in (Path(__file__).resolve().parents[3] / f"docs/guides/{page}.md").read_text().splitlines()
    if line.startswith("gpudist launch train.py")
]
SLURM = ["--slurm", "--topology", "2x4"]
JOBSET = ["--jobset", "--topology", "2x4", "--image", "a/b:1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "hosts").write_text("n1\nuser@n2  # the second\n\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train.py"], "One target must be given: --slurm, --jobset, --trainjob or --hosts FILE. Received: none."),
        (["train.py", "--slurm", "--jobset"], "Received: --slurm --jobset."),
        (["train.py", "--slurm"], "--slurm needs a topology. Received: none. Write --topology 2x4"),
        (["train.py", "--jobset", "--topology", "2x4"], "--jobset needs a container image with the program. Received: none."),
        (["tain.py", *SLURM], "Received: program='tain.py'"),
        (["train.py", *SLURM, "--image", "x"], "--image goes with --jobset and --trainjob. Received: --slurm --image 'x'."),
        (["train.py", *JOBSET, "--partition", "x"], "--partition goes with --slurm."),
        (["train.py", *SLURM, "--partition", "a b"], "--partition must be one word. Received: --partition 'a b'."),
        (["train.py", *SLURM, "--memory", "64"], "--memory must be a number with M, G or T. Received: --memory '64'."),
        (
            ["train.py", *SLURM, "--time-limit", "2"],
            "--time-limit must be a number with s, m, h or d. Received: --time-limit '2'.",
        ),
        (["train.py", *SLURM, "--restarts", "-1"], "--restarts must be a whole number >= 0. Received: --restarts '-1'."),
        (["train.py", *SLURM, "--record", "0"], "--record must be a whole number >= 1. Received: --record '0'."),
        (["train.py", *SLURM, "--record", "5", "--restarts", "2"], "A recorded job is not restarted."),
        (["train.py", *SLURM, "--device", "tpu"], "--device must be gpu or cpu. Received: --device 'tpu'."),
        (["train.py", *SLURM, "--device", "cpu"], "Use 2x1, or --record, which emulates the others."),
        (["train.py", "--slurm", "--topology", "2x1+1ps"], "gpudist launch starts workers only."),
        (["train.py", *SLURM, "--name", "Train"], "--name must have 1 to 40 lower-case letters, digits and hyphens"),
        (["train.py", *SLURM, "--folder", "a b"], "--folder must be a path without spaces and special characters."),
        (["train.py:main", *SLURM], "Without --record the hosts run PROGRAM with Python alone."),
        (["train.py", *JOBSET, "--image", "a b"], "--image must be the name of a container image. Received: --image 'a b'."),
        (["train.py", *JOBSET, "--namespace", "A"], "--namespace must be a name of Kubernetes"),
        (["train.py", *JOBSET, "--gpu-resource", "gpu"], "--gpu-resource must be a resource such as nvidia.com/gpu."),
        (["train.py", *JOBSET, "--record", "5"], "The pods of a recorded job need a shared volume for the trace."),
        (["train.py", "--hosts", "nothing"], "--hosts must name a file with one host on each line. Received: 'nothing'"),
        (["train.py", "--hosts", "hosts", "--topology", "3x1"], "Received: 2 hosts, --topology 3x1."),
        (["train.py", "--hosts", "hosts", "--detach"], "gpudist itself holds the connections to plain hosts."),
        (["--status", "."], "JOB must be the folder of a job of gpudist launch, with a job.json. Received: '.'."),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("def main():\n    pass\n")
    code = main(["launch", *args])
    err = capsys.readouterr().err
    assert (code, err.count("\n"), said in err) == (2, 1, True), err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "which has none"),
        (
            "n1 slots=2\n",
            "A line of --hosts must be one host, as ssh takes it: n1 or user@n1. Received: 'n1 slots=2' in bad, line 1.",
        ),
        ("n1\n-oProxyCommand=x\n", "Received: '-oProxyCommand=x' in bad, line 2."),
        ("n1\n\nn1\n", "Each host of --hosts must be there once. Received: 'n1' in bad, line 3."),
    ],
)
def test_a_mistake_in_a_hosts_file_names_its_line(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad").write_text(text)
    assert main(["launch", "train.py", "--hosts", "bad", "--dry-run"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("target", [SLURM, JOBSET, ["--trainjob", *JOBSET[1:]], ["--hosts", "hosts"]])
def test_a_dry_run_submits_nothing_and_leaves_nothing(
    target: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))  # without sbatch, kubectl and ssh
    before = sorted(folder.rglob("*"))
    assert main(["launch", "train.py", *target, "--dry-run", "--", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert "train.py" in out
    assert "--epochs" in out
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("target", "program"), [(SLURM, "sbatch"), (JOBSET, "kubectl"), (["--hosts", "hosts"], "ssh")])
def test_a_target_without_its_program_is_not_available(
    target: list[str], program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main(["launch", "train.py", *target]) == 5
    assert f"This target needs {program}. Received: {program} is not on PATH." in capsys.readouterr().err


def test_a_refused_job_leaves_its_name_and_folder_free_for_the_next_try(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bin").mkdir()
    for name, ending in (("sbatch", "echo invalid partition >&2; exit 1"), ("scontrol", "exit 1"), ("scancel", "exit 1")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{ending}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    before = sorted(folder.rglob("*"))
    assert main(["launch", "train.py", *SLURM, "--name", "job"]) == 5
    assert "sbatch must succeed. Received: invalid partition" in capsys.readouterr().err
    assert sorted(path for path in folder.rglob("*") if path.name != "gpudist-jobs") == before
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\necho 7\n")
    assert main(["launch", "train.py", *SLURM, "--name", "job", "--detach"]) == 0
    assert "Submitted Slurm job 7." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("says", "answer"),
    [
        ("JobState=COMPLETED", "Nothing was cancelled: Slurm job 7 had already ended (succeeded)."),
        (
            "",
            "Nothing was cancelled: Slurm job 7 had already ended (failed: Slurm has forgotten the job, which has left no exit",
        ),
        ("JobState=PENDING", "Cancelled Slurm job 7."),
    ],
)
def test_cancel_says_what_it_did(
    says: str, answer: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.json").write_text('{"target": "slurm", "number": "7", "label": "Slurm job 7"}')
    (folder / "says").write_text(says)
    knows = '[ -s says ] || { echo "Invalid job id specified" >&2; exit 1; }; cat says'
    for name, command in (("scontrol", knows), ("scancel", "echo JobState=CANCELLED > says")):
        (folder / name).write_text(f"#!/bin/sh\n{command}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert main(["launch", "--cancel", "."]) == 0
    assert answer in capsys.readouterr().out


@pytest.mark.parametrize("line", EXAMPLES)
def test_each_example_of_the_guides_is_a_job(line: str, folder: Path) -> None:
    (folder / "hosts.txt").write_text("n1\nn2\n")
    args = shlex.split(line)[1:]
    args = [*args, "--dry-run"] if "--" not in args else [*args[: args.index("--")], "--dry-run", *args[args.index("--") :]]
    assert main(args) == 0


def test_a_folder_with_contents_is_not_used(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["launch", "train.py", *SLURM, "--folder", str(folder)]) == 2
    assert "--folder must be a new or empty folder." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("train.py", "train-1"),
        ("-m pkg.train_Model", "pkg-1"),
        ("a/10_Run.ipynb", "run-1"),
        ("___.py", "job-1"),
        ("x" * 50, "x" * 38 + "-1"),
    ],
)
def test_a_job_is_named_for_its_program(program: str, name: str) -> None:
    assert default_name(program, "1") == name
