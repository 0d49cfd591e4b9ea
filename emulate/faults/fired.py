"""Describe faults that have occurred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emulate.faults.values import AtStep, Fault


@dataclass(frozen=True)
class Fired:
    """Describe a fault that has occurred.

    Attributes:
        number: Its place in the list that the user gave.
        fault: What it was.
        step: In which step, counted from 1; None where it has none.
    """

    number: int
    fault: Fault
    step: int | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any], faults: Sequence[Fault]) -> Fired:
        """Make the object from the event that a host sends."""
        return cls(int(event["fault"]), faults[event["fault"]], event.get("step"))

    @property
    def host(self) -> int | None:
        """Return the host of the fault; None for the links of all."""
        return getattr(self.fault, "host", None)

    def __str__(self) -> str:
        how = _HOW.get(self.fault.kind, self.fault.kind)
        who = "the links" if self.host is None else f"host {self.host}"
        if not isinstance(self.fault, AtStep):
            return f"{who} {how} (--fault {self.fault})"
        return f"{who} {how} in its step {self.step} (counted from 1), {self.fault.phase} (--fault {self.fault})"


_HOW = {
    "kill": "was killed",
    "stop": "was stopped",
    "preempt": "received SIGTERM",
    "slow": "was slowed down",
    "disconnect": "was disconnected",
    "fill-disk": "had a full disk",
    "missing": "never started",
    "late": "started late",
    "link": "were made slow or lossy",
}
