"""Jobs on Kubernetes, through real processes: `kubectl` is a stand-in that answers from a folder and runs the pods' program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
KUBECTL = """#!{python}
import json, os, shutil, sys, time
from pathlib import Path

import yaml

place, args = Path(os.environ["PLACE"]), sys.argv[1:]
with (place / "calls").open("a") as calls:
    calls.write(" ".join(args) + "\\n")
if args[0] == "create":
    found = list(yaml.safe_load_all(sys.stdin))
    if (place / "refuses").exists() and (place / "refuses").read_text() in ("", found[0]["kind"]):
        sys.exit('error: resource mapping not found: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"')
    with (place / "created").open("a") as created:
        created.writelines(json.dumps(manifest) + "\\n" for manifest in found)
elif args[0] == "get" and (place / "silent").exists():
    sys.exit("Unable to connect to the server: dial tcp: i/o timeout")
elif args[:2] == ["get", "pods"]:
    print((place / "pods.json").read_text())
elif args[0] == "get":
    if (place / "deleted").exists():
        sys.exit(f'Error from server (NotFound): {args[1]} "{args[2]}" not found')
    print((place / "status.json").read_text())
elif args[0] == "logs":
    print(f"told by {args[2]}", flush=True)
    while not (place / "over").exists():
        time.sleep(0.1)
    print("the end")
elif args[0] == "cp":
    shutil.copytree(place / "trace", args[2])
elif args[:2] == ["delete", "jobset"] or args[:2] == ["delete", "trainjob"]:
    (place / "deleted").touch()
    (place / "over").touch()
"""


class Place:
    """A folder with what the stand-in answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kubectl = folder / "bin" / "kubectl"
        kubectl.parent.mkdir()
        kubectl.write_text(KUBECTL.replace("{python}", sys.executable))
        kubectl.chmod(0o755)
        (folder / "train.py").write_text("print(1)\n")
        self.pods("Pending")
        self.says()

    def pods(self, phase: str, codes: tuple[int, ...] = ()) -> None:
        states = [{"state": {"terminated": {"exitCode": code}}} for code in codes]
        items = [
            {
                "metadata": {
                    "name": f"job-worker-0-{index}-abcde",
                    "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
                },
                "status": {"phase": phase, "containerStatuses": states[index : index + 1]},
            }
            for index in (0, 1)
        ]
        self._write("pods.json", {"items": items})

    def says(self, *conditions: tuple[str, str, str]) -> None:
        named = [{"type": kind, "status": "True", "reason": reason, "message": text} for kind, reason, text in conditions]
        self._write("status.json", {"status": {"conditions": named}})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        (self.folder / f"{name}.new").write_text(json.dumps(content))
        (self.folder / f"{name}.new").rename(self.folder / name)

    @contextmanager
    def launch(self, kind: str, *args: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "emulate", "launch", "train.py", f"--{kind}", "--topology", "2x4"]
        command += ["--image", "a/b", "--name", "job", *args]
        with self._start(command) as process:
            yield process

    @contextmanager
    def _start(self, command: list[str]) -> Iterator[subprocess.Popen[str]]:
        environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PLACE": str(self.folder)}
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def looks(self, option: str) -> str:
        with self._start([sys.executable, "-m", "emulate", "launch", option, "gpudist-jobs/job"]) as process:
            return process.communicate(timeout=60)[0].strip()

    def created(self) -> list[str]:
        return [json.loads(line)["kind"] for line in (self.folder / "created").read_text().splitlines()]

    def wait_for_logs(self) -> None:
        until = time.monotonic() + 60
        while len([log for log in self.folder.glob("gpudist-jobs/job/host-*.log") if log.read_text()]) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)

    def end(self, kind: str, reason: str = "", text: str = "") -> None:
        (self.folder / "over").touch()
        self.says((kind, reason, text))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("kind", "created", "end"), [("jobset", ["JobSet"], "Completed"), ("trainjob", ["TrainingRuntime", "TrainJob"], "Complete")]
)
def test_a_job_is_created_followed_and_its_logs_are_shown(kind: str, created: list[str], end: str, place: Place) -> None:
    with place.launch(kind, "--namespace", "team") as process:
        until = time.monotonic() + 60
        while not (place.folder / "gpudist-jobs/job/job.json").exists() and time.monotonic() < until:
            time.sleep(0.1)
        assert place.looks("--status") == "waiting: 0 of 2 pods started"
        place.pods("Running")
        place.wait_for_logs()
        assert place.looks("--status") == "running: 2 of 2 pods started"
        place.end(end)
        out = process.communicate(timeout=60)[0]
    assert (process.returncode, place.created()) == (0, created), out
    for index in (0, 1):
        assert f"[host {index}] told by job-worker-0-{index}-abcde" in out
        assert f"[host {index}] the end" in out
    calls = (place.folder / "calls").read_text().splitlines()
    assert all("--namespace team" in call for call in calls)
    assert place.looks("--status") == "succeeded"


