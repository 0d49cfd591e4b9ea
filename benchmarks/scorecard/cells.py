"""Judge one program on one topology with the command `gpudist verify`, keep what it said, and set it against the answer."""

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
class Cell:
    """One program on one topology, judged with these options.

    Attributes:
        options: Further options of `gpudist verify`.
        variant: What tells it from other cells of the program, in the scorecard's words.
    """

    entry: Entry
    topology: str
    options: tuple[str, ...] = ()
    variant: str = ""

    @property
    def name(self) -> str:
        """Return its name, unique in the scorecard."""
        return " ".join(filter(None, (self.entry.name, self.topology, self.variant)))

    @property
    def key(self) -> str:
        """Return a digest of everything that its result depends on."""
        parts = (
            product(),
            self.entry.path.read_bytes(),
            *map(str.encode, (self.topology, *self.options, "--", *self.entry.args)),
        )
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@dataclass(frozen=True)
class Result:
    """What gpudist said of a cell, set against the answer.

    Attributes:
        causes: The codes that decide, in their order.
        detected: Of a wrong program: whether the verdict is a right one. Of a right program always False.
        named_first: Whether the cause that must come first does.
        named: Whether all causes are named.
        line_right: Whether the first cause points at a line that is to blame; None where no line is.
        false_alarm: Whether a right program is accused.
        undeserved: The causes that accuse a wrong program of what it does not do.
        mute: Whether something that decides is `unexplained`.
        starts: How often the user's program was started; None where the version does not tell.
        seconds: Seconds of the whole command; `plain` of the program alone.
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
    starts: int | None
    seconds: float
    plain: float

    @property
    def is_well_judged(self) -> bool:
        """Return whether nothing is wrong with the judgement, the line apart."""
        return not (self.false_alarm or self.undeserved) and (
            self.is_right or (self.detected and self.named_first and self.named)
        )

    def stable(self) -> dict[str, Any]:
        """Return what must be the same in each run: everything but seconds."""
        return {key: value for key, value in asdict(self).items() if key not in ("seconds", "plain")}


def judge_all(cells: Iterable[Cell], *, fresh: bool = False) -> list[Result]:
    """Judge cells, two side by side, and keep each as soon as it is judged.

    Args:
        cells: In the order in which they are judged.
        fresh: Whether what an earlier call kept is left aside.

    Returns:
        A result for each cell, in order.
    """
    todo = list(cells)
    with ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="scorecard") as pool:
        return list(pool.map(lambda cell: _judge(cell, fresh), todo))


def _judge(cell: Cell, fresh: bool) -> Result:
    KEPT.mkdir(exist_ok=True)
    kept = KEPT / f"{cell.key}.json"
    if fresh or not kept.exists():
        seen = verify(cell)
        kept.write_text(json.dumps(seen))
        print(f"{cell.name}: {said(seen)} ({seen['seconds']:.0f} s)", file=sys.stderr, flush=True)
    return assess(cell, json.loads(kept.read_text()))


def said(seen: dict[str, Any]) -> str:
    """Return the verdict and the causes in a few words."""
    return " ".join((seen["verdict"], *(cause["code"] for cause in seen["causes"])))


def verify(cell: Cell) -> dict[str, Any]:
    """Run `gpudist verify` in a fresh process, and the program alone beside it.

    Returns:
        The verdict on the topology as `--json` has it, with the seconds of both.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "verdict.json")
        command = [sys.executable, "-m", "emulate", "verify", str(cell.entry.path), "--topology", cell.topology]
        command += [*cell.options, "--json", str(written), "--", *cell.entry.args]
        seconds, error = _timed(command, folder)
        if not written.exists():
            return {
                "verdict": "no verdict",
                "causes": [],
                "error": error[-2000:],
                "seconds": seconds,
                "plain": plain(cell.entry),
            }
        verdict = json.loads(written.read_text())
    (run,) = verdict["runs"]
    kept = {key: run[key] for key in ("verdict", "causes", "notes", "course", "worst", "steps")}
    return {**kept, "starts": verdict.get("program_starts"), "seconds": seconds, "plain": plain(cell.entry)}


@cache
def plain(entry: Entry) -> float:
    """Return the seconds of the program alone in a fresh process; of one that hangs, the time limit of a minute."""
    with tempfile.TemporaryDirectory() as folder:
        return _timed([sys.executable, str(entry.path), *entry.args], folder, 60.0)[0]


def _timed(command: list[str], folder: str, limit: float = TIME_LIMIT) -> tuple[float, str]:
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


def assess(cell: Cell, seen: dict[str, Any]) -> Result:
    """Set what gpudist said against the right answer."""
    answer = cell.entry.answer
    deciding = [cause for cause in seen["causes"] if not (cause["allowed"] or cause.get("advice"))]
    codes = tuple(cause["code"] for cause in deciding)
    is_known = seen["verdict"] in answer.verdicts
    return Result(
        name=cell.name,
        group=cell.entry.group,
        is_right=answer.is_right,
        verdict=seen["verdict"],
        causes=codes,
        detected=not answer.is_right and is_known,
        named_first=_is_first(answer, codes),
        named=set(answer.causes) <= set(codes),
        line_right=_points_right(answer, deciding),
        false_alarm=answer.is_right and not is_known,
        undeserved=() if answer.is_right else tuple(code for code in codes if code not in _deserved(answer)),
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
