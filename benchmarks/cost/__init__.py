"""What a verdict costs, in units of its two runs: the program on one device and on the topology, each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure, seconds

HERE = Path(__file__).resolve().parent
PROGRAMS = ("digits_loop", "transformer", "unet", "mobilenet_fit", "resnet50", "dense")
VARIANTS = ("equivalent", "by-design", "divergent")
TOPOLOGY = "1x4"


def figures() -> Iterator[Figure]:
    """Measure each program in each variant: `verify` beside the plain program and the topology alone, all steps."""
    for program in PROGRAMS:
        for variant in VARIANTS:
            yield _figure(str(HERE / f"{program}.py"), variant, f"cost_{program}_{variant}")


def _figure(program: str, variant: str, name: str) -> Figure:
    plain = _timed([program, variant])
    alone = _timed(["-m", "emulate", "run", program, "--topology", TOPOLOGY, "--", variant])
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "verdict.json")
        options = ["--topology", TOPOLOGY, "--steps", "all", "--timeout", "1200", "--json", str(written)]
        taken = _timed(["-m", "emulate", "verify", program, *options, "--", variant], {0, 1})
        verdict = json.loads(written.read_text())
    (run,) = verdict["runs"]
    if run["verdict"] != variant:
        print(f"{name}: {run['verdict']}, where it is {variant}", file=sys.stderr)
    against = f"the program alone ({plain:.1f} s) and on {TOPOLOGY} ({alone:.1f} s); {verdict['program_starts']} starts"
    return Figure(name, taken / (plain + alone), None, False, taken, plain + alone, against)


def _timed(arguments: list[str], codes: frozenset[int] | set[int] = frozenset({0})) -> float:
    def run() -> None:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        if done.returncode not in codes:
            raise SystemExit(f"{' '.join(arguments)} must end well. Received: {done.returncode}.\n{done.stderr[-2000:]}")

    return seconds(run)