def test_a_job_that_fails_says_what_kubernetes_says_and_which_pod_ended(place: Place) -> None:
    place.pods("Failed", (0, 4))
    place.end("Failed", "FailedJobs", "jobset failed due to one or more job failures")
    with place.launch("jobset") as process:
        out = process.communicate(timeout=60)[0]
    assert process.returncode == 3
    said = "failed: Kubernetes says FailedJobs: jobset failed due to one or more job failures"
    assert f"{said}; job-worker-0-1-abcde ended with exit code 4." in out


def test_a_job_that_is_out_of_time_ends_with_4(place: Place) -> None:
    place.end("Failed", "FailJobSetFailurePolicyAction", "job failed with reason DeadlineExceeded")
    with place.launch("jobset") as process:
        process.communicate(timeout=60)
    assert process.returncode == 4


def test_what_the_cluster_refuses_is_said_in_its_own_words(place: Place) -> None:
    (place.folder / "refuses").touch()
    with place.launch("jobset") as process:
        out = process.communicate(timeout=60)[0]
    assert process.returncode == 5
    assert 'kubectl must succeed. Received: error: resource mapping not found: no matches for kind "JobSet"' in out


def test_a_job_goes_on_while_the_cluster_does_not_answer(place: Place) -> None:
    place.pods("Running")
    with place.launch("jobset") as process:
        place.wait_for_logs()
        (place.folder / "silent").touch()
        time.sleep(3)  # longer than between two questions
        assert process.poll() is None
        assert "Unable to connect to the server" in place.looks("--status")
        (place.folder / "silent").unlink()
        place.end("Completed")
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert "delete" not in (place.folder / "calls").read_text()


@pytest.mark.parametrize(("refused", "deleted"), [("TrainingRuntime", []), ("TrainJob", ["trainingruntime"])])
def test_only_what_was_created_is_deleted_where_the_cluster_refuses(refused: str, deleted: list[str], place: Place) -> None:
    (place.folder / "refuses").write_text(refused)
    with place.launch("trainjob") as process:
        process.communicate(timeout=60)
    assert process.returncode == 5
    calls = (place.folder / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls if call.startswith("delete")] == deleted


@pytest.mark.parametrize("how", ["Ctrl-C", "--cancel"])
def test_a_job_that_is_ended_is_deleted_with_its_pods(how: str, place: Place) -> None:
    place.pods("Running")
    with place.launch("trainjob") as process:
        place.wait_for_logs()
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            assert place.looks("--cancel") == "Cancelled trainjob job."
        out = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if how == "Ctrl-C" else 3), out
    calls = (place.folder / "calls").read_text()
    assert "delete trainjob job --ignore-not-found --cascade=foreground" in calls
    assert "delete trainingruntime job" in calls


def test_the_trace_of_a_recorded_job_is_copied_through_a_pod_that_is_deleted_afterwards(place: Place) -> None:
    (place.folder / "trace").mkdir()
    (place.folder / "trace" / "trace.json").write_text("{}")
    place.end("Completed")
    with place.launch("jobset", "--record", "5", "--claim", "shared") as process:
        out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    assert (place.folder / "gpudist-jobs/job/trace/trace.json").exists()
    assert place.created() == ["JobSet", "Pod"]
    [jobset, pod] = [yaml.safe_load(line) for line in (place.folder / "created").read_text().splitlines()]
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["spec"]["volumes"] == inner["volumes"] == [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    assert "/gpudist/job/trace" in inner["containers"][0]["command"]
    calls = (place.folder / "calls").read_text()
    assert "cp job-trace:/gpudist/job/trace" in calls
    assert calls.splitlines()[-1].startswith("delete pod job-trace")
