"""Draw the pictures of the HTML pages as SVG text: the error of a run, the replicas' batch sizes, the speed of a plan."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from emulate.report.plan import ticks_of
from emulate.topology import Topology

if TYPE_CHECKING:
    from emulate.plan import Forecast
    from emulate.verify.verdict import Farthest, Run

LEAST, _MOST = 1e-2, 1e30  # times the noise: what is below or above is drawn there; an axis has no room for all floats
_COLOURS = {
    "gradient": "#1f6fb2",
    "weight": "#c2571a",
    "variable": "#7a6a00",
    "loss": "#2b8a3e",
    "metric": "#8250b5",
    "initial-weight": "#a02c5a",
    "final-weight": "#0b7285",
}
_LIMITS = {
    "compute": ("#2b8a3e", "o"),
    "communication": ("#c2571a", "D"),
    "stragglers": ("#8250b5", "^"),
    "input": ("#c92a2a", "s"),
}
_OTHER = "#555555"
_BAD = "#c92a2a"
_MOST_ROWS = 24  # replicas that are drawn at their full height
_MOST_CELLS = 60  # steps whose numbers are written into the cells


def course(run: Run, limit: float) -> str:
    """Draw error / noise of each step on a logarithmic scale, with one line for each kind.

    Args:
        run: A run with a course.
        limit: How often the noise is still no divergence.

    Returns:
        SVG text.
    """
    figure, axes = _figure(2.9)
    ceiling = max([limit * 10, *(min(10 * ratio, _MOST) for point in run.course if math.isfinite(ratio := _ratio(point)))])
    axes.axhspan(LEAST / 2, limit, color="#2b8a3e", alpha=0.08, linewidth=0)
    axes.axhline(limit, color=_BAD, linewidth=1, linestyle="--")
    axes.annotate(
        f"{limit:g} times the noise", (0.995, limit), xycoords=("axes fraction", "data"),
        ha="right", va="bottom", fontsize=8, color=_BAD,
    )  # fmt: skip
    for kind in dict.fromkeys(point.kind for point in run.course):
        points = [point for point in run.course if point.kind == kind]
        steps = [point.step for point in points]
        ratios = [_ratio(point) for point in points]
        colour = _COLOURS.get(kind, _OTHER)
        drawn = [min(max(ratio, LEAST), ceiling) if not math.isnan(ratio) else ceiling for ratio in ratios]
        axes.plot(steps, drawn, label=kind, color=colour, linewidth=1.3, marker="o", markersize=3)
        bad = [step for step, ratio in zip(steps, ratios, strict=True) if not math.isfinite(ratio)]
        axes.plot(bad, [ceiling] * len(bad), color=colour, linestyle="", marker="x", markersize=7)
    axes.set_yscale("log")
    axes.set_ylim(LEAST / 2, ceiling * 2)
    axes.set_ylabel("error / noise")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return _svg(figure)


def rows(run: Run) -> str:
    """Return a map of the examples of each replica in each step.

    Args:
        run: A run of several replicas whose rows are known.

    Returns:
        SVG text.
    """
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    counts = np.array(run.rows).T
    num_replicas, num_steps = counts.shape
    figure, axes = _figure(0.9 + 0.26 * min(num_replicas, _MOST_ROWS))
    most = max(1, int(counts.max()))
    axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=2.5 * most)
    if num_steps <= _MOST_CELLS and num_replicas <= _MOST_ROWS:
        size = 8 if num_steps <= 24 else 5
        for replica, step in np.ndindex(num_replicas, num_steps):
            value = int(counts[replica, step])
            axes.text(
                step, replica, str(value), ha="center", va="center", fontsize=size, color=_BAD if value == 0 else "#222222"
            )
    # No hosts are shown if the program did not use every device.
    shape = Topology.parse(run.topology)
    starts = range(0, num_replicas, shape.num_devices) if num_replicas == shape.num_replicas else ()
    if len(hosts := [range(start, start + shape.num_devices) for start in starts]) > 1:
        _name_hosts(axes, hosts)
    else:
        axes.set_ylabel("replica")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return _svg(figure)


def speed(forecast: Forecast) -> str:
    """Draw examples per second over the number of GPUs, with the interval, beside N times one GPU.

    Args:
        forecast: A forecast with several numbers of GPUs.

    Returns:
        SVG text.
    """
    figure, axes = _figure(3.6, "GPUs")
    rows = forecast.by_num_gpus()
    counts = [row.num_gpus for row in rows]
    rates = [row.examples_per_second for row in rows]
    band = ([rate.low for rate in rates], [rate.high for rate in rates])
    axes.fill_between(counts, *band, color="#1f6fb2", alpha=0.2, linewidth=0, label="90 % interval")
    axes.plot(counts, [rate.middle for rate in rates], color="#1f6fb2", linewidth=1.3)
    ideal = [count * forecast.one_gpu_per_second for count in counts]
    axes.plot(counts, ideal, color=_OTHER, linestyle="--", linewidth=1, label="N times one GPU")
    for limit, (colour, marker) in _LIMITS.items():
        points = [(row.num_gpus, row.examples_per_second.middle) for row in rows if row.limit == limit]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle="", label=f"limit: {limit}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, values in ((axes.xaxis, counts), (axes.yaxis, [*band[0], *band[1]])):
        axis.set_ticks(ticks_of(min(values), max(values)))
        axis.set_major_formatter("{x:,.12g}")
        axis.set_minor_formatter("")
    axes.set_ylabel("examples/s")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return _svg(figure)


def _name_hosts(axes: Any, hosts: Sequence[range]) -> None:
    """Draw lines between the hosts, and name each with its replicas; some of very many."""
    for of_host in hosts[1:]:
        axes.axhline(of_host.start - 0.5, color="#222222", linewidth=0.8)
    shown = list(enumerate(hosts))[:: math.ceil(len(hosts) / _MOST_ROWS)]
    axes.set_yticks(
        [of_host.start + (len(of_host) - 1) / 2 for _, of_host in shown],
        [f"host {host}: {_replicas(of_host)}" for host, of_host in shown],
        fontsize=8,
    )


def _replicas(of_host: range) -> str:
    first, last = of_host[0], of_host[-1]
    return f"replica {first}" if first == last else f"replicas {first} to {last}"


def _figure(height: float, label: str = "step") -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    import matplotlib as mpl

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it names every font that it looks for and lacks
    buffer = io.StringIO()
    # The same verdict makes the same bytes; text stays text.
    with mpl.rc_context({"svg.hashsalt": "gpudist", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _ratio(point: Farthest) -> float:
    if point.non_finite or not math.isfinite(point.error):
        return math.inf
    if not point.noise:
        return math.inf if point.error else 0.0
    return point.error / point.noise
