"""Verify the wrong programs of fixtures/corpus, and keep where the first error arises and how large it is on that step.

Writes fixtures/corpus/observed.json, then index.json. Programs are left out that have not changed since they were verified.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.scorecard.cells import timed
from fixtures.corpus.index import INDEX, OBSERVED, Program, as_json, digest, observed, programs

SIDE_BY_SIDE = 2


def observe(program: Program) -> dict[str, Any]:
    """Verify a program on the first of its topologies, and return what the index says of it."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "verdict.json")
        options = ["--topology", program.topologies[0], "--json", str(written)]
        command = [sys.executable, "-m", "emulate", "verify", str(program.path), *options, "--", *program.arguments[:1]]
        _, error = timed(command, folder)
        if not written.exists():
            raise RuntimeError(f"gpudist must give a verdict. Received: {program.id} without one: {error[-2000:]}")
        (run,) = json.loads(written.read_text())["runs"]
    named: dict[str, Any] = next((cause for cause in run["causes"] if cause["code"] == program.causes[0]), {})
    print(f"{program.id}: {run['verdict']} {named.get('stage')} {relative_error(run)}", file=sys.stderr, flush=True)
    return {
        "digest": digest(program.path),
        "stage": named.get("stage"),
        "error": relative_error(run),
        "tensorflow": version("tensorflow"),
        "keras": version(program.package),
    }


def relative_error(run: dict[str, Any]) -> float | None:
    """Return the largest error of the first gradient, weight or report that differs, relative to one device's value there.

    None without such a number: the examples differ before any value does, or only one side is a number.
    """
    first = run["first_divergence"] or {}
    error, reference = first.get("error"), first.get("reference_value")
    if not error or not reference:
        return None
    relative = error / abs(reference)
    return float(f"{relative:.2g}") if math.isfinite(relative) else None


def main() -> int:
    """Verify programs, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="programs with this word in their name")
    parser.add_argument("--fresh", action="store_true", help="verify those again that have not changed, too")
    wanted = parser.parse_args()
    wrong = {program.id: program for program in programs() if program.is_wrong}
    kept = {name: its for name, its in observed().items() if name in wrong}
    rest = [
        program
        for name, program in wrong.items()
        if wanted.only in name and (wanted.fresh or kept.get(name, {}).get("digest") != digest(program.path))
    ]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for program, its in zip(rest, pool.map(observe, rest), strict=True):
            kept[program.id] = its
            OBSERVED.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    observed.cache_clear()
    INDEX.write_text(as_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
