"""What the tests of the pytest plugin share: a user's tests are written to a folder and run by a pytest of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for a user's tests, whose pytest fails on warnings."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    if os.environ.get("GPUDIST_COMPAT_LEGACY_KERAS") == "1":
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    pytester.makeini("[pytest]\nfilterwarnings =\n    error\n    ignore:.*fork.*:DeprecationWarning\n")
    return pytester


@pytest.fixture
def run(suite: pytest.Pytester) -> Run:
    """Run these tests as a user does, in a process of its own."""

    def go(source: str = "", *args: str, name: str = "test_it.py") -> pytest.RunResult:
        if source:
            (Path(suite.path) / name).write_text(source)
        return suite.runpytest_subprocess("-ra", *args, timeout=300)

    return go
