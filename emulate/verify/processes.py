"""Hold the processes that runs are forked from, follow a running cluster to its end, and report how it ended."""

from __future__ import annotations

import errno
import math
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.cluster import (
    HangJudge,
    HostOutcome,
    Preload,
    RunningCluster,
    Standstill,
    first_cause,
    follows_from_a_peer,
    leaves_in_order,
    patience_after,
)
from emulate.devices import ASKED_FOR_HOST
from emulate.errors import GpudistError, Unavailable, UsageError
from emulate.told import Told, told
from emulate.verify.result import NO_THREAD, RunResult
from emulate.verify.settings import Ask, StepLimit

if TYPE_CHECKING:
    from emulate.progress import Progress


class Parents:
    """Keep one process that has imported TensorFlow, and make others for programs that it does not suit.

    TensorFlow and Keras read some environment variables when they are imported. For a program that sets one of them, later runs
    come from a process in which it is set before the import; for one that sets several, or removes one, from a process that has
    not imported anything.

    Args:
        shared: One that is up already and stays up; one of its own unless given.
        modules: What the processes import besides TensorFlow.
    """

    def __init__(self, shared: Preload | None, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._own: list[Preload] = []
        self._bare: Preload | None = None
        self.first = self._add(Preload(modules=modules)) if shared is None else shared
        self._current = self.first

    @property
    def current(self) -> Preload:
        """Return the one that the program's runs come from."""
        with self._lock:
            return self._current

    @property
    def bare(self) -> Preload:
        """Return one that has not imported TensorFlow."""
        with self._lock:
            if self._bare is None:
                self._bare = self._add(Preload(imports=False))
            return self._bare

    def replace(self, old: Preload, name: str, value: str | None) -> None:
        """Use another one from now on.

        Args:
            old: The one that did not suit; it may have been replaced by another run already.
            name: The variable that the program sets after TensorFlow has read it.
            value: To what; None where it is removed.
        """
        if old is self.first and value is not None:
            with self._lock:
                if self._current is old:
                    self._current = self._add(Preload(environment={name: value}, modules=self._modules))
            return
        bare = self.bare
        with self._lock:
            self._current = bare if self._current is old else self._current

    def close(self) -> None:
        """End those that were made here."""
        for preload in self._own:
            preload.close()

    def _add(self, preload: Preload) -> Preload:
        self._own.append(preload)
        return preload


POLL_SECONDS = 0.05
GRACE_SECONDS = 2.5
"""Seconds for which the peers of a host that raised may still report an error. The first error is not always the cause."""
LAST_LINES = 12
_STACK_LINE = re.compile(r"\s*@\s+(0x)?[0-9a-f]+|\*\*\* |PC: @")
"""Start of the stack that C++ prints when it aborts. The reason is printed above it."""
_NO_INPUT = told("no-input")("Every host has an empty standard input: pass input as arguments (after `--`) or in a file.")
_LOG_LINE = re.compile(r"[IWE]\d{4} \d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:\S+ [IWE] |WARNING: All log messages before absl")
"""TensorFlow's own log: of a program that left with an error it says nothing."""


class Stopped(Exception):
    """Report that the verification was interrupted; its runs end."""


class RunWatch:
    """Watch one run.

    Args:
        cluster: The run's cluster.
        result: Is filled.
        folder: Where the hosts' output lies.
        stopping: Set when the verification is interrupted.
        progress: Told of every step.
        limit: Knows the last step, where the hosts ask for it.
    """

    def __init__(
        self,
        cluster: RunningCluster,
        result: RunResult,
        folder: Path,
        stopping: threading.Event,
        progress: Progress,
        *,
        limit: StepLimit | None = None,
    ) -> None:
        self._cluster = cluster
        self._result = result
        self._folder = folder
        self._stopping = stopping
        self._progress = progress
        self._limit = limit
        self._asking: dict[int, int | None] = {}
        self._asked_at: float | None = None
        self._steps: list[tuple[int, float]] = []
        self._judge = HangJudge(result.topology)
        self._reached: set[int] = set()
        self._failed_at: float | None = None
        self.late_setting: tuple[str, str | None] | None = None

    def follow(self, seconds: float) -> None:
        """Wait until every host has ended or stopped at the last step, or the run has failed, hangs or timed out."""
        self.live(seconds)
        self._cluster.end()
        self.note_ends()

    def live(self, seconds: float) -> None:
        """Follow the cluster for some seconds, and leave it in its state."""
        standstill = Standstill(self._cluster)
        deadline = time.monotonic() + seconds
        while not self._is_over():
            for host, event in self._cluster.events(POLL_SECONDS):
                self._see(host, event)
            if self._stopping.is_set():
                raise Stopped
            if self.late_setting is not None:
                break
            deadline += self._answer()
            if self._asked_at is not None:
                continue
            hang = self._judge.verdict(self._cluster)
            if hang is not None or time.monotonic() > deadline or standstill.is_reached():
                self._hangs(hang, seconds)
                break

    def _answer(self) -> float:
        """Answer hosts that ask for the last step, once all of the run do; return the seconds for which they have waited."""
        over = {outcome.host for outcome in self._cluster.outcomes}
        if not self._asking or set(range(self._result.topology.num_stepping_hosts)) - self._asking.keys() - over:
            return 0.0
        assert self._limit is not None
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            epoch = next((epoch for _, epoch in sorted(self._asking.items()) if epoch is not None), None)
            self._limit.ask(self._result.label, Ask(epoch, self._seconds_of_a_step()))
        if (decided := self._limit.decided) is None:
            return 0.0
        for host in self._asking:
            self._judge.feed(host, {"event": "continued"})
            self._cluster.tell(host, str(decided).encode())
        waited, self._asked_at = time.monotonic() - self._asked_at, None
        self._asking.clear()
        return waited

    def _seconds_of_a_step(self) -> float:
        """Return how long a step takes after the first one, which traces and compiles."""
        if len(self._steps) < 2:
            return 0.0
        (first, begun), (last, ended) = self._steps[0], self._steps[-1]
        return (ended - begun) / max(1, last - first)

    def _is_over(self) -> bool:
        over = {outcome.host for outcome in self._cluster.outcomes}
        if self._cluster.is_over or (
            self._reached and set(range(self._result.topology.num_stepping_hosts)) <= self._reached | over
        ):
            return True
        if (cause := first_cause(self._cluster.outcomes)) is None:
            return False
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        return time.monotonic() - self._failed_at > _patience(cause)

    def _see(self, host: int, event: Mapping[str, Any]) -> None:
        self._judge.feed(host, event)
        kind, facts = event["event"], self._result.hosts.setdefault(host, {})
        if kind == "progress":
            facts["step"] = event["step"]
            if host == 0:
                self._steps.append((event["step"], time.monotonic()))
            self._progress.step(self._result.label, event["step"])
        elif kind == "site":
            facts.setdefault("collectives", []).append(event["name"])
        elif kind == "collective":
            facts["collective"] = f"{event['name']}, number {event['ordinal']}"
        elif kind == "wrote":
            written = self._result.written
            written[event["path"]] = event["was_there"] or written.get(event["path"], False)
        elif kind == "read":  # a file written by another host of the run is its own, too
            path, read = event["path"], self._result.read
            read[path] = (event["is_own"] or path in self._result.written) and read.get(path, True)
        elif kind == "saved":
            self._result.saved.setdefault(event["path"], set()).add(host)
        elif kind == "reached":
            self._reached.add(host)
        elif kind == "asks":
            self._asking[host] = event["epoch"]
            self._judge.feed(host, {**event, "event": "reached"})
        elif kind == "fault":
            raise _failure_of_the_probe(f"host {host} of {self._result.label}", event["text"])
        elif kind == "needs-fresh-process":
            self.late_setting = (event["name"], event["value"])
        elif kind == "note":
            self._note(event)

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["code"] == ASKED_FOR_HOST:
            self._result.asks_for_host = True
            return
        self._result.xla = self._result.xla or event["code"] == "xla-off"
        self._result.hides = event["text"] if event["code"] == "gpus-hidden" else self._result.hides
        if event["text"] not in self._result.notes:
            self._result.notes.append(Told(event["code"], event["text"]))

    def _hangs(self, hang: Any, seconds: float) -> None:
        result = self._result
        result.status = "hung"
        result.reason = "hang" if hang is not None else "timeout"
        expected = "".join(f"It was to be expected: {fired}. " for fired in self._cluster.faults.now)
        result.cause = None if hang is None or expected else hang.code
        result.where = expected + (self._late(seconds) if hang is None else hang.description)
        result.stacks = self._cluster.stacks()

    def _late(self, seconds: float) -> str:
        text = f"no end after {seconds:g} s"
        if not self._cluster.first_use or any("step" in facts for facts in self._result.hosts.values()):
            return text
        return f"{text}, and no step. {self._cluster.first_use}: give the first run a longer --timeout, the next one finds them"

    def note_ends(self) -> None:
        """Note how each host ended; the first that raised, or left with an error, is the run's failure."""
        result = self._result
        for outcome in self._cluster.outcomes:
            result.statuses[outcome.host], result.codes[outcome.host] = outcome.status, outcome.code
        ended = [outcome for outcome in self._cluster.outcomes if outcome.host not in self._reached]
        raised = [outcome for outcome in ended if outcome.status == "raised"]
        left = [end for end in ended if end.status == "killed" or (end.status == "exited" and end.code != 0)]
        if raised:
            result.raised = {outcome.host: outcome.error.traceback_text for outcome in raised if outcome.error}
            self._raised(min(raised, key=lambda outcome: (follows_from_a_peer(outcome), outcome.host)))
        elif left and result.status == "ok":
            result.status, result.failure = "failed", self._how_it_left(left[0])

    def _raised(self, outcome: HostOutcome) -> None:
        error = outcome.error
        assert error is not None
        if error.kind == f"{UsageError.__module__}.{UsageError.__name__}":
            raise UsageError(error.message)
        self._result.status, self._result.reason = "failed", None
        self._result.failure = error.traceback_text
        if self._result.topology.num_hosts > 1:
            self._result.notes.append(told("raising-host")(f"It was host {outcome.host} that raised."))
        if error.kind == "EOFError":
            self._result.notes.append(_NO_INPUT)

    def _how_it_left(self, outcome: HostOutcome) -> str:
        how = f"exit code {outcome.code}" if outcome.status == "exited" else f"signal {-(outcome.code or 0)}"
        path = self._folder / f"host-{outcome.host}" / "stderr"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        said = [line for line in lines if NO_THREAD.search(line) or not (_LOG_LINE.match(line) or _STACK_LINE.match(line))]
        ended = f"The process of {self._cluster.name(outcome.host)} ended with {how}."
        return "\n".join([ended, *said[-LAST_LINES:], *outcome.stack.splitlines()])


def _patience(cause: HostOutcome) -> float:
    """Return for how many seconds other hosts may add information. The hang judge covers peers of a host that left."""
    if cause.status == "exited" and not leaves_in_order(cause):
        return math.inf
    return patience_after(cause) if cause.status != "raised" else GRACE_SECONDS


def _failure_of_the_probe(where: str, text: str) -> GpudistError:
    said = text.rstrip().splitlines()[-1]
    if any(f"[Errno {number}]" in said for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)):
        return Unavailable(
            f"What the runs record must find room. Received: {said}, on {where}. "
            "Make room, set TMPDIR to a folder on a larger disk, or raise the limit on files (ulimit -f)."
        )
    return GpudistError(f"The probe failed on {where}.\n{text}")
