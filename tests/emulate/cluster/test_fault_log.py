"""What the supervisor knows of faults that came to pass: which of them pass by themselves, and until when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from emulate.cluster import fault_log
from emulate.cluster.fault_log import FaultLog
from emulate.faults import Disconnect, Fault, Kill, Stop


@pytest.mark.parametrize(
    ("fault", "lasts"),
    [
        (Stop(host=1, step=4, seconds=6.0), 6.0),
        (Disconnect(host=1, step=4, seconds=3.0), 6.0),  # what was sent meanwhile is sent again as long after
        (Stop(host=1, step=4), 0.0),
        (Kill(host=1, step=4), 0.0),
    ],
    ids=str,
)
def test_a_fault_for_a_time_is_known_to_pass_and_one_for_ever_is_not(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, lasts: float
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(fault_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    plan: Any = SimpleNamespace(faults=[fault], faults_to_come={})
    known = FaultLog(plan)
    known.take(1, {"event": "fired", "fault": 0, "step": 4})
    seen = []
    for clock.now in (100.0, 100.0 + lasts - 0.1, 100.0 + lasts + 0.1):
        seen.append(known.is_passing)
    assert seen == [lasts > 0, lasts > 0, False]
    known.begin_again(plan)
    clock.now = 100.0
    assert not known.is_passing  # all hosts were started anew
