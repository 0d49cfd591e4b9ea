"""Define faults as values: which fault, on which host, and when. A fault that has occurred is one, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar

from emulate.errors import UsageError

PHASES = ("input", "before-all-reduce", "all-reduce", "after-all-reduce", "checkpoint")
"""The phases of a step: before its batch reaches the replicas; with gradients that are not sent yet; after a peer has sent its
gradients and waits; with a sum that is not applied yet; during the first checkpoint after the step."""


_FORMS: dict[str, tuple[type, str]] = {
    "host": (Integral, "a whole number"),
    "step": (Integral, "a whole number"),
    "phase": (str, "a text"),
    "seconds": (Real, "a number"),
    "factor": (Real, "a number"),
    "latency": (Real, "a number"),
    "loss": (Real, "a number"),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Provide what all faults share. `str` returns the text that `parse` reads.

    A fault with a step occurs once, in the first step from that one on that reaches its phase. Steps are counted from 1, as in
    `Checkpoints`, and continue after a program has restored its optimizer.
    """

    kind: ClassVar[str] = ""
    meaning: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            kind, wanted = _FORMS[field.name]
            value = getattr(self, field.name)
            holds = isinstance(value, kind) or (value is None and field.default is None)
            self._must(holds, f"A fault's {field.name} must be {wanted}")

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}
        return f"{self.kind}:" + ",".join(f"{name}={_short(name, value)}" for name, value in given.items())

    @property
    def is_final(self) -> bool:
        """Return whether the host or its link is gone for good, so that no program continues with that host."""
        return isinstance(self, (Kill, Preempt, Missing)) or (isinstance(self, (Stop, Disconnect)) and self.seconds is None)

    def _must(self, holds: bool, rule: str) -> None:
        if not holds:
            raise UsageError(f"{rule}. Received: fault={str(self)!r}. Write it as in {EXAMPLES[self.kind]!r}.")


