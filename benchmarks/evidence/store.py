"""Where evidence lies, and how the runs of a cell are written down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import grimp

from benchmarks.scorecard.cells import ROOT, Job
from emulate.recorder import ProbePlan
from emulate.told import Told
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.result import Met, RunResult

STORE = ROOT / ".evidence"
RUNS = "runs"
"""The folder of the traces in a cell's folder."""
_WHAT_RECORDS = tuple(f"emulate.verify.{name}" for name in ("host", "processes", "result", "runner", "settings"))
"""Of emulate/verify these alone count: all else there judges, and may change beside the same evidence."""
_BY_HOST = ("raised", "hosts", "statuses", "codes", "stacks")


@cache
def folder_of_sources() -> Path:
    """Return the folder for evidence that the sources as they are now record."""
    graph = grimp.build_graph("emulate", "gpudist_core", cache_dir=None)
    modules = {module for top in _WHAT_RECORDS for module in graph.find_upstream_modules(top)}
    # The graph does not show what hosts import by name: the whole of each folder counts.
    folders = {"/".join(module.split(".")[:2]) for module in modules} - {"emulate/verify"}
    paths = [path for folder in folders for path in ((ROOT / folder).with_suffix(".py"), *(ROOT / folder).rglob("*.py"))]
    paths += [ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in _WHAT_RECORDS]
    paths += [*(ROOT / "gpudist_core").rglob("*.py"), ROOT / "fixtures" / "corpus" / "parts.py"]
    digest = hashlib.sha256()
    for path in sorted({path for path in paths if path.is_file()}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return STORE / digest.hexdigest()[:16]


def name_of(job: Job) -> str:
    """Return the name of a job's folder."""
    return "-".join(filter(None, (job.entry.name, job.variant))).replace("/", "-").replace(" ", "-")


def request_of(job: Job) -> str:
    """Return a digest of the program and of what is asked about it."""
    parts = (job.entry.path.read_bytes(), *map(str.encode, (*job.launcher, *job.arguments, "--", *job.entry.args)))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def is_stored(job: Job, folder: Path) -> bool:
    """Return whether evidence of a job, with its program as it is now, lies in a folder of evidence."""
    about = folder / name_of(job) / "about.json"
    return about.exists() and json.loads(about.read_text())["request"] == request_of(job)


@dataclass(frozen=True)
class Call:
    """What a runner was asked for.

    Attributes:
        kind: `program`, `evaluated`, `plain` or `unprobed`.
        label: The run's name.
        plan: How it differs, as `plain_plan` writes it; None where nothing is recorded.
        source: The name of the run whose functions are evaluated.
    """

    kind: str
    label: str
    plan: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class StoredRun:
    """One run of a cell.

    Attributes:
        call: What was asked for.
        or_run: Whether the program might run where its functions could not be evaluated.
        result: How it went, as `to_plain` writes it.
    """

    call: Call
    or_run: bool
    result: dict[str, Any]

    def to_line(self) -> str:
        """Return it as a line of the file of runs."""
        return json.dumps(asdict(self)) + "\n"


def runs_file(cell: Path) -> Path:
    """Return the file with the runs of a cell, one in each line."""
    return cell / "runs.jsonl"


def read_runs(cell: Path) -> list[StoredRun]:
    """Read the runs of a cell."""
    lines = [json.loads(line) for line in runs_file(cell).read_text().splitlines()]
    labels = [line["call"]["label"] for line in lines]
    for place, line in enumerate(lines):
        if line["call"]["plan"]:
            line["call"]["plan"] = _of_what_is_asked(json.loads(line["call"]["plan"]))
        if labels[place] in labels[place + 1 :] and line["result"]["trace"] is not None:
            number = labels[: place + 1].count(labels[place])
            line["result"]["trace"] = earlier_trace(Path(line["result"]["trace"]), number).name
    return [StoredRun(Call(**line["call"]), line["or_run"], line["result"]) for line in lines]


def earlier_trace(folder: Path, number: int) -> Path:
    """Return the folder for the trace of the first, second, ... run of a name, once a later one has taken its own."""
    return folder.with_name(f"{folder.name}-earlier-{number}")


def plain_plan(plan: ProbePlan) -> str:
    """Return a plan as text that is the same wherever the traces lie that it names."""
    about = asdict(plan)
    del about["trace"]
    return _of_what_is_asked(json.loads(json.dumps(about, default=_plain)))


def _of_what_is_asked(about: Mapping[str, Any]) -> str:
    """Return a plan without what it leaves as it is: so evidence lasts when plans get further fields."""

    def asked(value: Any) -> Any:
        return {name: asked(one) for name, one in value.items() if one} if isinstance(value, dict) else value

    return json.dumps(asked(about), sort_keys=True)


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, PurePath) else sorted(value)


def to_plain(result: RunResult) -> dict[str, Any]:
    """Return a result as plain data; of its trace the folder's name."""
    about = {field.name: getattr(result, field.name) for field in fields(result)}
    about |= {
        "topology": [str(result.topology), result.topology.is_virtual],
        "trace": None if result.trace is None else result.trace.directory.name,
        "notes": [[note.code, str(note)] for note in result.notes],
        "met": asdict(result.met),
        "saved": {path: sorted(hosts) for path, hosts in result.saved.items()},
        "cut": sorted(result.cut),
    }
    plain: dict[str, Any] = json.loads(json.dumps(about))  # a copy, whatever the judge does with the result
    return plain


def from_plain(about: dict[str, Any], traces: Path) -> RunResult:
    """Return the result that `to_plain` has written; its trace is looked for in the folder of traces."""
    text, is_virtual = about["topology"]
    by_host = {name: {int(host): value for host, value in about[name].items()} for name in _BY_HOST}
    others = {
        "topology": Topology.parse(text, is_virtual=is_virtual),
        "trace": None if about["trace"] is None else Trace(traces / about["trace"]),
        "notes": [Told(code, note) for code, note in about["notes"]],
        "met": Met(**{name: tuple(paths) for name, paths in about["met"].items()}),
        "saved": {path: set(hosts) for path, hosts in about["saved"].items()},
        "cut": set(about["cut"]),
    }
    return RunResult(**{**about, **by_host, **others})
