"""Measure programs of TensorFlow's issues in two arms, beside one unit in the last place of one pixel."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from emulate.verify import Run

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "fixtures" / "gallery" / "arms"
PAGE = ROOT / "docs" / "gallery_arms.md"
VERDICTS = ROOT / "docs" / "gallery_verdicts.md"
HEAD = "| report | gradients: XLA | ulp | loss | with XLA | ulp |\n|---|---:|---:|---:|---:|---:|\n"
BATCHES = (["last_batch.py", "--even"], ["last_batch.py"], ["last_batch.py", "--own-loss"])


def compiled_step() -> ModuleType:
    """Return the program of the reports about XLA."""
    spec = importlib.util.spec_from_file_location("compiled_step", PROGRAMS / "compiled_step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the largest difference of two lists of gradients, relative to the largest number of its gradient."""
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in zip(ours, theirs, strict=True))


def arms_of(report: str, dtype: str) -> dict[str, Any]:
    """Return the figures of a report: plain, with XLA, and plain with one number a unit in the last place larger."""
    program = compiled_step()
    arms = {
        "plain": program.train(program.REPORTS[report], xla=False, dtype=dtype),
        "again": program.train(program.REPORTS[report], xla=False, dtype=dtype),
        "xla": program.train(program.REPORTS[report], xla=True, dtype=dtype),
        "ulp": program.train(program.REPORTS[report], xla=False, dtype=dtype, ulps=1),
    }
    if arms["again"][0] != arms["plain"][0]:
        raise RuntimeError(f"{report} in {dtype} does not repeat itself: nothing can be said of its arms.")
    plain = arms["plain"][1]
    return {name: {"loss": losses[-1], "gradients": difference(plain, first)} for name, (losses, first) in arms.items()}


def line_of(report: str, arms: dict[str, Any]) -> str:
    """Return a report's line of the table."""
    gradients = [f"{arms[name]['gradients']:.1e}" for name in ("xla", "ulp")]
    losses = [f"{arms[name]['loss']:.4f}" for name in ("plain", "xla", "ulp")]
    return f"| {report} | {' | '.join([*gradients, *losses])} |\n"


def in_a_process(*arguments: str, devices: int = 2) -> str:
    """Run this script once more, for one report, on so many logical devices."""
    command = [sys.executable, "-m", "benchmarks.arms", *arguments]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "ARMS_DEVICES": str(devices)}, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return result.stdout.splitlines()[-1]


def table_of(reports: Sequence[str]) -> str:
    """Measure these reports and the programs of the NaN reports, each in a process of its own, and return the tables."""
    found = json.loads(in_a_process(*reports, "--dtype", "float32"))
    table = HEAD + "".join(line_of(report, found[report]) for report in reports)
    table += "\n| program | replicas | result |\n|---|---:|---|\n"
    for arguments in BATCHES:
        for count in (1, 4):
            table += f"| `{' '.join(arguments)}` | {count} | {in_a_process('--run', *arguments, devices=count)} |\n"
    return table


def verdict_line(report: str, run: Run) -> str:
    """Return a report's line of the table of verdicts, with the largest difference of any tensor over its noise floor."""
    assert run.worst is not None
    farthest = f"not finite in step {run.worst.step}" if run.worst.non_finite else f"{run.worst.error / run.worst.noise:.1f}"
    return f"| [#{report}](https://github.com/tensorflow/tensorflow/issues/{report}) | {run.verdict} | {farthest} |\n"


def verdicts() -> str:
    """Compare both arms of each report about XLA with gpudist, step by step, and return the table."""
    import emulate
    from emulate.cluster import Preload

    table = "| report | verdict | largest difference / noise floor |\n|---|---|---:|\n"
    with Preload(modules=("emulate.verify",)) as preload:
        for report in compiled_step().REPORTS:
            arms = {"args": [report], "against": f"{report} --xla"}
            (run,) = emulate.verify(PROGRAMS / "compiled_step.py", "1x2", preload=preload, **arms).runs
            table += verdict_line(report, run)
    return table


def use_devices(count: int) -> None:
    """Split the CPU into so many logical devices."""
    import tensorflow as tf

    parts = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)


def main() -> None:
    """Print the figures of one report, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="*", default=["120993"], help="numbers of REPORTS in compiled_step.py; default: 120993")
    parser.add_argument("--dtype", help="print the figures of the reports in this dtype alone")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="a program and its arguments, to run on the logical devices")
    parser.add_argument("--verify", action="store_true", help="compare both arms of each report with gpudist instead")
    parser.add_argument("--store", action="store_true", help="write the tables of the documentation")
    options = parser.parse_args()
    devices = int(os.environ.get("ARMS_DEVICES", "2"))
    if options.run:
        import runpy

        use_devices(devices)
        sys.argv = options.run
        runpy.run_path(str(PROGRAMS / options.run[0]), run_name="__main__")
        return
    if options.dtype:
        use_devices(devices)
        print(json.dumps({report: arms_of(report, options.dtype) for report in options.report}))
        return
    table, page = (verdicts(), VERDICTS) if options.verify else (table_of(options.report), PAGE)
    print(table)
    if options.store:
        page.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
