"""Write a forecast for a person: one line for each number of GPUs, a chart, then what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from emulate.report.page import Page, width_of

if TYPE_CHECKING:
    from emulate.plan import Forecast, Row

HEADER = ("GPUs", "hosts", "examples/s", "90 % interval", "efficiency", "limit", "time", "price", "batch for 90 %")
_LIMIT_STYLES = {"input": "bold red", "communication": "yellow", "stragglers": "yellow"}
LIMIT_COLUMN = HEADER.index("limit")


def show_plan(forecast: Forecast, stream: TextIO) -> None:
    """Print a forecast: with colour on a terminal, plain elsewhere."""
    page = Page(width_of(stream))
    recorded, machine = forecast.recorded, forecast.machine
    page.line((f"{recorded.program} on {machine.name}", "bold"), f"  {machine.gpu}, {machine.gpus_per_host} a host")
    page.text(about_step(forecast), style="dim")
    page.blank()
    _add_table(page, forecast)
    page.blank()
    add_chart(page, forecast, _LIMIT_STYLES)
    page.blank()
    if warning := input_warning(forecast):
        page.text(warning, style="bold red")
        page.blank()
    needed, *others = memory_sentences(forecast)
    page.text(needed)
    fits = None if forecast.memory is None else forecast.memory.fits
    for number, sentence in enumerate(others):
        page.text(sentence, style="dim" if number else {None: "", True: "green", False: "bold red"}[fits])
    page.blank()
    for sentence in forecast.basis:
        page.labelled("-", sentence, 0, 2)
    page.print(stream)


def input_warning(forecast: Forecast) -> str:
    """Return a warning where the input limits; else nothing."""
    is_limited = any(row.limit == "input" for row in forecast.rows)
    return "Input limits: more GPUs do not help. Read and prepare examples faster, or use more hosts." if is_limited else ""


def memory_sentences(forecast: Forecast) -> list[str]:
    """Return the memory in words: what is needed, whether it fits, then what is not counted."""
    unknown = "Memory: not known, because the graph of the step is not known."
    return [unknown] if forecast.memory is None else forecast.memory.sentences()


def _add_table(page: Page, forecast: Forecast) -> None:
    lines = [HEADER, *map(cells, forecast.rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADER))]
    for number, line in enumerate(lines):
        spans = []
        for at, (cell, width) in enumerate(zip(line, widths, strict=True)):
            style = "dim" if number == 0 else _LIMIT_STYLES.get(cell, "") if at == LIMIT_COLUMN else ""
            spans.append((("  " if at else "") + (cell.ljust(width) if at == LIMIT_COLUMN else cell.rjust(width)), style))
        page.line(*spans)
    page.text(about_price(forecast), style="dim")


def about_step(forecast: Forecast) -> str:
    """Return the size of the recorded step in words."""
    return f"batch {forecast.recorded.batch} on each GPU, {forecast.recorded.parameters:,} parameters"


def about_price(forecast: Forecast) -> str:
    """Return in words for how many examples time and price are."""
    price = "" if forecast.machine.price_year is None else f" Prices on demand of {forecast.machine.price_year}."
    return f"Time and price are for {forecast.examples:,} examples.{price}"


def cells(row: Row) -> tuple[str, ...]:
    """Return a row in the columns of `HEADER`."""
    rate, hours = row.examples_per_second, row.hours.middle
    time = f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.3g} min" if hours * 60 >= 1 else f"{hours * 3600:.3g} s"
    return (
        f"{row.num_gpus:,}",
        f"{row.num_hosts:,}",
        _number(rate.middle),
        f"{_number(rate.low)} to {_number(rate.high)}",
        f"{row.efficiency.middle:.0%}",
        row.limit,
        time,
        "-" if row.dollars is None else f"${row.dollars.middle:,.2f}",
        "none" if row.batch_for_efficiency is None else f"{row.batch_for_efficiency:,}",
    )


def _number(value: float) -> str:
    """Return three digits, in full: 1,480 for 1482.3."""
    return f"{float(f'{value:.3g}'):,.{0 if value >= 100 else 1}f}"


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
