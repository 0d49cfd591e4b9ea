"""Run all benchmarks, or those whose name contains an argument; print a table and write benchmarks/results.json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure
from benchmarks.table import RESULTS, write


def main() -> int:
    """Measure, print, write results.json and the documentation's table. Exit code 1 when a goal is not met."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    wanted = sys.argv[1:]
    results = json.loads(RESULTS.read_text()) if wanted and RESULTS.exists() else {}
    table = Table("figure", "value", "goal", "met", "ours", "theirs", "against")
    for figure in _figures(wanted):
        results[figure.name] = entry = figure.to_json()
        goal = "" if figure.goal is None else f"{'>=' if figure.at_least else '<='} {figure.goal:g}"
        met = {None: "", True: "yes", False: "NO"}[figure.met]
        sides = [f"{side:.3g} {figure.of}" for side in (figure.ours, figure.theirs)]
        table.add_row(figure.name, f"{figure.value:.3g} {figure.unit}", goal, met, *sides, figure.against)
        print(f"{figure.name}: {entry['value']} {figure.unit}", file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(table)
    write()
    return 0 if all(entry["met"] is not False for entry in results.values()) else 1


def _figures(wanted: list[str]) -> Iterator[Figure]:
    from benchmarks import certificate, clusters, cost, memory, plan_memory, pool, suite, training, verification, virtual

    for module in (clusters, verification, certificate, cost, memory, plan_memory, training, pool, suite, virtual):
        if not wanted or any(module.__name__.endswith(name) for name in wanted):
            yield from module.figures()


if __name__ == "__main__":
    sys.exit(main())
