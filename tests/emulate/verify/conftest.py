"""Traces made by hand and by simulated training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from emulate.verify.case import Case
from emulate.verify.causes import Group
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


@pytest.fixture(autouse=True)
def causes_of_a_group_come_in_any_order(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Ask the causes of a group in an order that the test's name decides: only the report has that of the table."""
    drawn, ask = Random(request.node.name), Group.ask

    def shuffled(group: Group, case: Case) -> bool:
        known, codes = len(case.found), [cause.code for cause in group.causes]
        is_new = ask(replace(group, causes=drawn.sample(group.causes, len(codes))), case)
        case.found[known:] = sorted(case.found[known:], key=lambda finding: codes.index(finding.code))
        return is_new

    monkeypatch.setattr(Group, "ask", shuffled)
