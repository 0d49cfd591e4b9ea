"""Write a forecast as a page: table, picture, memory, collectives, and what it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from emulate.report.files import write_whole
from emulate.report.html.template import check_libraries, filled, image
from emulate.report.plan import HEADER, LIMIT_COLUMN, about_price, about_step, cells, input_warning, memory_sentences

if TYPE_CHECKING:
    from emulate.plan import Forecast


def write_plan_html(forecast: Forecast, path: Path) -> None:
    """Write a forecast as a page; a reader of the file sees all of it or nothing.

    Args:
        forecast: What `make_forecast` returned.
        path: The file.

    Raises:
        UsageError: When a library that makes it is not installed.
    """
    check_libraries()
    from emulate.report.html import pictures

    page = filled(
        "plan.html.jinja",
        forecast=forecast,
        step=about_step(forecast),
        header=HEADER,
        limit_column=LIMIT_COLUMN + 1,
        rows=[(row, cells(row)) for row in forecast.rows],
        price=about_price(forecast),
        input_warning=input_warning(forecast),
        picture=image(pictures.speed(forecast)) if len(forecast.by_num_gpus()) > 1 else "",
        memory=memory_sentences(forecast),
    )
    write_whole(path, page)
