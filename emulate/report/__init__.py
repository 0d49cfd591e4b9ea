"""What users read: progress while it runs, the verdict on the terminal, the verdict as JSON."""

from emulate.report.assertion import assert_equivalent
from emulate.report.json import check_writable, write_json, write_object
from emulate.report.page import Page, width_of
from emulate.report.progress import Lines, Live, progress_on
from emulate.report.terminal import render, show

__all__ = [
    "Lines",
    "Live",
    "Page",
    "assert_equivalent",
    "check_writable",
    "progress_on",
    "render",
    "show",
    "width_of",
    "write_json",
    "write_object",
]
