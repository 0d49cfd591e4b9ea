"""Detect hosts that draw the same random numbers for different examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emulate.probe.trace import Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.lines import made

_MOST = 0.5
"""Streams of an augmentation move on at each step, those of a shuffle once an epoch; and most rows become others."""


def _search(case: Case) -> Sign | None:
    ledger, trace = case.ledger, case.untouched
    if trace.num_hosts < 2 or ledger is None or ledger.grows or ledger.first_apart is None or ledger.identical_hosts:
        return None
    seen = ledger.samples.seen
    if ledger.foreign <= _MOST * seen or any(case.has(code) for code in ("unseeded-randomness", "unseeded-hosts")):
        return None
    drawn = _stream(trace) or _stage(trace)
    if drawn is None:
        return None
    return Sign(
        "Every host draws the same random numbers for its examples: example i of every host's share gets the same ones.",
        f"{drawn}; the hosts take different examples, and {ledger.foreign} of {seen} have contents that one device never had",
    )


def _stream(trace: Trace) -> str | None:
    """Return a generator that all hosts seed the same and draw from in most steps."""
    by_host = [event["streams"] for _, event in trace.of("streams")]
    if len(by_host) < trace.num_hosts:
        return None
    for name, first in by_host[0].items():
        others = [streams.get(name) for streams in by_host]
        alike = [stream for stream in others if stream is not None and stream["seed"] == first["seed"]]
        if len(alike) < len(others):
            continue
        if all(stream.get("builds") for stream in alike):
            return f"{name} has the same seed on all {len(by_host)} hosts and draws while each of them makes its dataset"
        if all(map(_moves, alike)):
            moved = min(stream["moved"] for stream in alike)
            return f"{name} has the same seed on all {len(by_host)} hosts and advanced in {moved} of {first['looks']} steps"
    return None


def _moves(stream: dict[str, Any]) -> bool:
    return bool(stream["looks"]) and stream["moved"] > _MOST * stream["looks"]


def _stage(trace: Trace) -> str | None:
    """Return a function of the pipeline that draws the same on all hosts, from its arguments or from the program's seeds."""
    seeded = {host for host, event in trace.of("seeded") if event["generator"] == "tensorflow"}
    drawing = {host: event.get("drawing", ()) for host, event in trace.of("program")}
    if len(drawing) < trace.num_hosts:
        return None
    common = [stage for stage in drawing[0] if all(stage in stages for stages in drawing.values())]
    for stage in common:
        if stage.get("function"):
            return f"{stage['stage']} draws by the position in the host's share, equally on all hosts"
        if len(seeded) == trace.num_hosts:
            return f"{stage['stage']} draws with the seeds {_pairs(stage['seeds'])} on all {len(drawing)} hosts"
    return None


def _pairs(seeds: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"({first}, {second})" for first, second in seeds[:2]) + (" ..." if len(seeds) > 2 else "")


IDENTICAL_AUGMENTATION = Cause(
    "identical-augmentation", _search, blame=(made("examples", "generator", seeded=True), made("examples", "map"))
)
