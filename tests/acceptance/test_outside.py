"""`python -m benchmarks.outside`: its page has what was measured, and each case can be repeated with the same versions."""

from __future__ import annotations

import re

import pytest

from benchmarks.outside import page
from benchmarks.outside.cases import CASES, CHECKS, PROGRAMS, TOPOLOGIES, Case

NAMES = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def test_the_page_is_written_from_the_stored_results() -> None:
    assert page.PAGE.read_text() == page.text(page.read())


def test_every_case_was_measured_on_each_topology() -> None:
    measured = {name: list(result["runs"]) for name, result in page.read().items()}
    assert measured == {name: list(TOPOLOGIES) for name in CASES}


def test_every_program_and_check_compiles_and_belongs_to_a_case() -> None:
    programs = {path for folder in (PROGRAMS, CHECKS) for path in folder.glob("*.py") if path.stem != "__init__"}
    assert {path for case in CASES.values() for path in (case.path, case.check) if path} == programs
    for path in programs:
        compile(path.read_text(), str(path), "exec")


@NAMES
def test_the_requirements_pin_the_measured_versions(case: Case) -> None:
    lines = case.requirements.read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w-]+==[\d.]+", line)] == []
    versions = page.read()[case.name]["versions"]
    assert {name: versions[name] for name in (line.partition("==")[0] for line in lines)} == dict(
        line.split("==") for line in lines
    )


@NAMES
def test_a_finding_was_measured_and_names_the_version_of_its_package(case: Case) -> None:
    result = page.read()[case.name]
    if case.finding:
        assert all(set(case.finding.causes) & set(run["causes"]) for run in result["runs"].values())
        assert f"{case.package} {result['versions'][case.package]} " in case.finding.text
