"""What is said of code that was not run, because gpudist stopped the program."""

from __future__ import annotations

import pytest

from emulate.topology import REFERENCE
from emulate.trace import Trace
from emulate.verify.ends import unseen_code
from emulate.verify.result import RunResult
from tests.emulate.verify.cases import Folder, loop
from tests.emulate.verify.hand_made import right_reference


@pytest.mark.parametrize(("limit", "why"), [(3, "--steps"), (2, "the end of an epoch")])
def test_an_option_is_named_only_where_it_or_its_default_ended_the_run(folder: Folder, limit: int, why: str) -> None:
    made = folder.made()
    made.event({"event": "end", "reason": "steps"})
    trace = loop(made, right_reference)
    Trace.describe(trace.directory, {"topology": "1x1", "steps": limit})
    (note,) = unseen_code(RunResult("reference", REFERENCE, Trace(trace.directory)))
    assert note == f"Stopped after 3 steps ({why}). Later code, such as evaluations, was not checked."
