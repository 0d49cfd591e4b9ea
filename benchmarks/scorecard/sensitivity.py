"""How small an error is found: planted into one element, one example's share, one replica, one step of a gradient.

Usage: python -m benchmarks.scorecard.sensitivity. Writes sensitivity.json and the chart of the docs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

from benchmarks.scorecard.cells import ROOT, Job, verify
from benchmarks.scorecard.corpus import Answer, Entry
from fixtures.corpus.index import FOLDER

PLACES = ("element", "example", "replica", "step")
TIMES = (1, 3, 10, 30, 100, 1000)
TOPOLOGY = "1x4"
RESULTS = Path(__file__).resolve().parent / "sensitivity.json"
CHART = ROOT / "docs" / "_static" / "sensitivity.svg"


def measure() -> dict[str, Any]:
    """Return the noise floor of the gradient, and for each place and size whether the error was found, and in which step."""
    clean = _seen("nowhere", 0.0)
    if clean["verdict"] != "equivalent":
        raise SystemExit(f"The program without an error must be equivalent. Received: {clean['verdict']}.")
    noise = median(point["noise"] for point in clean["course"] if point["kind"] == "gradient")
    found: dict[str, Any] = {"noise": noise, "places": {place: {} for place in PLACES}}
    for place in PLACES:
        for times in TIMES:
            seen = _seen(place, times * noise)
            found["places"][place][str(times)] = {
                "verdict": seen["verdict"],
                "causes": [cause["code"] for cause in seen["causes"]],
            }
            print(f"{place}, {times} times the noise: {seen['verdict']}", file=sys.stderr, flush=True)
    return found


def _seen(place: str, size: float) -> dict[str, Any]:
    entry = Entry(f"sensitivity-{place}", FOLDER / "sensitivity.py", (TOPOLOGY,), Answer(("equivalent",)), (place, repr(size)))
    return verify(Job(entry))[TOPOLOGY]


def draw(found: dict[str, Any]) -> None:
    """Draw what was found as a grid: places by sizes."""
    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
    for row, place in enumerate(PLACES):
        for column, times in enumerate(TIMES):
            is_found = found["places"][place][str(times)]["verdict"] == "divergent"
            axes.text(
                column, row, "found" if is_found else "-", ha="center", va="center", color="white" if is_found else "#777777"
            )
            axes.add_patch(
                plt.Rectangle((column - 0.48, row - 0.45), 0.96, 0.9, color="#2b7a78" if is_found else "#eeeeee", zorder=0)
            )
    axes.set_xticks(range(len(TIMES)), [f"{times}x" for times in TIMES])
    axes.set_yticks(range(len(PLACES)), [f"one {place}" for place in PLACES])
    axes.set(
        xlim=(-0.5, len(TIMES) - 0.5),
        ylim=(len(PLACES) - 0.5, -0.5),
        xlabel="error planted into a gradient, in units of its noise floor",
    )
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    CHART.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(CHART)


def main() -> int:
    """Measure, write, draw."""
    found = measure()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    draw(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
