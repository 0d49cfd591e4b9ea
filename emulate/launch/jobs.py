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
    about = read(folder)
    if "ended" in about:
        return JobState(**about["ended"])
    if about["target"] == "slurm":
        return slurm.state_of(about["number"], folder)
    if about["target"] == "hosts":
        is_running = hosts.launcher_of(about["pid"], about["started"]) is not None
        return JobState("running") if is_running else JobState(FAILED, "its gpudist launch has ended without a word")
    namespace = _namespace(about)
    return kubernetes.state_of(about["target"], about["name"], namespace, kubernetes.pods_of(about["name"], namespace))


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
    about = read(folder)
    if "ended" in about:
        return JobState(**about["ended"])
    if about["target"] == "slurm":
        slurm.cancel(about["number"])
        return slurm.state_of(about["number"], folder)
    if about["target"] == "hosts":
        return _interrupt(folder, about)
    kubernetes.delete(about["kinds"], about["name"], _namespace(about))
    return JobState(CANCELLED)


def _interrupt(folder: Path, about: dict[str, Any]) -> JobState:
    """Interrupt the process that holds the connections, which then ends the program on each host, and wait for it."""
    launcher, until = hosts.launcher_of(about["pid"], about["started"]), time.monotonic() + _PATIENCE
    if launcher is not None:
        launcher.send_signal(signal.SIGINT)
    while not (state := status(folder)).is_over and time.monotonic() < until:
        time.sleep(0.2)
    return state


def _namespace(about: dict[str, Any]) -> list[str]:
    return ["--namespace", about["namespace"]] if about["namespace"] else []
