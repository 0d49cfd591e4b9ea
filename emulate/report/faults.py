"""Describe how a program fared with faults, in a line or two for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from emulate.digits import number
from emulate.report.page import Page

if TYPE_CHECKING:
    from emulate.verify.verdict import FaultReport

_COLUMN = 15


def add_faults(page: Page, faults: Sequence[FaultReport]) -> None:
    """Add each fault with what came of it."""
    for at, fault in enumerate(faults):
        page.labelled("faults" if at == 0 else "", f"{fault.fault}: {outcome(fault)}", 2, _COLUMN, label_style="dim")


def outcome(fault: FaultReport) -> str:
    """Return the result of one fault: `recovered after 1 restart, resumed after 6 steps, the same result bit for bit`."""
    if not fault.fired:
        return "did not happen"
    where = f"in step {fault.step} (counted from 1), " if fault.step else ""
    if not fault.recovered:
        return f"{where}not recovered{_after(fault)}"
    results = {
        "identical": "the same result bit for bit",
        "within-noise": f"the same result within rounding ({number(fault.error)})",
        "different": f"a different result (largest difference {number(fault.error)})"
        if fault.error
        else "a different number of steps",
        None: "nothing could be compared",
    }
    if fault.fault.startswith("preempt:") and not fault.restarts:
        has_left = fault.result == "different" and not fault.error
        return f"{where}{_LEFT if has_left else _STAYED}, {results[fault.result]}"
    return f"{where}recovered{_after(fault)}, {results[fault.result]}"


def _resumed(steps: int) -> str:
    """Return where a program continued that had made so many steps."""
    return f"after {steps} step{'s' if steps > 1 else ''}" if steps else "from the beginning"


_STAYED = "received SIGTERM, but ran to its end before SIGKILL, so its recovery was not tested"

_LEFT = "received SIGTERM and ended with exit code 0, so gpudist did not restart it"


def _after(fault: FaultReport) -> str:
    if not fault.restarts:
        return " without a restart"
    times = "1 restart" if fault.restarts == 1 else f"{fault.restarts} restarts"
    if not fault.went_on_from:
        return f" after {times}"
    return f" after {times}, resumed {_resumed(fault.went_on_from[-1])}"
