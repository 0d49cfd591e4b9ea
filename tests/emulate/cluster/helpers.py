"""What the tests of clusters share: how a run went, waiting, counting what is left."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from emulate.cluster import HostOutcome, RunningCluster

LIMIT = 60.0  # seconds; guards against hanging


@dataclasses.dataclass
class Ran:
    """How a run went."""

    outcomes: dict[int, HostOutcome]
    events: list[tuple[int, dict[str, Any]]]
    isolation: str
    notes: list[str]
    directory: Path

    @property
    def values(self) -> list[Any]:
        for outcome in self.outcomes.values():
            assert outcome.status == "returned", (outcome, self.output(outcome.host, "stderr"))
        return [self.outcomes[host].value for host in sorted(self.outcomes)]

    def output(self, host: int, name: str = "stdout") -> str:
        return (self.directory / f"host-{host}" / name).read_text()

    def sent(self, kind: str) -> list[dict[str, Any]]:
        return [event for _, event in self.events if event["event"] == kind]


def events_until(cluster: RunningCluster, is_enough: Callable[[list[tuple[int, dict[str, Any]]]], bool]) -> list[Any]:
    """Collect events until there are enough."""
    events: list[Any] = []
    deadline = time.monotonic() + LIMIT
    while not is_enough(events):
        assert time.monotonic() < deadline, (events, cluster.outcomes)
        events += cluster.events(0.05)
    return events


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait until something holds."""
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_python(code: str, *args: str, **options: Any) -> psutil.Popen:
    """Start a supervisor of its own, so that it can be interrupted and killed."""
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return psutil.Popen([sys.executable, "-c", code, *args], env={**os.environ, "PYTHONPATH": path}, **options)
