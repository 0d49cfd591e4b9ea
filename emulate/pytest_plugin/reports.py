"""Make the controller's own reports."""

from __future__ import annotations

import time

import pytest

from emulate.pytest_plugin import upstream

Properties = list[tuple[str, object]]


def skipped_report(item: pytest.Item, started: float, reason: str, properties: Properties) -> list[pytest.TestReport]:
    """Return the reports of a test that could not run here."""
    path, line, _ = item.location
    setup = _report(item, "setup", "skipped", started, (path, line or 0, f"Skipped: {reason}"))
    return finished([setup, _report(item, "teardown", "passed", time.time())], properties)


def error_report(item: pytest.Item, started: float, message: str, properties: Properties) -> list[pytest.TestReport]:
    """Return the reports of a test with a usage error."""
    path, line, _ = item.location
    setup = _report(item, "setup", "failed", started, upstream.failure(message, path, line or 0, message))
    return finished([setup, _report(item, "teardown", "passed", time.time())], properties)


def finished(reports: list[pytest.TestReport], properties: Properties, note: str = "") -> list[pytest.TestReport]:
    """Return the reports of a test with its notes."""
    for report in reports:
        report.user_properties = [*report.user_properties, *properties]
        if note:
            report.sections.append(("gpudist", note))
    return reports


def verdict_of(reports: list[pytest.TestReport]) -> str:
    """Return `failed`, `skipped` or `passed`; an expected failure has passed."""
    if any(report.failed for report in reports):
        return "failed"
    return "skipped" if any(report.skipped and not hasattr(report, "wasxfail") for report in reports) else "passed"


def _report(item: pytest.Item, when: str, outcome: str, started: float, longrepr: object = None) -> pytest.TestReport:
    now = time.time()
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=longrepr,  # type: ignore[arg-type]
        when=when,  # type: ignore[arg-type]
        duration=now - started,
        start=started,
        stop=now,
        user_properties=list(item.user_properties),
    )
