"""Verify each cell as the scorecard does, and keep all of its runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.evidence.store import is_stored, name_of, request_of
from benchmarks.scorecard.cells import ROOT, TIME_LIMIT, Job


def record(jobs: Sequence[Job], folder: Path, side_by_side: int) -> int:
    """Record what is not there yet; return 1 where that failed for a cell."""
    lacking = [job for job in jobs if not is_stored(job, folder)]
    print(f"{folder}: {len(jobs) - len(lacking)} of {len(jobs)} cells are there.", flush=True)
    pool = ThreadPoolExecutor(side_by_side, thread_name_prefix="evidence")
    try:
        results = list(pool.map(lambda job: _record_and_tell(job, folder), lacking))
    finally:
        pool.shutdown(cancel_futures=True)
    return 0 if all(results) else 1


def _record_and_tell(job: Job, folder: Path) -> bool:
    started = time.monotonic()
    error = record_cell(job, folder)
    size = sum(path.stat().st_size for path in (folder / name_of(job)).rglob("*") if path.is_file())
    print(f"{name_of(job)}: {error or f'{time.monotonic() - started:.0f} s, {size / 1e6:.1f} MB'}", flush=True)
    return error is None


def record_cell(job: Job, folder: Path) -> str | None:
    """Verify a program and keep its runs; return why that was not possible, where it was not."""
    cell, partial = folder / name_of(job), folder / f".{name_of(job)}"
    for path in (cell, partial):
        shutil.rmtree(path, ignore_errors=True)
    working = partial / "cwd"
    working.mkdir(parents=True)
    try:
        error = _verify(job, partial, working)
        if not (partial / "verdict.json").exists():
            return f"no verdict: {error[-2000:]}"
        shutil.rmtree(working)
        about = {"request": request_of(job), "topologies": job.names, "answer": asdict(job.entry.answer)}
        (partial / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        partial.rename(cell)
        return None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _verify(job: Job, folder: Path, working: Path) -> str:
    verify = [sys.executable, "-m", "benchmarks.evidence.recording", str(folder), "verify", str(job.entry.path)]
    command = [*job.launcher, *verify, *job.arguments, "--json", str(folder / "verdict.json"), "--", *job.entry.args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command,
            cwd=working,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"It was ended after {TIME_LIMIT:g} s."
    return done.stderr
