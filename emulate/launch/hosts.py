"""Run a job on plain hosts by ssh. This process is the scheduler."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from emulate.cluster import FIRST_PORT, TEMPORARY_FAILURE, first_sigterm
from emulate.errors import UsageError
from emulate.launch.job import PREPARE, Job, log_file, no_proxy, tf_config
from emulate.launch.target import CANCELLED, FAILED, SUCCEEDED, TIMED_OUT, HostCommand, JobState, check_installed

SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""ssh without questions; it gives up a host that does not answer for a minute."""
_HOST = re.compile(r"(?:[\w.-]+@)?[A-Za-z0-9][A-Za-z0-9.-]*")
_LOST = 255
_PEERS = 20.0
"""Seconds for which the other hosts may report why they fail, too, once one has failed."""
_KILL = 10.0
"""Seconds after the grace until ssh itself is killed."""


def read_hosts(file: Path) -> list[str]:
    """Read a hosts file: one host on a line, as `ssh` takes it (`n1`, `user@n2`). `#` begins a comment.

    Args:
        file: The file.

    Returns:
        The hosts, in order.

    Raises:
        UsageError: If the file cannot be read, or has something else or a host twice.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--hosts must name a file with one host on each line. Received: {str(file)!r} ({said}).") from None
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        where = f"Received: {host!r} in {file}, line {number}."
        if not _HOST.fullmatch(host):
            raise UsageError(f"A line of --hosts must be one host, as ssh takes it: n1 or user@n1. {where}")
        if host in hosts:
            raise UsageError(f"Each host of --hosts must be there once. {where} It is also on a line above.")
        hosts.append(host)
    if not hosts:
        raise UsageError(f"--hosts must name a file with one host on each line. Received: {str(file)!r}, which has none.")
    return hosts


@dataclass
class HostsBySsh:
    """Run a job on hosts that ssh reaches without a password.

    Attributes:
        job: The job.
        hosts: The hosts as ssh takes them, one for each host of the topology.
        port: The port of the first host's TensorFlow server; the next hosts have the next ports.
        grace: Seconds from SIGTERM to SIGKILL on a host.
    """

    job: Job
    hosts: Sequence[str]
    port: int = FIRST_PORT
    grace: int = 30
    poll: float = 0.2
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)
    _failed: int | None = None
    _failed_at: float = 0.0
    _restarts: int = 0
    _is_terminated: bool = False
    _heard: list[float] = field(default_factory=list)
    _signals: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        if len(self.hosts) != self.job.num_hosts:
            raise UsageError(
                f"--hosts must have one line for each host of the topology. Received: {len(self.hosts)} hosts, "
                f"--topology {self.job.topology}."
            )

    @property
    def names(self) -> list[str]:
        """Return the hosts' names, without users."""
        return [host.rpartition("@")[2] for host in self.hosts]

    def script(self, number: int) -> str:
        """Return what ssh runs on a host. The program ends with the connection: standard input is open as long as it is.

        A line there or its end sends SIGTERM to the program. Its end after a line ends the program at once.
        """
        job = self.job
        places = ", ".join(f'"{name}:{self.port + place}"' for place, name in enumerate(self.names))
        several = [no_proxy(",".join(self.names)), f"export TF_CONFIG={shlex.quote(tf_config(places, str(number)))}"]
        seconds = " ".join(map(str, range(self.grace)))
        alive = 'kill -s 0 -- "-$program"'
        kill = 'kill -s KILL -- "-$program"'
        end = f'kill -s TERM -- "-$program"; for second in {seconds}; do {alive} && sleep 1; done; {kill}'
        return "\n".join(
            [
                f"cd {job.workdir} || exit 1" if job.workdir else "",
                PREPARE,
                f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(job.num_gpus))) or -1}",
                *(several if job.topology.has_several_hosts else []),
                "exec 3<&0",
                f"setsid {shlex.join(job.command)} </dev/null &",
                "program=$!",
                f"{{ read -r asked <&3; is_lost=$?; {{ {end}; }} &",
                f'if [ "$is_lost" = 0 ]; then cat <&3; {kill}; fi; }} >/dev/null 2>&1 &',
                "watch=$!",
                'wait "$program"',
                "code=$?",
                'kill "$watch"',
                f"{kill} 2>/dev/null  # what it has left behind",
                'exit "$code"',
                "",
            ]
        )

    @property
    def text(self) -> str:
        """Return the script of each host."""
        return "\n".join(f"# ssh {host} sh -c ...\n{self.script(number)}" for number, host in enumerate(self.hosts))

    def submit(self) -> dict[str, Any]:
        """Start the program on each host."""
        check_installed(SSH[:1])
        self._heard = self._signals.enter_context(first_sigterm())
        self._start()
        own = psutil.Process()
        return {
            "target": "hosts",
            "pid": own.pid,
            "started": own.create_time(),
            "label": f"{self.job.name} on {len(self.hosts)} hosts",
        }

    def _start(self) -> None:
        self._failed = None
        for number, host in enumerate(self.hosts):
            with log_file(self.job.folder, number).open("ab") as log:
                command = [*SSH, host, shlex.join(["sh", "-c", self.script(number)])]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
            self._processes.append(process)

    def state(self) -> JobState:
        """Look at each connection; start all hosts again where they asked for it."""
        if self._heard and not self._is_terminated:
            self._is_terminated = True
            for process in self._processes:
                with contextlib.suppress(OSError):  # a connection that is gone
                    os.write(process.stdin.fileno(), b"\n")  # type: ignore[union-attr]
        codes = [process.poll() for process in self._processes]
        if self.job.seconds is not None and time.monotonic() - self._since > self.job.seconds:
            self.cancel()
            return JobState(TIMED_OUT, f"--time-limit of {self.job.seconds} s")
        if self._failed is None:
            self._failed = next((number for number, code in enumerate(codes) if code), None)
            self._failed_at = time.monotonic()
        peers = max(_PEERS, self.grace) if self._is_terminated else _PEERS
        if None in codes and (self._failed is None or time.monotonic() - self._failed_at < peers):
            notice = f"SIGTERM: the program has {self.grace} s to save and exit (--grace)" if self._is_terminated else ""
            return JobState("running", notice or (f"restart {self._restarts}" if self._restarts else ""))
        if self._failed is None:
            return JobState(SUCCEEDED)
        code = codes[self._failed]
        self.cancel()
        if code == TEMPORARY_FAILURE and self._restarts < self.job.restarts and not self._is_terminated:
            self._restarts += 1
            self._start()
            return JobState("running", f"restart {self._restarts}")
        how = "lost its connection, or ssh could not reach it" if code == _LOST else f"ended with exit code {code}"
        text = f"host {self._failed} ({self.hosts[self._failed]}) {how}"
        return JobState(CANCELLED, f"SIGTERM: {text}", code) if self._is_terminated else JobState(FAILED, text)

    def cancel(self) -> bool:
        """End the program on each host: SIGTERM, then SIGKILL."""
        was_started = bool(self._processes)
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        until = time.monotonic() + self.grace + _KILL
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []
        return was_started

    def finish(self) -> None:
        """Close the connections."""
        self.cancel()
        self._signals.close()

    def collect(self) -> None:
        """Do nothing: the trace lies in the shared folder."""

    def host_commands(self) -> list[HostCommand]:
        """Return what each host runs."""
        return [HostCommand((name,), ("sh", "-c", self.script(number))) for number, name in enumerate(self.names)]


def launcher_of(pid: int, started: float) -> psutil.Process | None:
    """Return the process of `gpudist launch --hosts` that runs a job; None if it has ended."""
    try:
        process = psutil.Process(pid)
        is_it = abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
        return process if is_it else None
    except psutil.Error:
        return None
