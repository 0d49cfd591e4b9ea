"""Determine how a recorded run ended, as far as its trace tells."""

from __future__ import annotations

from emulate.probe import Trace


def how_it_failed(trace: Trace) -> str | None:
    """Return which hosts raised or stopped recording before their program ended; None if all ended well.

    A host writes how it ended as its last word; one that was killed has none.
    """
    ends = {host: str(event["reason"]) for host, event in trace.of("end")}
    if all(ends.get(host) in ("returned", "steps") for host in range(trace.topology.num_stepping_hosts)):
        return None
    steps = _steps(trace)
    texts = [f"host {host} {_HOW[ends.get(host, '')]} after {steps[host]} steps" for host in sorted(steps)]
    whose = "reference's" if trace.about.get("role") == "reference" else "recorded"
    return f"The {whose} run did not end well: {', '.join(texts)}."


_HOW = {"returned": "was done", "steps": "had all its steps", "raised": "raised", "": "stopped"}


def _steps(trace: Trace) -> dict[int, int]:
    """Return the number of steps of each host: the largest of its optimizers."""
    counts = dict.fromkeys(range(trace.topology.num_stepping_hosts), 0)
    for host, event in trace.of("step"):
        counts[host] = max(counts[host], int(event["step"]) + 1)
    return counts
