"""Write a forecast for a person: one line for each number of GPUs, then what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from emulate.report.page import Page, width_of

if TYPE_CHECKING:
    from emulate.plan import Estimate, Forecast, Row

_LIMITS = {"input": "bold red", "communication": "yellow", "stragglers": "yellow"}
_LIMIT_COLUMN = 5


def show_plan(forecast: Forecast, stream: TextIO) -> None:
    """Print a forecast: with colour on a terminal, plain elsewhere."""
    page = Page(width_of(stream))
    recorded, machine = forecast.recorded, forecast.machine
    page.line((f"{recorded.program} on {machine.name}", "bold"), f"  {machine.gpu}, {machine.gpus_per_host} a host")
    page.text(f"batch {recorded.batch} on each GPU, {recorded.parameters:,} parameters", style="dim")
    page.blank()
    _add_table(page, forecast)
    page.blank()
    if any(row.limit == "input" for row in forecast.rows):
        page.text("Input limits: more GPUs do not help. Read and prepare examples faster, or use more hosts.", style="bold red")
        page.blank()
    _add_memory(page, forecast)
    page.blank()
    for sentence in forecast.basis:
        page.labelled("-", sentence, 0, 2)
    page.print(stream)


def _add_memory(page: Page, forecast: Forecast) -> None:
    if forecast.memory is None:
        page.text("Memory: not known, because the graph of the step is not known.")
        return
    needed, verdict, *others = forecast.memory.sentences()
    page.text(needed)
    page.text(verdict, style={None: "", True: "green", False: "bold red"}[forecast.memory.fits])
    for sentence in others:
        page.text(sentence, style="dim")


def _add_table(page: Page, forecast: Forecast) -> None:
    head = ("GPUs", "hosts", "examples/s", "90 % interval", "efficiency", "limit", "time", "price", "batch for 90 %")
    lines = [head, *(_cells(row) for row in forecast.rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    for number, line in enumerate(lines):
        spans = []
        for at, (cell, width) in enumerate(zip(line, widths, strict=True)):
            style = "dim" if number == 0 else _LIMITS.get(cell, "") if at == _LIMIT_COLUMN else ""
            spans.append((("  " if at else "") + (cell.ljust(width) if at == _LIMIT_COLUMN else cell.rjust(width)), style))
        page.line(*spans)
    price = "" if forecast.machine.price_year is None else f" Prices on demand of {forecast.machine.price_year}."
    page.text(f"Time and price are for {forecast.examples:,} examples.{price}", style="dim")


def _cells(row: Row) -> tuple[str, ...]:
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
