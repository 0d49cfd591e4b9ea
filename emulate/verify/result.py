"""Describe how one run went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emulate.probe import Trace
from emulate.topology import Topology
from emulate.verify.meetings import Met


@dataclass
class RunResult:
    """Describe how a run went.

    Attributes:
        status: `ok`, `failed` (the program raised or left with an error), or `hung`.
        reason: Of a hung run `hang` or `timeout`.
        cause: Of a hung run what the hang judge suspects: a cause code.
        failure: The program's own traceback, or how its process ended.
        raised: By host the traceback of what it raised.
        where: Of a hung run: what each host was doing.
        hosts: Last step and last collective of each host.
        written: Paths it wrote that other runs can see, and whether a file from before the verification lay there.
        read: Files it read there that were written meanwhile, and whether it had written them itself by then.
        met: Of these paths those that other runs wrote too.
        saved: Checkpoints and models it wrote, with the hosts that did.
        cut: Hosts whose process ended before what they had recorded was written.
        hides: How the program hides GPUs from itself.
        is_evaluated: Whether it was evaluated from another run's functions: the program was not started for it.
        asks_for_host: Whether a program on virtual hosts asks for the number of its host.
        xla: Whether a step compiled by XLA was recorded without it.
    """

    label: str
    topology: Topology
    trace: Trace | None
    status: str = "ok"
    reason: str | None = None
    cause: str | None = None
    failure: str | None = None
    raised: dict[int, str] = field(default_factory=dict)
    where: str = ""
    hosts: dict[int, dict[str, Any]] = field(default_factory=dict)
    statuses: dict[int, str] = field(default_factory=dict)
    codes: dict[int, int | None] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    written: dict[str, bool] = field(default_factory=dict)
    read: dict[str, bool] = field(default_factory=dict)
    met: Met = field(default_factory=Met)
    saved: dict[str, set[int]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    hides: str | None = None
    xla: bool = False
    is_evaluated: bool = False
    asks_for_host: bool = False
    seconds: float = 0.0
