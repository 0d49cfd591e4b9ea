"""Try every program of the manifest and the main tests with each pair of versions; write docs/compat_table.md and results.json.

It goes on where it was stopped: a test that passed is not run again while emulate, gpudist_core and fixtures stay as they are.

Usage: python -m benchmarks.compat [--only PAIR]... [--keep-passed] [-- PYTEST_ARGS...]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.compat import environment, record, table
from benchmarks.compat.pairs import PAIRS, RELEASED, Pair

PROGRAMS = "tests/compat/programs.py"
LEGACY = "GPUDIST_COMPAT_LEGACY_KERAS"
KERAS_3_TESTS = (
    "tests/core/upstream",
    "tests/core/checkpoints/test_fit.py",
    "tests/core/checkpoints/test_upstream.py",
    "tests/core/keras_model/test_fit.py",
    "tests/core/keras_model/test_hosts.py",
    "tests/core/pipelines/test_topologies.py",
    "tests/core/static/test_static.py",
    "tests/core/steps/test_train_step.py",
    "tests/core/strategies/test_upstream.py",
    "tests/emulate/cluster/test_cluster_upstream.py",
    "tests/emulate/devices/test_upstream.py",
    "tests/emulate/faults/test_upstream.py",
    "tests/emulate/pool/test_pool_upstream.py",
    "tests/emulate/probe/test_upstream.py",
)
PLUGIN_TESTS = tuple(f"tests/acceptance/plugin/test_plugin_{name}.py" for name in ("keras", "runs", "strategies"))
_TRIED = ("emulate", "gpudist_core", "fixtures")
_LONGEST_SECONDS = 1200


def main() -> int:
    """Return 1 where something failed in one of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PAIRS, action="append", metavar="PAIR", help=f"one of {', '.join(PAIRS)}")
    parser.add_argument("--keep-passed", action="store_true", help="also what passed with earlier sources is not run again")
    parser.add_argument("pytest_args", nargs="*")
    wanted = parser.parse_args()
    codes = []
    for name in wanted.only or RELEASED:
        python = environment.make(PAIRS[name])
        codes.append(_run(python, PAIRS[name], wanted.pytest_args, keep_passed=wanted.keep_passed))
        table.add(PAIRS[name], environment.versions(python), record.read(_file(PAIRS[name])))
    return int(any(codes))


def _run(python: Path, pair: Pair, args: list[str], *, keep_passed: bool) -> int:
    print(f"\n{pair.name}: {python}", file=sys.stderr, flush=True)
    _file(pair).parent.mkdir(parents=True, exist_ok=True)
    told = {
        record.FILE: str(_file(pair)),
        record.SOURCE: _source(),
        record.KEEP: str(int(keep_passed)),
        LEGACY: str(int(pair.is_legacy)),
    }
    options = ("-n", "0", "-m", "not slow", "-p", "benchmarks.compat.record", "--timeout", str(_LONGEST_SECONDS))
    tests = (PROGRAMS, *PLUGIN_TESTS, *(() if pair.is_legacy else KERAS_3_TESTS))
    return subprocess.run(
        [str(python), "-m", "pytest", "-q", *options, *tests, *args],
        cwd=environment.ROOT,
        env={**os.environ, **told},
        check=False,
    ).returncode


def _file(pair: Pair) -> Path:
    return environment.FOLDER / "results" / f"{pair.name}.jsonl"


def _source() -> str:
    """Return a digest of what is tried: a test that passed with other sources has to run again."""
    files = sorted(file for folder in _TRIED for file in (environment.ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
