"""Find a job again by its folder: how far it is, what it has written, and its end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from emulate.launch import hosts, kubernetes, slurm
from emulate.launch.target import FAILED, JobState, read

_PATIENCE = 60.0


def status(folder: Path) -> JobState:
    """Return how far a job is.

    Args:
        folder: The job's folder.

    Returns:
        Its state.

    Raises:
        UsageError: If the folder has no job.
        Unavailable: If the scheduler does not answer.
    """
    record = read(folder)
    if "ended" in record:
        return JobState(**record["ended"])
    if record["target"] == "slurm":
        return slurm.state_of(record["number"], folder)
    if record["target"] == "hosts":
        is_running = hosts.launcher_of(record["pid"], record["started"]) is not None
        return JobState("running") if is_running else JobState(FAILED, "its gpudist launch has ended without a word")
    namespace = _namespace(record)
    return kubernetes.state_of(record["target"], record["name"], namespace, kubernetes.pods_of(record["name"], namespace))


def cancel(folder: Path) -> str:
    """End a job that runs.

    Args:
        folder: The job's folder.

    Returns:
        What was done, for the user.

    Raises:
        UsageError: If the folder has no job.
        Unavailable: If the scheduler does not answer.
    """
    record, state = read(folder), status(folder)
    if state.is_over:
        return f"Nothing was cancelled: {record['label']} had already ended ({state})."
    if record["target"] == "slurm":
        slurm.cancel(record["number"])
    elif record["target"] == "hosts":
        # The process that holds the connections ends the program on each host.
        if (launcher := hosts.launcher_of(record["pid"], record["started"])) is not None:
            launcher.send_signal(signal.SIGINT)
    else:
        kubernetes.delete(record["kinds"], record["name"], _namespace(record))
    until = time.monotonic() + _PATIENCE
    while not (state := status(folder)).is_over and time.monotonic() < until:
        time.sleep(0.5)
    return f"Cancelled {record['label']}." if state.is_over else f"Asked {record['label']} to end. It is still {state}."


def _namespace(record: dict[str, Any]) -> list[str]:
    return ["--namespace", record["namespace"]] if record["namespace"] else []
