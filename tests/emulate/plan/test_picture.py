"""The picture of a plan: speed over the number of GPUs beside N times one GPU, in the terminal and on a page."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emulate.plan import Forecast, Gradient, Recorded, StepMemory, find_machine, make_forecast, parse_measured
from emulate.report import Page, check_writable, show_plan, write_plan_html
from emulate.report.plan import add_chart, ticks_of

ROOT = Path(__file__).resolve().parents[3]
MEMORY = StepMemory(100e6, 200e6, 0.0, (0.0, 1e6), ((0.0, 200e6, 200e6),), ((0.0, 200e6, 200e6),))
GRADIENTS = tuple(Gradient(f"g{at}", 160_000, 640_000) for at in range(160))
RESNET = Recorded("<b>train.py", 25_600_000, 64, GRADIENTS, flops=64 * 24.6e9, memory=MEMORY)


def forecast(counts: Sequence[int] | None = None, *, rate: float | None = None) -> Forecast:
    points = parse_measured(["1: 300 examples/s at batch 64"])
    return make_forecast(RESNET, find_machine("p3.16xlarge"), points, counts=counts, input_per_second=rate)


def chart(found: Forecast, width: int = 80) -> list[str]:
    page = Page(width)
    add_chart(page, found, {})
    return page.plain().splitlines()


def test_the_chart_has_a_mark_for_each_number_of_gpus_and_fits_into_80_columns() -> None:
    lines = chart(forecast(rate=1000.0))
    assert len(lines) == 14
    assert max(map(len, lines)) <= 80
    assert lines[:2] == ["examples/s  ░ 90 % interval  · N times one GPU", "limit  ● compute  ■ input"]
    marks = "".join(lines[2:])
    assert (marks.count("●"), marks.count("■")) == (2, 13)
    assert lines[-1].split()[:5] == ["GPUs", "1", "2", "4", "8"]
    assert lines[-1].endswith(" 100,000")


def test_the_guide_shows_the_chart_that_is_printed() -> None:
    guide = (ROOT / "docs" / "guides" / "plan.md").read_text(encoding="utf-8")
    assert "\n".join(chart(forecast([1, 2, 4, 8, 16, 32, 64]), 72)) in guide


def test_a_chart_without_room_or_with_one_number_of_gpus_is_left_out() -> None:
    assert chart(forecast(), 59) == chart(forecast([8, 8])) == []


def test_a_stream_without_these_characters_gets_others() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show_plan(forecast(), stream)
    stream.seek(0)
    text = stream.read()
    assert "examples/s  : 90 % interval  . N times one GPU\nlimit  o compute  x communication\n" in text
    assert "?" not in text


@settings(max_examples=30)
@example([3, 2], 60)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True), st.integers(60, 120))
def test_every_plan_has_a_chart(counts: list[int], width: int) -> None:
    lines = chart(forecast(counts), width)
    assert len(lines) == 14
    assert max(map(len, lines)) <= min(80, width)
    assert len(re.findall("[●◆▲■]", "".join(lines[2:]))) >= 1


@given(st.floats(1e-6, 1e12), st.floats(1, 1e9))
def test_the_ticks_enclose_the_values(low: float, times: float) -> None:
    ticks = ticks_of(low, low * times)
    assert ticks[0] <= low <= low * times <= ticks[-1]


def words_in(page: str) -> set[str | None]:
    svg = base64.b64decode(page.split('src="data:image/svg+xml;base64,')[1].split('"')[0])
    return {element.text for element in ET.fromstring(svg).iter() if element.tag.endswith("text")}


def test_the_page_has_table_picture_memory_and_collectives(tmp_path: Path) -> None:
    write_plan_html(forecast(), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<h1>&lt;b&gt;train.py on p3.16xlarge</h1>" in page
    assert page.count("<tr ") == 15
    for text in (
        "batch 64 on each GPU",
        "<td>2,300</td>",
        "The largest batch that fits is 77.",
        "<td>102,400,000</td>",
        "NCCL",
    ):
        assert text in page, text
    assert {"GPUs", "examples/s", "90 % interval", "N times one GPU", "limit: communication"} <= words_in(page)
    assert "script" not in page
    assert "http" not in page.replace("http-equiv", "")
    check_writable(tmp_path / "plan.html", "--html")  # an earlier page may be replaced


@pytest.mark.parametrize(("counts", "pictures"), [([8], 0), ([4, 1], 1)])
def test_the_page_has_a_picture_of_several_numbers_of_gpus(tmp_path: Path, counts: list[int], pictures: int) -> None:
    write_plan_html(forecast(counts), tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").count("<img ") == pictures
