"""Write what users read: progress during the run, verdicts and plans on the terminal, as JSON and as a page."""

from emulate.report.files import STANDARD_OUTPUT, check_writable, to_sarif, write_json, write_object, write_sarif
from emulate.report.html import check_libraries, write_html, write_plan_html
from emulate.report.page import Page, width_of
from emulate.report.plan import show_plan
from emulate.report.progress import LiveProgress, PlainProgress, progress_on
from emulate.report.terminal import assert_equivalent, check_equivalent, render, show

__all__ = [
    "STANDARD_OUTPUT",
    "LiveProgress",
    "Page",
    "PlainProgress",
    "assert_equivalent",
    "check_equivalent",
    "check_libraries",
    "check_writable",
    "progress_on",
    "render",
    "show",
    "show_plan",
    "to_sarif",
    "width_of",
    "write_html",
    "write_json",
    "write_object",
    "write_plan_html",
    "write_sarif",
]
