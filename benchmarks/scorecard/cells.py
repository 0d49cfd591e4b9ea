"""Judge a program with the command `gpudist verify`, keep what it said, and set it against the answer, topology by topology.

All topologies of a program are judged by one command, as users do it: they share the runs on one device.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.scorecard.corpus import Answer, Entry

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".scorecard"
"""What was judged: `make scorecard` goes on where it was stopped. A change of the product or of a program asks anew."""
SIDE_BY_SIDE = 2
TIME_LIMIT = 600.0
"""Seconds that a whole verification may take; it counts as `hung` then."""


@dataclass(frozen=True)
class Job:
    """One program, judged with these options on all its topologies.

    Attributes:
        options: Further options of `gpudist verify`.
        variant: What distinguishes it from other jobs of the program.
        launcher: A command that starts the command given to it, in other surroundings.
    """

    entry: Entry
    options: tuple[str, ...] = ()
    variant: str = ""
    launcher: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """Return for each topology the name of its cell, unique in the scorecard."""
        entry, variant = self.entry, self.variant
        return {topology: " ".join(filter(None, (entry.name, topology, variant))) for topology in entry.topologies}

    @property
    def arguments(self) -> list[str]:
        """Return the options of `gpudist verify`."""
        topologies = [word for topology in self.entry.topologies for word in ("--topology", topology)]
        return [*topologies, *self.options]

    @property
    def key(self) -> str:
        """Return a digest of everything that its results depend on."""
        said = (*self.launcher, *self.arguments, "--", *self.entry.args)
        parts = (product(), self.entry.path.read_bytes(), *map(str.encode, said))
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@dataclass(frozen=True)
class Result:
    """What gpudist said of a program on one topology, set against the answer.

    Attributes:
        causes: The codes that decide, in their order.
        detected: Of a wrong program: whether the verdict is a right one. Of a right program always False.
        named_first: Whether the cause that must come first does.
        named: Whether all causes are named.
        line_right: Whether the first cause points at a line that is to blame; None where no line is.
        false_alarm: Whether a right program is accused.
        undeserved: The causes that accuse a wrong program of what it does not do.
        mute: Whether something that decides is `unexplained`.
        starts: How often the program was started, for each topology of the command; None without a verdict.
        seconds: Seconds of the command for each topology.
        plain: Seconds of the program alone; None where it was not run alone.
        fixed: Whether `gpudist fix` made a proven fix without help; None where it was not asked.
        tries: How many verifications that took.
    """

    name: str
    group: str
    is_right: bool
    verdict: str
    causes: tuple[str, ...]
    detected: bool
    named_first: bool
    named: bool
    line_right: bool | None
    false_alarm: bool
    undeserved: tuple[str, ...]
    mute: bool
    starts: float | None
    seconds: float
    plain: float | None
    fixed: bool | None = None
    tries: int | None = None

    @property
    def is_well_judged(self) -> bool:
        """Return whether nothing is wrong with the judgement, the line apart."""
        return not (self.false_alarm or self.undeserved) and (
            self.is_right or (self.detected and self.named_first and self.named)
        )

    def stable(self) -> dict[str, Any]:
        """Return what must be the same in each run: everything but seconds, and what another command tells."""
        left_out = ("seconds", "plain", "fixed", "tries")
        return {key: value for key, value in asdict(self).items() if key not in left_out}


def judge_all(jobs: Iterable[Job], *, fresh: bool = False, side_by_side: int = SIDE_BY_SIDE) -> list[Result]:
    """Judge programs, some side by side, and keep each answer as soon as it is there.

    Args:
        jobs: In the order in which they are judged.
        fresh: Whether what an earlier call kept is left aside.
        side_by_side: How many at a time.

    Returns:
        A result for each topology of each job, in order.
    """
    with ThreadPoolExecutor(side_by_side, thread_name_prefix="scorecard") as pool:
        return [result for results in pool.map(lambda job: _judge(job, fresh), list(jobs)) for result in results]


def _judge(job: Job, fresh: bool) -> list[Result]:
    KEPT.mkdir(exist_ok=True)
    kept = KEPT / f"{job.key}.json"
    if fresh or not kept.exists():
        seen = verify(job)
        kept.write_text(json.dumps(seen))
        for topology, name in job.names.items():
            codes = " ".join(cause["code"] for cause in seen[topology]["causes"])
            print(f"{name}: {seen[topology]['verdict']} {codes}".rstrip(), file=sys.stderr, flush=True)
    return [assess(job, topology, seen) for topology, seen in json.loads(kept.read_text()).items()]


def verify(job: Job) -> dict[str, dict[str, Any]]:
    """Run `gpudist verify` in a fresh process, and a program of the corpus alone after it.

    Returns:
        For each topology the run as `--json` has it, with the seconds of both.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "verdict.json")
        verify = [sys.executable, "-m", "emulate", "verify", str(job.entry.path)]
        command = [*job.launcher, *verify, *job.arguments, "--json", str(written)]
        seconds, error = timed([*command, "--", *job.entry.args], folder)
        verdict = json.loads(written.read_text()) if written.exists() else None
    number = len(job.entry.topologies)
    about = {"seconds": seconds / number, "plain": plain(job.entry) if job.entry.group == "corpus" else None}
    if verdict is None:
        return {one: {"verdict": "no verdict", "causes": [], "error": error[-2000:], **about} for one in job.entry.topologies}
    kept = ("verdict", "causes", "notes", "course", "steps")
    about["starts"] = verdict["program_starts"] / number
    return {run["topology"]: {**{key: run[key] for key in kept}, **about} for run in verdict["runs"]}


