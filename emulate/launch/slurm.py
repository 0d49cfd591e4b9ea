"""Run a job on Slurm: a batch script, and a script for each host that makes TF_CONFIG from Slurm's variables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulate.cluster import TEMPORARY_FAILURE
from emulate.errors import Unavailable, UsageError
from emulate.launch.job import PREPARE, Job, log_file, no_proxy, tf_config
from emulate.launch.target import (
    CANCELLED,
    FAILED,
    SUCCEEDED,
    TIMED_OUT,
    HostCommand,
    JobState,
    call,
    check_installed,
    uninterrupted,
)

_EXIT_CODE = "exit-code"
_NOTICE = 120
"""Seconds before the time limit at which a job that may be restarted gets SIGTERM, to save and leave."""
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
_ENDS = {"COMPLETED": SUCCEEDED, "TIMEOUT": TIMED_OUT, "DEADLINE": TIMED_OUT, "CANCELLED": CANCELLED}
_PROGRAMS = {"scontrol": "#!/bin/sh\n# show hostnames LIST\nprintf '%s\\n' \"$3\" | tr , '\\n'\n"}
_FIELD = re.compile(r"(\w+)=(\S*)")
_WORD = re.compile(r"[\w.,:@+-]+")


@dataclass
class Slurm:
    """Run a job on Slurm.

    Attributes:
        job: The job.
        options: Options for sbatch: `partition`, `account`, `qos`, `constraint`, by name.
        number: The number that Slurm gave to the job; empty before it is submitted.
    """

    job: Job
    options: dict[str, str] = field(default_factory=dict)
    number: str = ""
    poll: float = 2.0

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if not _WORD.fullmatch(value):
                raise UsageError(f"--{name} must be one word. Received: --{name} {value!r}.")

    @property
    def batch_script(self) -> str:
        """Return the script for sbatch. It starts one task on each host."""
        job, folder = self.job, self.job.folder
        limit = f"{job.seconds // 3600:02}:{job.seconds // 60 % 60:02}:{job.seconds % 60:02}" if job.seconds else None
        options = {
            "job-name": job.name,
            "nodes": str(job.num_hosts),
            "ntasks-per-node": "1",
            "gpus-per-node": str(job.num_gpus) if job.num_gpus else None,
            "cpus-per-task": None if job.cpus is None else str(job.cpus),
            "mem": job.memory,
            "time": limit,
            **self.options,
            "output": f"{folder}/batch.log",
            "open-mode": "append",
            "signal": f"TERM@{_NOTICE}" if job.restarts else None,
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        lines += ["#SBATCH --requeue" if job.restarts else "#SBATCH --no-requeue"]
        # Tasks are numbered node by node. A task that fails ends the others, which would wait for it.
        srun = "srun --distribution=block --kill-on-bad-exit=1 --open-mode=append"
        again = f'[ "$code" = {TEMPORARY_FAILURE} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]'
        return "\n".join(
            [
                "#!/usr/bin/env bash",
                *lines,
                f"{srun} --output={log_file(folder, '%t')} bash {folder}/host.sh",
                "code=$?",
                *([f'if {again}; then exec scontrol requeue "$SLURM_JOB_ID"; fi'] if job.restarts else []),
                f'echo "$code" > {folder}/{_EXIT_CODE}; exit "$code"',
                "",
            ]
        )

    @property
    def host_script(self) -> str:
        """Return the script that each host runs."""
        job = self.job
        config = tf_config("'\"$workers\"'", "'\"$SLURM_PROCID\"'")
        several = [
            "hosts= workers= port=$((10000 + SLURM_JOB_ID * 16 % 20000))  # so that two jobs on one node have different ports",
            'for host in $(scontrol show hostnames "$SLURM_STEP_NODELIST"); do',
            '  workers="$workers${workers:+, }\\"$host:$port\\"" hosts="$hosts${hosts:+,}$host" port=$((port + 1))',
            "done",
            no_proxy("$hosts"),
            f"export TF_CONFIG='{config}'",
        ]
        return "\n".join(
            [
                "#!/usr/bin/env bash",
                f"cd {job.workdir} || exit 1" if job.workdir else "",
                PREPARE,
                *(several if job.topology.has_several_hosts else []),
                "trap : TERM  # the program gets the signal too, and this script must outlive it",
                shlex.join(job.command),
                "code=$?",
                f'[ "$code" != {TEMPORARY_FAILURE} ] || sleep 5  # all hosts leave like this: none is to be killed before',
                'exit "$code"',
                "",
            ]
        )

    @property
    def text(self) -> str:
        """Return both scripts."""
        folder = self.job.folder
        return f"# {folder}/batch.sh\n{self.batch_script}\n# {folder}/host.sh\n{self.host_script}"

    def submit(self) -> dict[str, Any]:
        """Write the scripts into the job's folder and give them to sbatch."""
        check_installed(("sbatch", "scontrol", "scancel"))
        folder = self.job.folder
        (folder / "host.sh").write_text(self.host_script, encoding="utf-8")
        (folder / "batch.sh").write_text(self.batch_script, encoding="utf-8")
        with uninterrupted():
            self.number = call("sbatch", "--parsable", f"{folder}/batch.sh").strip().partition(";")[0]
        return {"target": "slurm", "number": self.number, "label": f"Slurm job {self.number}"}

    def state(self) -> JobState:
        """Ask the controller."""
        return state_of(self.number, self.job.folder)

    def cancel(self) -> bool:
        """End the job."""
        if self.number:
            cancel(self.number)
        return bool(self.number)

    def finish(self) -> None:
        """Do nothing: this process started nothing."""

    def collect(self) -> None:
        """Do nothing: the trace lies in the shared folder."""

    def host_commands(self) -> list[HostCommand]:
        """Return what each host runs, with the variables that srun sets."""
        names = [f"node{number}" for number in range(self.job.num_hosts)]
        step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": ",".join(names)}
        return [
            HostCommand((name,), ("bash", "-c", self.host_script), {**step, "SLURM_PROCID": str(number)}, _PROGRAMS)
            for number, name in enumerate(names)
        ]


def state_of(number: str, folder: Path) -> JobState:
    """Return how far a Slurm job is.

    Args:
        number: Its number.
        folder: Its folder.

    Returns:
        Its state.
    """
    try:
        fields = dict(_FIELD.findall(call("scontrol", "show", "job", "--oneliner", number)))
    except Unavailable as error:
        if "Invalid job id" not in str(error):
            raise
        code = _read(folder / _EXIT_CODE).strip()  # Slurm forgets a job minutes after its end
        if code == "0":
            return JobState(SUCCEEDED)
        return JobState(FAILED, f"exit code {code}" if code else "Slurm has forgotten the job, which has left no exit code")
    state = fields.get("JobState", "")
    if state in _RUNNING:
        return JobState("running", f"on {fields.get('NodeList')}")
    if state in _WAITING:
        reason = fields.get("Reason", "None")
        return JobState("waiting", "" if reason == "None" else f"Slurm says {reason}")
    if state in _ENDS:
        return JobState(_ENDS[state], "" if state == "COMPLETED" else f"Slurm says {state}")
    code = fields.get("ExitCode", "").partition(":")[0]
    errors = "; ".join(line for line in _read(folder / "batch.log").splitlines() if line.startswith("srun: error"))
    return JobState(FAILED, f"Slurm says {state}, exit code {code}{f' ({errors[:500]})' if errors else ''}")


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def cancel(number: str) -> None:
    """End a Slurm job. One that is over stays as it is."""
    call("scancel", number)
