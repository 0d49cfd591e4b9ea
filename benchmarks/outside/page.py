"""The page of the documentation, written from results.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.outside.cases import CASES, HERE, TOPOLOGIES, Case

PAGE = HERE.parents[1] / "docs" / "outside.md"
RESULTS = HERE / "results.json"
_HEAD = """<!-- Made by `python -m benchmarks.outside`: do not edit. -->
# Training loops of other packages

Many packages bring their own training loop, loss or optimizer. gpudist verified such packages as they are on PyPI,
each in its own virtual environment. The programs in `benchmarks/outside/programs` use the package's trainers, losses
and models on small synthetic data, for 20 steps. `python -m benchmarks.outside NAME` repeats one.

`line` is the line of the program at which the first cause arises.
`seconds of both runs` is the time of one run on one device and one run on the topology, both without a recording.
`seconds of verify` is the time of `gpudist verify`. Other work ran on the same two cores, so both are rough.

| package | TensorFlow, Keras | what trains | topology | verdict | cause | line | seconds of both runs | seconds of verify |
| --- | --- | --- | --- | --- | --- | --- | ---: | ---: |
"""


def read() -> dict[str, Any]:
    """Return the stored results, by the names of the cases."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.is_file() else {}


def write(results: Mapping[str, Any]) -> None:
    """Store the results, and write the page."""
    new = text(results)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(new)


def text(results: Mapping[str, Any]) -> str:
    """Return the page."""
    measured = [case for name, case in CASES.items() if name in results]
    rows = [row for case in measured for row in _rows(case, results[case.name])]
    findings = [part for case in measured for part in _finding(case, results[case.name])]
    return _HEAD + "".join(rows) + ("\n## Faults found\n" if findings else "") + "".join(findings)


def _rows(case: Case, result: Mapping[str, Any]) -> Iterator[str]:
    versions = result["versions"]
    keras = f"tf_keras {versions['tf_keras']}" if "tf_keras" in versions else f"Keras {versions['keras']}"
    for topology in TOPOLOGIES:
        run = result["runs"][topology]
        cells = (
            f"{case.package} {versions[case.package]}",
            f"{versions['tensorflow']}, {keras}",
            f"{case.trains} (`{case.name}`)",
            f"`{topology}`",
            f"`{run['verdict']}`",
            ", ".join(f"[`{code}`](causes/{code}.md)" for code in run["causes"]),
            f"`{run['line']}`" if run["line"] else "",
            f"{run['alone']:.0f}",
            f"{run['verify']:.0f}",
        )
        yield f"| {' | '.join(cells)} |\n"


def _finding(case: Case, result: Mapping[str, Any]) -> Iterator[str]:
    if case.finding and any(set(case.finding.causes) & set(run["causes"]) for run in result["runs"].values()):
        yield f"\n`{case.name}`\n: {case.finding.text.format(**result['check'])}\n"
