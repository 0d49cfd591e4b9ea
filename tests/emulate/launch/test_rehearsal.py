"""A rehearsal runs what the hosts would run: on emulated hosts, under their names, with the environment that they would get."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from emulate.cli import main
from emulate.cli.app import app
from emulate.errors import Hung, ProgramFailed
from emulate.launch import HostsBySsh, Job, Kubernetes, KubernetesCluster, Slurm, Target
from emulate.launch.rehearsal import run_commands
from emulate.told import told
from emulate.topology import Topology
from emulate.verify.verdict import Finding, Reference, Run, Verdict

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, os, pathlib, socket, sys, time

config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
if sys.argv[1:] == ["fails"] and index == 1:
    sys.exit(4)
if sys.argv[1:] == ["stays"]:
    time.sleep(600)
places = [worker.split(":") for worker in config["cluster"]["worker"]]
server = socket.create_server(("0.0.0.0", int(places[index][1])))
for name, port in places:  # each host reaches each host by its name
    for _ in range(300):
        try:
            socket.create_connection((name, int(port)), 5).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    else:
        sys.exit(9)
pathlib.Path(f"told-{index}").write_text(f"{socket.gethostname()} {[name for name, port in places]} {os.getcwd()}")
time.sleep(2)
"""


def job(folder: Path, *args: str) -> Job:
    (folder / "train.py").write_text(PROGRAM)
    return Job("train", Topology(2, 1), ("train.py",), args, folder / "job", workdir=folder, python="python3", device="cpu")


TARGETS: dict[str, tuple[Callable[[Job], Target], list[str], list[str]]] = {
    "slurm": (Slurm, ["node0", "node1"], ["node0", "node1"]),
    "hosts": (lambda job: HostsBySsh(job, ["me@a", "b.example"]), ["a", "b.example"], ["a", "b.example"]),
    "jobset": (
        lambda job: Kubernetes(job, KubernetesCluster("a"), "jobset", job.folder),
        ["train-worker-0-0", "train-worker-0-1"],
        ["train-worker-0-0.train", "train-worker-0-1.train"],
    ),
    "trainjob": (
        lambda job: Kubernetes(job, KubernetesCluster("a"), "trainjob", job.folder),
        ["train-node-0-0", "train-node-0-1"],
        ["train-node-0-0.train", "train-node-0-1.train"],
    ),
}


@pytest.mark.parametrize("target", TARGETS)
def test_hosts_have_their_names_reach_each_other_by_them_and_this_machine_keeps_its_own(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, own, addressed = TARGETS[target]
    before = (socket.gethostname(), Path("/etc/hosts").read_text())
    run_commands(Topology(2, 1), make(job(tmp_path)).host_commands(), 100)
    told = [(tmp_path / f"told-{index}").read_text() for index in (0, 1)]
    assert told == [f"{name} {addressed} {tmp_path}" for name in own]
    assert (socket.gethostname(), Path("/etc/hosts").read_text()) == before


PROXY = """
import json, os, pathlib

names = ("https_proxy", "HTTP_PROXY", "no_proxy", "no_grpc_proxy")
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
pathlib.Path(f"told-{index}").write_text(json.dumps({name: os.environ.get(name) for name in names}))
"""


@pytest.mark.parametrize("exempt", ["", "pypi.local"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_program_keeps_its_proxy_which_gets_nothing_that_hosts_send_to_each_other(
    target: str, exempt: str, tmp_path: Path
) -> None:
    make, _, addressed = TARGETS[target]
    proxies = {"https_proxy": "http://proxy:3128", "HTTP_PROXY": "http://proxy:3128", "no_proxy": exempt}
    commands = make(job(tmp_path)).host_commands()
    (tmp_path / "train.py").write_text(PROXY)
    for number, command in enumerate(commands):
        for name, text in command.programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = {**os.environ, **proxies, **command.environment, "PATH": path}
        with subprocess.Popen(command.argv, cwd=tmp_path, env=environment, stdin=subprocess.PIPE) as process:
            assert process.wait(60) == 0
        told = json.loads((tmp_path / f"told-{number}").read_text())
        # The environment of a pod does not show what its image exempts.
        others = [exempt] if exempt and target in ("slurm", "hosts") else []
        assert told == {**proxies, "no_grpc_proxy": ",".join([*addressed, *others])}


def test_a_command_that_fails_names_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = TARGETS["jobset"][0](job(tmp_path, "fails")).host_commands()
    with pytest.raises(ProgramFailed, match=r"The command of train-worker-0-1\.train must succeed\. Received: exit code 4\."):
        run_commands(Topology(2, 1), commands, 100)


def test_commands_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = TARGETS["hosts"][0](job(tmp_path, "stays")).host_commands()
    with pytest.raises(Hung, match="no end in 4 s"):
        run_commands(Topology(2, 1), commands, 4)


def test_a_rehearsal_names_no_option_that_launch_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fix = "Run with --steps all to find out, or --allow file-order to accept it."
    cause = Finding("batchnorm-local-statistics", "It differs.", "--precision float64 sees more", fix, by_design=True)
    run = Run("2x1", "by-design", causes=(cause,), notes=(told("any")("See what `gpudist verify --traces DIR` writes."),))
    notes = (told("stopped-early")("Stopped after 5 steps (--steps). Later code was not checked."),)
    verdict = Verdict("train.py", 0, "cpu", {}, Reference("ok", 5), (run,), notes)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name, result in (("run_commands", None), ("verify", verdict), ("compare_traces", run)):
        monkeypatch.setattr(f"emulate.launch.rehearsal.{name}", lambda *_, result=result, **__: result)
    assert main(["launch", "train.py", "--slurm", "--topology", "2x1", "--rehearse"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    named = re.findall(r"(gpudist verify )?(--[a-z-]+)", text)
    own = {option for parameter in get_command(app).commands["launch"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {option for of_verify, option in named if not of_verify} == {"--record"} <= own
    assert {option for of_verify, option in named if of_verify} == {"--allow", "--precision", "--strict", "--traces"}


@pytest.mark.slow
def test_a_manifest_is_rehearsed_and_its_run_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT / "fixtures" / "programs")
    before = sorted(os.listdir())
    code = main(
        ["launch", "multiworker_loop.py", "--jobset", "--topology", "2x2", "--image", "a/b", "--name", "train", "--rehearse"]
    )
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert "Rehearsing train on emulated hosts: train-worker-0-0.train, train-worker-0-1.train" in err
    assert "2x2  equivalent in the first 5 steps" in out
    assert "[host 1] worker 1 of 2, 4 replicas in all" in out
    assert sorted(os.listdir()) == before
