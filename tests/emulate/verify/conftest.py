"""Traces made by hand and by simulated training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulate.verify.cases import Folder
from tests.emulate.verify.made_traces import Made

Maker = Callable[..., Made]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Where the traces of a test are made."""
    return Folder(tmp_path)


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """make("1x4") starts a trace in a folder of its own."""
    count = 0

    def start(topology: str = "1x1", **options: Any) -> Made:
        nonlocal count
        count += 1
        return Made(tmp_path / f"trace-{count}", topology, **options)

    return start
