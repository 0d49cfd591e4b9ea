"""Describe how one run went and ended, and the files that it shares with other runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emulate.told import Told
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.run_spec import Arm


@dataclass(frozen=True)
class Met:
    """Hold the paths that runs have in common with others.

    Attributes:
        found: They read there what only another run can have written.
        read_back: They had written it themselves when they read it, and another run may have written it since.
        written: They wrote it.
    """

    found: tuple[str, ...] = ()
    read_back: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @classmethod
    def of(cls, read: Mapping[str, bool], written: Collection[str], by_others: Collection[str]) -> Met:
        """Make the object for one run.

        Args:
            read: What it read, and whether it had written it itself by then.
            written: What it wrote.
            by_others: What other runs wrote.

        Returns:
            Where it met them.
        """
        shared = sorted(path for path in read if path in by_others)
        return cls(
            tuple(path for path in shared if not read[path]),
            tuple(path for path in shared if read[path]),
            tuple(sorted(path for path in written if path in by_others)),
        )

    @classmethod
    def together(cls, several: Iterable[Met]) -> Met:
        """Combine the paths of several runs."""
        every = list(several)
        parts = [[getattr(met, name) for met in every] for name in cls.__dataclass_fields__]
        return cls(*(tuple(dict.fromkeys(path for paths in part for path in paths)) for part in parts))

    @property
    def read(self) -> tuple[str, ...]:
        """Return what they read, starting with what only another run can have written."""
        return tuple(dict.fromkeys((*self.found, *self.read_back)))

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all of the paths."""
        return tuple(dict.fromkeys((*self.read, *self.written)))


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
        arm: What the program is given in place of its arguments and environment.
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
    notes: list[Told] = field(default_factory=list)
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
    arm: Arm | None = None


def trace_of(run: RunResult | None) -> Trace | None:
    """Return the trace of a run that ended well."""
    return run.trace if run is not None and run.status == "ok" else None


NO_THREAD = re.compile(r"[^\n]*(?:pthread_create(?:\(\))? failed|can't start new thread|Thread creation failed)[^\n]*")
"""Errors of TensorFlow, gRPC, Python and OpenMP if the system refuses a new thread."""


def error_line(text: str | None, otherwise: str) -> str:
    """Return the line that says what went wrong: the last of a traceback, the first if a process ended without one."""
    # TensorFlow names the operation after the error.
    lines = [line.strip() for line in (text or "").splitlines() if line.strip() and not line.strip().startswith("[[")]
    if not lines:
        return otherwise
    return lines[0] if lines[0].startswith("The process of ") else lines[-1]


class StartedRuns:
    """Hold every start of the program. Any thread may add one."""

    def __init__(self) -> None:
        self._results: list[RunResult] = []
        self._lock = threading.Lock()

    def add(self, result: RunResult) -> None:
        """Add a run that starts; each restart after a fault is one."""
        with self._lock:
            self._results.append(result)

    def __len__(self) -> int:
        with self._lock:
            return len(self._results)

    def meetings(self) -> list[str]:
        """Return paths that several runs wrote and each could see."""
        return sorted(path for path, runs in self._writers().items() if len(runs) > 1)

    def replaced(self) -> list[str]:
        """Return existing files outside of the runs' own folders that runs wrote or removed."""
        with self._lock:
            return sorted({path for run in self._results for path, was_there in list(run.written.items()) if was_there})

    def note_meetings(self, result: RunResult) -> None:
        """Note what a finished run has in common with others. All restarts of one program are one run."""
        by_others = {path for path, runs in self._writers().items() if runs - {result.label}}
        result.met = Met.of(result.read, result.written, by_others)

    def _writers(self) -> dict[str, set[str]]:
        """Return, by path that other runs can see, the runs that wrote it. Some may still run."""
        by: dict[str, set[str]] = {}
        with self._lock:
            for run in self._results:
                for path in list(run.written):
                    by.setdefault(path, set()).add(run.label)
        return by


@dataclass(frozen=True)
class Outcome:
    """Describe how the topology's run ended.

    Attributes:
        failure: The program's own traceback where it raised.
        raised: By host the traceback of what it raised.
        suspect: Of a hung run the code of the cause that the hang judge sees.
        where: Of a hung run what each host was doing.
        hung: `hang` or `timeout` where it had to be ended.
        hosts: By host how it ended: returned, raised, exited, killed, or ended (by us).
        codes: Exit codes, negative for a signal, of hosts that ended by themselves.
        stacks: Python stacks of the hosts that hung.
        reference_failure: The reference's traceback where it raised too.
        collectives: By host the collectives that its program has, each as often as it has it.
        saved: By checkpoint or model that was written, the hosts that did.
        cut: Hosts, of either run, whose process ended before what they had recorded was written.
        hides: How the program hides GPUs from itself.
    """

    failure: str | None = None
    raised: Mapping[int, str] = field(default_factory=dict)
    hung: str | None = None
    hosts: Mapping[int, str] = field(default_factory=dict)
    codes: Mapping[int, int | None] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    reference_failure: str | None = None
    suspect: str | None = None
    where: str = ""
    collectives: Mapping[int, Sequence[str]] = field(default_factory=dict)
    saved: Mapping[str, Collection[int]] = field(default_factory=dict)
    cut: Collection[int] = ()
    hides: str | None = None
