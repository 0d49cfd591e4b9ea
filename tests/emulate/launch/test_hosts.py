"""Jobs on plain hosts, through real processes: `ssh` is a stand-in that runs its command here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.emulate.launch.programs import TELLS

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" != -o ] || shift; shift; done
host=$1; shift
[ "$host" != unreachable ] || { echo "ssh: connect to host unreachable port 22: No route to host" >&2; exit 255; }
exec sh -c "$*"
"""

GPUDIST = """
import sys
from emulate.cli import main
from emulate.launch import hosts

hosts._PEERS = {peers}
sys.exit(main())
"""


class Place:
    """A folder with a program and hosts, and gpudist there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers = 20.0  # seconds that a host has when another one has failed
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        (folder / "train.py").write_text(TELLS)
        (folder / "hosts").write_text("localhost\n127.0.0.1\n")

    @contextmanager
    def start(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", GPUDIST.format(peers=self.peers), "launch", *args]
        environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def launch(self, *args: str, hosts: str = "hosts") -> tuple[int, str]:
        with self.start("train.py", "--hosts", hosts, "--name", "job", *args) as process:
            out, _ = process.communicate(timeout=120)
        return process.returncode, out

    def looks(self, option: str) -> str:
        with self.start(option, "gpudist-jobs/job") as process:
            return process.communicate(timeout=60)[0].strip()

    def left(self, seconds: float = 5) -> list[str]:
        """The processes of the job that are still there after some seconds: they have the program's folder as their own."""
        until = time.monotonic() + seconds
        while (found := self._running()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def _running(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                pass
        return found

    def wait_for(self, text: str, times: int) -> None:
        until = time.monotonic() + 60
        while sum(log.read_text().count(text) for log in self.folder.glob("gpudist-jobs/job/host-*.log")) < times:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def told(out: str) -> list[dict[str, object]]:
    return [json.loads(line.split("told ")[1].rpartition(" [")[0]) for line in out.splitlines() if "told " in line]


def test_each_host_gets_its_task_and_the_programs_arguments(place: Place) -> None:
    code, out = place.launch("--", "a b", "$c")
    assert code == 0, out
    workers = ["localhost:2222", "127.0.0.1:2223"]
    assert told(out) == [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in (0, 1)]
    assert out.count("['a b', '$c']") == 2
    assert "[host 1] done" in out
    assert place.looks("--status") == "succeeded"
    assert place.looks("--logs").count("done") == 2
    assert place.left() == []


def test_a_host_that_fails_ends_the_others(place: Place) -> None:
    started = time.monotonic()
    place.peers = 3.0
    code, out = place.launch("--", "fails")
    assert code == 3, out
    assert "failed: host 1 (127.0.0.1) ended with exit code 4." in out
    assert 3 < time.monotonic() - started < 60
    assert place.looks("--status") == "failed: host 1 (127.0.0.1) ended with exit code 4"
    assert place.left() == []


def test_hosts_that_leave_with_75_are_all_started_again(place: Place) -> None:
    code, out = place.launch("--restarts", "1", "--", "leaves")
    assert (code, len(told(out)), out.count("done")) == (0, 4, 2), out


def test_without_restarts_exit_code_75_is_a_failure(place: Place) -> None:
    code, out = place.launch("--", "leaves")
    assert code == 3
    assert "ended with exit code 75" in out


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_named(place: Place) -> None:
    (place.folder / "bad").write_text("localhost\nunreachable\n")
    code, out = place.launch("--", "stays", hosts="bad")
    assert code == 3
    assert "[host 1] ssh: connect to host unreachable port 22: No route to host" in out
    assert "host 1 (unreachable) lost its connection, or ssh could not reach it" in out
    assert place.left() == []


def test_a_job_ends_at_its_time_limit(place: Place) -> None:
    code, out = place.launch("--time-limit", "3s", "--", "stays")
    assert code == 4
    assert "timed-out: --time-limit of 3 s" in out
    assert place.left() == []


def test_ctrl_c_ends_the_program_on_each_host(place: Place) -> None:
    with place.start("train.py", "--hosts", "hosts", "--name", "job", "--", "stays") as process:
        place.wait_for("told", 2)
        assert place.looks("--status") == "running"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "[host 1] told" in out
        assert place.looks("--status") == "cancelled: by gpudist"
        assert place.left() == []


def test_sigterm_lets_the_program_save_and_its_exit_code_is_gpudists(place: Place) -> None:
    with place.start("train.py", "--hosts", "hosts", "--name", "job", "--restarts", "1", "--", "saves") as process:
        place.wait_for("ready", 2)
        process.terminate()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 75, out
        assert [(place.folder / f"saved-{host}").exists() for host in (0, 1)] == [True, True]
        assert place.looks("--status").startswith("cancelled: SIGTERM: host ")
        assert place.left() == []


def test_a_second_sigterm_and_the_end_of_the_grace_end_a_program_that_stays(place: Place) -> None:
    with place.start("train.py", "--hosts", "hosts", "--name", "job", "--grace", "100", "--", "stubborn") as process:
        place.wait_for("ready", 2)
        process.terminate()
        place.wait_for("heard", 2)
        time.sleep(1)  # sooner it is the same notice
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
        assert place.left() == []
    shutil.rmtree(place.folder / "gpudist-jobs")
    with place.start("train.py", "--hosts", "hosts", "--name", "job", "--grace", "1", "--", "stubborn") as process:
        place.wait_for("ready", 2)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGKILL
        assert place.left() == []


def test_cancel_ends_a_job_from_elsewhere(place: Place) -> None:
    with place.start("train.py", "--hosts", "hosts", "--name", "job", "--", "stays") as process:
        place.wait_for("told", 2)
        assert place.looks("--cancel") == "Cancelled job on 2 hosts."
        assert process.wait(60) == 130
        assert place.looks("--cancel") == "Nothing was cancelled: job on 2 hosts had already ended (cancelled: by gpudist)."
        assert place.left() == []


def test_programs_end_with_a_launcher_that_is_killed(place: Place) -> None:
    with place.start("train.py", "--hosts", "hosts", "--name", "job", "--", "stays") as process:
        place.wait_for("told", 2)
        process.kill()
        process.wait()
        assert place.left(30) == []
        assert "ended without a word" in place.looks("--status")
