"""Give what a host runs its place in the cluster and its connection to the supervisor."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps  # by name: a test may put something else in its place
from pathlib import Path
from typing import Any

from emulate.cluster.channel import ANSWER, EVENT, Channel
from emulate.cluster.views import Views
from emulate.errors import UsageError
from emulate.program import original
from emulate.topology import Topology


@dataclass
class HostContext:
    """Give an entry access to its host.

    Attributes:
        topology: The cluster's topology.
        host: This host's number.
        role: `worker`, `chief` or `ps`.
        directory: This host's own folder: `host-<number>` in the folder of the run.
        views: What this run sees of the user's folders.
        has_own_network: Whether the hosts have a private network.
    """

    topology: Topology
    host: int
    role: str
    directory: Path
    _channel: Channel = field(repr=False)
    views: Views = field(repr=False)
    has_own_network: bool = False

    def send(self, event: Mapping[str, Any]) -> None:
        """Tell the supervisor something that JSON can say; from any thread.

        Args:
            event: What it is, under `event`, and whatever belongs to it.

        Raises:
            UsageError: When it does not say what it is.
        """
        if not (isinstance(event, Mapping) and isinstance(event.get("event"), str)):
            raise UsageError(
                f"What a host sends must say what it is, under 'event'. Received: event={event!r}. "
                "Send {'event': 'progress', 'step': 3}, say."
            )
        with contextlib.suppress(OSError):  # a supervisor that is gone is about to end this process
            self._channel.send(EVENT, original(dumps(event, separators=(",", ":"))).encode())

    def answer(self, event: Mapping[str, Any]) -> None:
        """Send an answer as `send` does, for anything that pickle supports: the supervisor unpickles it."""
        with contextlib.suppress(OSError):
            self._channel.send(ANSWER, pickle.dumps(dict(event)))

    def receive(self) -> bytes:
        """Wait for what the supervisor sends with `RunningCluster.tell`; EOFError when it is gone."""
        return self._channel.receive()[1]

    def fileno(self) -> int:
        """Return the file descriptor of the connection to the supervisor."""
        return self._channel.fileno()

    def path(self, path: Path) -> Path:
        """Return the place of a user's file in this run: the same path, or its working copy."""
        return self.views.path(path)

    def is_private(self, path: str) -> bool:
        """Return whether what is written at this path belongs to this run: in a view, or in the run's folder."""
        return self.views.is_private(path)

    def note(self, code: str, text: str) -> None:
        """Tell the supervisor something the user should know."""
        self.send({"event": "note", "code": code, "text": text})