@cache
def plain(entry: Entry) -> float:
    """Return the seconds of the program alone in a fresh process; of one that hangs, the time limit of a minute."""
    with tempfile.TemporaryDirectory() as folder:
        return timed([sys.executable, str(entry.path), *entry.args], folder, 60.0)[0]


def timed(command: list[str], folder: str, limit: float = TIME_LIMIT) -> tuple[float, str]:
    """Return the seconds of a command in a folder, and what it wrote to standard error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit,
            stdin=subprocess.DEVNULL,
        )
        error = done.stderr
    except subprocess.TimeoutExpired:
        error = f"It was ended after {limit:g} s."
    return time.monotonic() - started, error


def assess(job: Job, topology: str, seen: dict[str, Any]) -> Result:
    """Set what gpudist said of a topology against the right answer."""
    answer = job.entry.answer
    deciding = [cause for cause in seen["causes"] if not (cause["allowed"] or cause.get("advice"))]
    codes = tuple(cause["code"] for cause in deciding)
    is_known = seen["verdict"] in answer.verdicts
    return Result(
        name=job.names[topology],
        group=job.entry.group,
        is_right=answer.is_right,
        verdict=seen["verdict"],
        causes=codes,
        detected=not answer.is_right and is_known,
        named_first=_is_first(answer, codes),
        named=set(answer.causes) <= set(codes),
        line_right=_points_right(answer, deciding),
        false_alarm=answer.is_right and not is_known,
        undeserved=() if not answer.causes else tuple(code for code in codes if code not in _deserved(answer)),
        mute="unexplained" in codes,
        starts=seen.get("starts"),
        seconds=seen["seconds"],
        plain=seen["plain"],
    )


def _is_first(answer: Answer, codes: tuple[str, ...]) -> bool:
    wanted = answer.causes if answer.any_first else answer.causes[:1]
    return not answer.causes or codes[:1] in [(code,) for code in wanted]


def _deserved(answer: Answer) -> set[str]:
    """Return the causes that may be named: a wrong program's own, none, and what is by design."""
    return {*answer.causes, "unexplained", "identical-dropout", "batchnorm-local-statistics"}


def _points_right(answer: Answer, deciding: list[dict[str, Any]]) -> bool | None:
    if not answer.lines:
        return None
    location = (deciding[0].get("location") if deciding else None) or {}
    return location.get("line") in answer.lines


@cache
def product() -> bytes:
    """Return a digest of the product's code, and of the versions that it runs on."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("emulate", "gpudist_core") for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    for name in ("parts.py",):
        digest.update((ROOT / "fixtures" / "corpus" / name).read_bytes())
    from importlib.metadata import version

    digest.update(" ".join(version(name) for name in ("keras", "numpy")).encode())
    return digest.digest()