def _short(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    thousandths, hundredths = f"{value * 1000:.12g}", f"{value * 100:.12g}"
    if name == "latency" and float(thousandths) * 1e-3 == value:  # else it would not read back as it is
        return f"{thousandths}ms"
    if name == "loss" and float(hundredths) / 100 == value:
        return f"{hundredths}%"
    return repr(value).removesuffix(".0")


@dataclass(frozen=True, kw_only=True)
class OnHost(Fault):
    """Describe a fault of one host.

    Attributes:
        host: The number of the host.
    """

    host: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must(self.host >= 0, "Hosts are counted from 0")


@dataclass(frozen=True, kw_only=True)
class AtStep(OnHost):
    """Describe a fault of one host in one step.

    Attributes:
        step: The step, counted from 1.
        phase: One of `PHASES`.
    """

    step: int = 1
    phase: str = "input"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must(self.step >= 1, "Steps are counted from 1")
        self._must(self.phase in PHASES, f"A phase must be one of {', '.join(PHASES)}")


@dataclass(frozen=True, kw_only=True)
class Kill(AtStep):
    """Kill the host's process (SIGKILL), like a machine that loses power."""

    kind = "kill"
    meaning = "kills the process of the host (SIGKILL)"


@dataclass(frozen=True, kw_only=True)
class Stop(AtStep):
    """Stop the host's process (SIGSTOP), like a machine that freezes.

    Attributes:
        seconds: How long it is stopped, in seconds; None for good.
    """

    seconds: float | None = None
    kind = "stop"
    meaning = "stops the process of the host (SIGSTOP), for `seconds` or forever"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must(self.seconds is None or self.seconds > 0, "A stop must have seconds > 0, or none to stop forever")


@dataclass(frozen=True, kw_only=True)
class Preempt(AtStep):
    """Ask the host to stop (SIGTERM), as schedulers do, and kill it if it still runs after a while.

    Attributes:
        seconds: How long to wait before the kill, in seconds.
    """

    seconds: float = 30.0
    kind = "preempt"
    meaning = "sends SIGTERM, and SIGKILL after `seconds` (default: 30). On several hosts TensorFlow catches SIGTERM"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must(self.seconds > 0, "A preemption must have seconds > 0")


@dataclass(frozen=True, kw_only=True)
class Slow(AtStep):
    """Slow the host down in a step and in all later steps.

    Attributes:
        seconds: The extra time of each step, in seconds.
        factor: The factor by which each step takes longer, in place of `seconds`.
    """

    seconds: float | None = None
    factor: float | None = None
    kind = "slow"
    meaning = "makes this step and all later steps `seconds` longer, or `factor` times as long"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must((self.seconds is None) != (self.factor is None), "A slow host needs seconds or a factor, one of them")
        self._must(self.seconds is None or self.seconds > 0, "A slow host must have seconds > 0")
        self._must(self.factor is None or self.factor > 1, "A slow host must have factor > 1")
        self._must(self.phase != "checkpoint", "A slow host is slow in a phase of every step")


@dataclass(frozen=True, kw_only=True)
class Disconnect(AtStep):
    """Take the host's link down: nothing it sends arrives, nothing reaches it, and no connection is closed.

    Attributes:
        seconds: How long the link is down, in seconds; None for good.
    """

    seconds: float | None = None
    kind = "disconnect"
    meaning = "cuts the network connection of the host, for `seconds` or forever"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must(
            self.seconds is None or self.seconds > 0, "A disconnection must have seconds > 0, or none to disconnect forever"
        )


@dataclass(frozen=True, kw_only=True)
class FillDisk(AtStep):
    """Fill the host's disk: opening a file for writing and creating a folder fail with `No space left on device`.

    Appending to a file that is already open still works. So does reading.
    """

    kind = "fill-disk"
    meaning = (
        "fills the disk of the host: opening a file for writing and creating a folder fail with `No space left on device`. "
        "Appending to a file that is already open still works"
    )


@dataclass(frozen=True, kw_only=True)
class Missing(OnHost):
    """Do not start the host with the others. It starts if all hosts are restarted."""

    kind = "missing"
    meaning = "does not start the host. A restart of all hosts starts it"


@dataclass(frozen=True, kw_only=True)
class Late(OnHost):
    """Start the host's program later than the others.

    Attributes:
        seconds: The delay in seconds.
    """

    seconds: float
    kind = "late"
    meaning = "starts the program on this host `seconds` later than on the others"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must(self.seconds > 0, "A late host must have seconds > 0")


_LONGEST = 5.0
"""Seconds of latency: what takes longer is no link."""


@dataclass(frozen=True, kw_only=True)
class Link(Fault):
    """Make the links between the hosts slow or lossy from the start.

    Attributes:
        host: The host of the link; None for every host.
        latency: How long data from a host travels, in seconds.
        loss: The fraction of lost packets, from 0 to below 1.
    """

    host: int | None = None
    latency: float = 0.0
    loss: float = 0.0
    kind = "link"
    meaning = "delays packets of all hosts (or of one `host`) by `latency`, and drops a fraction `loss` of them"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must(self.host is None or self.host >= 0, "Hosts are counted from 0")
        self._must(self.latency >= 0, "A latency must not be negative")
        self._must(
            self.latency <= _LONGEST, f"A latency must be at most {_LONGEST:g} s (a number without a unit is in seconds)"
        )
        self._must(0 <= self.loss < 1, "A loss must be from 0% to below 100%")
        self._must(bool(self.latency or self.loss), "A link must have a latency or a loss")


KINDS: dict[str, type[Fault]] = {
    cls.kind: cls for cls in (Kill, Stop, Preempt, Slow, Disconnect, FillDisk, Missing, Late, Link)
}
EXAMPLES = {
    "kill": "kill:host=1,step=5,phase=all-reduce",
    "stop": "stop:host=1,step=5,seconds=3",
    "preempt": "preempt:host=0,step=5",
    "slow": "slow:host=1,step=2,factor=3",
    "disconnect": "disconnect:host=1,step=5,seconds=3",
    "fill-disk": "fill-disk:host=0,step=5",
    "missing": "missing:host=1",
    "late": "late:host=1,seconds=5",
    "link": "link:latency=20ms,loss=1%",
}


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
