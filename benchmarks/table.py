"""The documentation's table of figures, made from results.json; a test holds the two together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"

WHAT = {
    "cluster_4x1_vs_fresh": "First all-reduce of a new `4x1` cluster, TensorFlow already imported: how many times faster",
    "cluster_4x1_vs_multi_process_runner": "The same all-reduce: how many times faster",
    "cluster_4x1_cold_minus_fresh": "The same from a cold start, with the import of TensorFlow: difference",
    "cluster_4x1_memory": "Memory of a `4x1` cluster, with the process that its hosts are forked from: ratio",
    "verify_40_steps": "`verify` on `1x4` of a compiled digits loop of 40 steps, all its runs: ratio",
    "verify_400_steps": "The same with 400 steps: ratio",
    "probed_step_1x4": "A recorded step on `1x4`, digits CNN, batch 256: ratio",
    "certified_step_1x2": "A step of a CNN that `gpudist_core.check` compares, on `1x2`: ratio of processor time",
    "step_after_certificate_1x2": "The same step after the certified ones: ratio",
    "own_step_1_1": "A step of `TrainStep` on one device, digits CNN, batch 256: how many times as fast",
    "own_step_1_4": "The same on `1x4`",
    "fit_1_4": "A step of `fit` of a `distributed` MLP on `1x4`, batch 64: how many times as fast",
    "replicated_1_4": "A step that reads a `replicate`d table of 64 MB on `1x4`: how many times as fast",
    "pipeline_1_1": "An example of a `Pipeline`, shuffled, mapped, in batches of 256: how many times as fast",
    "pipeline_1_4": "The same on `1x4`",
    "sharded_memory": "A table of 1 GB in slices on `1x4`, trained: peak memory of the process, TensorFlow included",
    "sharded_memory_own": "Of it the process's own: without pages of libraries, which it shares and the system can drop",
    "sharded_memory_beyond_tensorflow": "Of it what came after the strategy was made: all but TensorFlow",
    "sharded_memory_onednn": "The same table with oneDNN on (`TF_ENABLE_ONEDNN_OPTS=1`, what most Intel CPUs have)",
    "sharded_memory_fresh": "The same table in a host that imports TensorFlow itself and counts more pages of its libraries",
    "pool_warm_2x1": "An all-reduce on a warm `2x1`: how many times as fast",
    "pool_warm_2x1_body": "The same if a pool took no time: what TensorFlow takes to make the strategy, trace and sum",
    "pool_warm_4x1": "An all-reduce on a warm `4x1`: how many times as fast",
    "pool_warm_4x1_body": "The same if a pool took no time",
    "pool_first_4x1_vs_multi_process_runner": "The first all-reduce of a new `4x1` of a pool: how many times as fast",
    "pool_first_4x1_vs_fresh": "The same",
    "pool_killed_host_reported": "A host is killed: the longest time until that was reported and the other hosts were gone",
    "pool_killed_supervisor": "pytest's own process is killed: the longest time until the pool's processes and files were gone",
    "suite_100": "100 small tests on `1x2`, `1x4`, `2x1`, `2x2` and `4x1`: time",
    "suite_100_in_10_files": "The same tests in ten files, each of which gets new hosts: time",
    "plugin_unused": "500 tests that use no topology, with the plugin installed: ratio of processor time",
}
_OF_COST = {
    "digits_loop": "a small network in a compiled step, 400 steps",
    "transformer": "a transformer of 4 layers, 20 steps",
    "unet": "a U-Net with a Dice term, 20 steps",
    "mobilenet_fit": "MobileNetV2 in `fit`, 20 steps",
    "resnet50": "ResNet50 in a compiled step, 20 steps",
    "dense": "a dense network of 125 million parameters with Adam, 5 steps",
}
WHAT |= {
    f"cost_{program}_{variant}": f"`verify` on `1x4` of {what}, {variant}: ratio to the program's two runs"
    for program, what in _OF_COST.items()
    for variant in ("equivalent", "by-design", "divergent")
}
WHAT |= {
    f"memory_{program}_{variant}": f"Peak memory of `verify` on `1x4` of {_OF_COST[program]}, {variant}: ratio to its two runs"
    for program, variant in (
        ("digits_loop", "equivalent"),
        ("transformer", "equivalent"),
        ("mobilenet_fit", "by-design"),
        ("dense", "equivalent"),
    )
}
_PLANNED = {
    "cnn_adam": "the digits CNN, Adam, batch 256",
    "resnet50_sgd": "ResNet50, SGD, 32 x 32, batch 8",
    "resnet50_adam": "ResNet50, Adam, 32 x 32, batch 8",
    "transformer_adam": "a transformer of 4 layers, Adam, batch 8",
}
WHAT |= {
    f"plan_memory_{name}": f"Memory of a step that `plan` forecasts beside the variables, {what}: relative error"
    for name, what in _PLANNED.items()
}

WHAT |= {
    f"virtual_{topology}_{variant}{suffix}": f"`verify --virtual` on `{topology}` of an MLP, 5 steps, {variant}: {what}"
    for topology in ("1x1024", "128x8")
    for variant in ("equivalent", "divergent")
    for suffix, what in (("", "time"), ("_memory", "peak memory"))
}


def markdown(results: dict[str, Any]) -> str:
    """One row a figure."""
    lines = ["| what | gpudist | compared with | which is | value | goal |", "| --- | --- | --- | --- | --- | --- |"]
    for name, what in WHAT.items():
        if name in results:
            entry = results[name]
            ours, theirs = (amount(entry[side], entry["of"]) for side in ("ours", "theirs"))
            value = amount(entry["value"], entry["unit"])
            lines.append(f"| {what} | {ours} | {theirs} | {entry['against']} | {value} | {_goal(entry)} |")
    return "\n".join(lines) + "\n"


def _goal(entry: dict[str, Any]) -> str:
    if entry["goal"] is None:
        return ""
    bound = "at least" if entry["at_least"] else "at most"
    return f"{bound} {amount(entry['goal'], entry['unit'])}: {'met' if entry['met'] else 'NOT met'}"


def amount(value: float, unit: str) -> str:
    """Return a number with a unit that suits its size."""
    for small, factor, large in _UNITS:
        if unit == large and abs(value) < 0.1:
            value, unit = value * factor, small
        elif unit == small and abs(value) >= factor:
            value, unit = value / factor, large
    return f"{value:.3g}x" if unit == "ratio" else f"{value:.3g} {unit}"


_UNITS = (("ms", 1000, "s"), ("μs", 1000, "ms"), ("MB", 1000, "GB"))


def in_page(text: str, results: dict[str, Any]) -> str:
    """The page's text with these figures."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + markdown(results) + END + tail


def write() -> None:
    """Put the figures of results.json into the page."""
    PAGE.write_text(in_page(PAGE.read_text(), json.loads(RESULTS.read_text())))
