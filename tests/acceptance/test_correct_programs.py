"""Every correct program is equivalent on every topology that its strategy allows."""

from __future__ import annotations

from operator import attrgetter

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import PROGRAMS, Fixture
from tests.few import few

TELLING = ("2x2", "1x3")  # several hosts with several devices; else replicas that share unevenly

FAST = ("central_storage_loop", "exact_partial_batch", "hand_written_sgd", "ragged_dictionary")
"""What no other fast test has: test_scorecard.py has loops and `fit`, test_verification.py has multiworker_loop."""
FEW, ENOUGH = 6, 20
"""Steps of the fast test, and of one whose uneven batch is the last of its epoch; `make slow` makes all 20."""


def _telling(fixture: Fixture) -> str:
    return next(one for one in TELLING if one in fixture.topologies)


@pytest.mark.parametrize("fixture", few(PROGRAMS, FAST, attrgetter("name")))
def test_a_correct_program_is_equivalent_on_several_hosts_or_else_on_uneven_replicas(
    fixture: Fixture, preload: Preload
) -> None:
    _check(fixture, [_telling(fixture)], preload, ENOUGH if fixture.name == "exact_partial_batch" else FEW)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", PROGRAMS, ids=lambda fixture: fixture.name)
def test_a_correct_program_is_equivalent_on_every_topology_of_its_strategy(fixture: Fixture, preload: Preload) -> None:
    _check(fixture, list(fixture.topologies), preload, ENOUGH)


def _check(fixture: Fixture, topologies: list[str], preload: Preload, steps: int) -> None:
    verdict = emulate.verify(fixture.path, topologies, steps=steps, preload=preload)
    assert [run.verdict for run in verdict.runs] == ["equivalent"] * len(topologies) != [], render(verdict)
    assert verdict.exit_code == 0
    assert verdict.reference.repeatable
    for run in verdict.runs:
        assert run.steps == steps
        assert run.first_divergence is None
        assert run.samples.missing == run.samples.repeated == 0
        assert run.samples.reference == run.samples.seen > 0
