"""Programs run in hosts: each in a process of its own, because devices can be split only once in one."""

from __future__ import annotations

import base64
import functools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from emulate.devices import DevicePlan
from emulate.pickling import to_bytes

ROOT = Path(__file__).parents[3]


class Hosts:
    """Runs functions in hosts forked from one process that has imported TensorFlow.

    Attributes:
        notes: What the hosts of the last run noted, host 0's first.
    """

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()  # AutoGraph leaves a file for each function in a process that is ended
        own = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), "TMPDIR": self._temporary.name}
        self._parent = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("preloaded.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **own},
        )
        self.notes: list[tuple[str, str]] = []

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        devices: int = 4,
        hosts: int = 0,
        all_reduce: str = "auto",
        reference: bool = False,
        environment: dict[str, str] | None = None,
        limit: int = 120,
    ) -> Any:
        """What the function returns in one host, or, with `hosts`, the list of what it returns in each of a cluster."""
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        task = {
            "function": to_bytes(functools.partial(function, *args)),
            "plan": DevicePlan(devices, max(hosts, 1), all_reduce, reference),
            "ports": free_ports(hosts),
            "environment": environment or {},
            "limit": limit,
        }
        outcomes = self._ask(task)
        self.notes = [note for outcome in outcomes for note in outcome.get("notes", [])]
        errors = [outcome["error"] for outcome in outcomes if outcome["error"]]
        if errors:
            raise HostFailed("\n".join(errors))
        values = [outcome["value"] for outcome in outcomes]
        return values if hosts else values[0]

    def _ask(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._parent.stdin
        assert self._parent.stdout
        self._parent.stdin.write(base64.b64encode(pickle.dumps(task)).decode() + "\n")
        self._parent.stdin.flush()
        outcomes: list[dict[str, Any]] = pickle.loads(base64.b64decode(self._parent.stdout.readline()))
        return outcomes

    def close(self) -> None:
        assert self._parent.stdin
        assert self._parent.stdout
        self._parent.stdin.close()
        self._parent.stdout.close()
        self._parent.wait(timeout=30)
        self._temporary.cleanup()


class HostFailed(Exception):
    """What a function raised in a host, as text."""


def free_ports(number: int) -> list[int]:
    """Ports that nobody uses now; TensorFlow's server cannot bind one that we still hold."""
    held = [socket.create_server(("", 0)) for _ in range(number)]
    ports: list[int] = [port.getsockname()[1] for port in held]
    for port in held:
        port.close()
    return ports
