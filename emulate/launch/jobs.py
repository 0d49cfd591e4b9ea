"""Find a job again by its folder: how far it is, what it has written, and its end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from emulate.launch import hosts, kubernetes, slurm
from emulate.launch.target import CANCELLED, FAILED, JobState, read

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


def cancel(folder: Path) -> JobState:
    """End a job that runs.

    Args:
        folder: The job's folder.

    Returns:
        Its state now.

    Raises:
        UsageError: If the folder has no job.
        Unavailable: If the scheduler does not answer.
    """
    record = read(folder)
    if "ended" in record:
        return JobState(**record["ended"])
    if record["target"] == "slurm":
        slurm.cancel(record["number"])
        return slurm.state_of(record["number"], folder)
    if record["target"] == "hosts":
        return _interrupt(folder, record)
    kubernetes.delete(record["kinds"], record["name"], _namespace(record))
    return JobState(CANCELLED)


def _interrupt(folder: Path, record: dict[str, Any]) -> JobState:
    """Interrupt the process that holds the connections, which then ends the program on each host, and wait for it."""
    launcher, until = hosts.launcher_of(record["pid"], record["started"]), time.monotonic() + _PATIENCE
    if launcher is not None:
        launcher.send_signal(signal.SIGINT)
    while not (state := status(folder)).is_over and time.monotonic() < until:
        time.sleep(0.2)
    return state


def _namespace(record: dict[str, Any]) -> list[str]:
    return ["--namespace", record["namespace"]] if record["namespace"] else []
