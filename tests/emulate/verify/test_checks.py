"""Whether there is room for a verification is known before anything runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import emulate
from emulate.errors import Unavailable
from emulate.topology import Topology
from emulate.trace import Trace, TraceWriter
from emulate.verify import checks

FOUR = Topology.parse("1x4")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def _with_free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))


def test_all_traces_together_take_half_of_the_free_disk_at_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _with_free_disk(monkeypatch, 1 << 30)
    assert checks.trace_budget(tmp_path, [FOUR]) * 14 <= 1 << 29
    _with_free_disk(monkeypatch, 1 << 50)
    assert checks.trace_budget(tmp_path, [FOUR]) == checks.MOST_PER_HOST


def test_too_little_disk_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _with_free_disk(monkeypatch, 50 << 20)
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('it ran')")
    text = r"at least 112 MiB of free space\. Received: folder='.*' with 50 MiB free\. Free some, or use a larger disk: TMPDIR"
    with pytest.raises(Unavailable, match=text):
        emulate.verify(script, "1x4")


def test_a_topology_too_large_for_the_memory_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda: 2 << 30)
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('it ran')")
    with pytest.raises(
        Unavailable, match=r"Received: topology='32x8', which needs 4240 MiB, where 2048 MiB are free\. Ask for"
    ):
        emulate.verify(script, "32x8")
    large = Topology.parse("32x8")
    assert list(checks.lack_of_memory([FOUR, large, Topology.parse("4x8")])) == [large]


def test_beyond_the_budget_gradients_are_sampled(tmp_path: Path) -> None:
    Trace.describe(tmp_path, {"topology": "1x1"})
    writer = TraceWriter(tmp_path / "host-0", budget=1 << 20)
    large = np.arange(1 << 18, dtype=np.float32)
    entries: list[dict[str, Any]] = [writer.array(large) for _ in range(4)]
    writer.close()
    assert [entry.get("stride", 1) for entry in entries] == [1, 256, 256, 256]
    assert (tmp_path / "host-0" / "arrays.bin").stat().st_size < (1 << 20) + (1 << 15)
