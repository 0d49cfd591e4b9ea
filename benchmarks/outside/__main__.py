"""Verify the programs of other packages, each in its own environment; write results.json and docs/outside.md.

Usage: python -m benchmarks.outside [NAME]...
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.outside import environment, page
from benchmarks.outside.cases import CASES, PROGRAMS, TOPOLOGIES, Case

_LONGEST_SECONDS = 900
_WITH_A_VERDICT = (0, 1)


def main() -> None:
    """Verify the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CASES)}. Default: all.")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"NAME must be one of {', '.join(CASES)}. Received: NAME={unknown[0]!r}.")
    for name in names or CASES:
        result = _measure(CASES[name])
        page.write({**page.read(), name: result})


def _measure(case: Case) -> dict[str, Any]:
    commands = environment.make(case)
    one = _gpudist(commands, "run", case, "1x1")
    runs = {}
    for topology in TOPOLOGIES:
        alone = one + _gpudist(commands, "run", case, topology)
        runs[topology] = {"alone": round(alone, 1), **_verdict(case, commands, topology)}
        print(f"{case.name} {topology}: {runs[topology]}", file=sys.stderr, flush=True)
    return {"versions": environment.versions(case, commands), "runs": runs, "check": _check(case, commands)}


def _verdict(case: Case, commands: Path, topology: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdict.json"
        seconds = _gpudist(commands, "verify", case, topology, "--json", str(file))
        (run,) = json.loads(file.read_text())["runs"]
    location = next((cause["location"] for cause in run["causes"] if cause["location"]), None)
    return {
        "verdict": run["verdict"],
        "causes": [cause["code"] for cause in run["causes"]],
        "line": _line(location["file"], location["line"]) if location else "",
        "verify": round(seconds, 1),
    }


def _check(case: Case, commands: Path) -> dict[str, float]:
    """Return the figures of plain TensorFlow that a finding quotes."""
    if case.check is None:
        return {}
    result = subprocess.run([str(commands / "python"), str(case.check)], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def _line(file: str, number: int) -> str:
    """Return a line without the folders of this machine."""
    return f"{file.rpartition('site-packages/')[2].removeprefix(f'{PROGRAMS}/')}:{number}"


def _gpudist(commands: Path, command: str, case: Case, topology: str, *options: str) -> float:
    """Return the seconds that a command of gpudist took, in a folder for all files that the program writes."""
    arguments = [command, str(case.path), "--topology", topology, *options, "--", *case.arguments]
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        result = subprocess.run(
            [str(commands / "gpudist"), *arguments],
            cwd=folder,
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_SECONDS,
        )
        seconds = time.monotonic() - start
    if result.returncode not in (_WITH_A_VERDICT if command == "verify" else (0,)):
        raise SystemExit(
            f"gpudist {command} must train {case.name} on {topology} to its end. "
            f"Received: exit code {result.returncode}.\n{result.stdout}{result.stderr}"
        )
    return seconds


if __name__ == "__main__":
    main()
