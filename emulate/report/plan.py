"""Write a forecast for a person: one line for each number of GPUs, a chart, then what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from emulate.report.chart import add_chart
from emulate.report.page import Page, width_of

if TYPE_CHECKING:
    from emulate.plan import Estimate, Forecast, Row

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
    _add_memory(page, forecast)
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


def _add_memory(page: Page, forecast: Forecast) -> None:
    needed, *others = memory_sentences(forecast)
    page.text(needed)
    fits = None if forecast.memory is None else forecast.memory.fits
    for number, sentence in enumerate(others):
        page.text(sentence, style="dim" if number else {None: "", True: "green", False: "bold red"}[fits])


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
    rate = row.examples_per_second
    return (
        f"{row.num_gpus:,}",
        f"{row.num_hosts:,}",
        _number(rate.middle),
        f"{_number(rate.low)} to {_number(rate.high)}",
        f"{row.efficiency.middle:.0%}",
        row.limit,
        _time(row.hours),
        "-" if row.dollars is None else f"${row.dollars.middle:,.2f}",
        "none" if row.batch_for_efficiency is None else f"{row.batch_for_efficiency:,}",
    )


def _number(value: float) -> str:
    """Return three digits, in full: 1,480 for 1482.3."""
    return f"{float(f'{value:.3g}'):,.{0 if value >= 100 else 1}f}"


def _time(hours: Estimate) -> str:
    seconds = hours.middle * 3600
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 3600 else f"{hours.middle:.3g} h"
