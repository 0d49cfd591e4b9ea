"""Draw examples per second over the number of GPUs with characters. Both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from emulate.report.page import Page

if TYPE_CHECKING:
    from emulate.plan import Forecast

_MARKS = {"compute": "●", "communication": "◆", "stragglers": "▲", "input": "■"}
_BAND, _IDEAL = "░", "·"
_LINES, _WIDEST, _NARROWEST = 10, 80, 60


@dataclass(frozen=True)
class _Axis:
    """Map positive numbers to cells: `low` to the first, `high` to the last."""

    low: float
    high: float
    cells: int

    def cell(self, value: float) -> int:
        return round(math.log(value / self.low) / math.log(self.high / self.low) * (self.cells - 1))

    def value(self, cell: int) -> float:
        return float(self.low * (self.high / self.low) ** (cell / (self.cells - 1)))


def add_chart(page: Page, forecast: Forecast, styles: Mapping[str, str]) -> None:
    """Add the chart of a forecast with several numbers of GPUs, where the page is wide enough.

    Args:
        page: The page.
        forecast: The forecast.
        styles: The style of each limit; plain where it has none.
    """
    import numpy as np

    rows = forecast.by_num_gpus()
    if len(rows) < 2 or page.width < _NARROWEST:
        return
    counts = [row.num_gpus for row in rows]
    rates = [row.examples_per_second for row in rows]
    ideal = [count * forecast.one_gpu_per_second for count in counts]
    ticks = ticks_of(min(ideal[0], *(rate.low for rate in rates)), max(ideal[-1], *(rate.high for rate in rates)))
    labels = [f"{tick:,.12g}" for tick in ticks]
    margin = max(map(len, labels))
    up = _Axis(ticks[0], ticks[-1], _LINES)
    across = _Axis(counts[0], counts[-1], min(page.width, _WIDEST) - margin - 2)
    cells = [[" "] * across.cells for _ in range(_LINES)]
    for column in range(across.cells):
        at = math.log(across.value(column))
        low, high, line = (
            up.cell(math.exp(np.interp(at, np.log(counts), np.log(values))))
            for values in ([rate.low for rate in rates], [rate.high for rate in rates], ideal)
        )
        for height in range(low, high + 1):
            cells[height][column] = _BAND
        cells[line][column] = _IDEAL
    for row in rows:
        cells[up.cell(row.examples_per_second.middle)][across.cell(row.num_gpus)] = _MARKS[row.limit]

    by_mark = {_MARKS[limit]: style for limit, style in styles.items()} | {_BAND: "dim", _IDEAL: "dim"}
    limits = [limit for limit in _MARKS if any(row.limit == limit for row in rows)]
    legend = ((f"  {_MARKS[limit]} {limit}", styles.get(limit, "")) for limit in limits)
    page.line(f"examples/s  {_BAND} 90 % interval  {_IDEAL} N times one GPU")
    page.line("limit", *legend)
    named = {up.cell(tick): label for tick, label in zip(ticks, labels, strict=True)}
    for height in reversed(range(_LINES)):
        runs = (("".join(run), by_mark.get(mark, "")) for mark, run in groupby(cells[height]))
        page.line(named.get(height, "").rjust(margin) + " │", *runs)
    page.line(" " * margin + " └" + "─" * across.cells)
    page.line("GPUs".rjust(margin) + "  " + _labels_below(counts, across))


def ticks_of(low: float, high: float) -> list[float]:
    """Return round numbers from below `low` to above `high`: powers of ten, or also their double and fivefold."""
    steps = (1, 2, 5) if high / low < 100 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)  # log10 rounds: one more at each end
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    first = max(at for at, tick in enumerate(ticks) if tick <= low)
    last = min(at for at, tick in enumerate(ticks) if tick >= high)
    return ticks[first : last + 1]


def _labels_below(counts: Sequence[int], across: _Axis) -> str:
    """Return one line with the numbers of GPUs that have room: both ends first."""
    line = [" "] * across.cells
    for count in (counts[0], counts[-1], *counts[1:-1]):
        text = f"{count:,}"
        start = min(max(0, across.cell(count) - len(text) // 2), across.cells - len(text))
        if not "".join(line[max(0, start - 1) : start + len(text) + 1]).strip():
            line[start : start + len(text)] = text
    return "".join(line)
