"""Every correct program is equivalent on every topology that its strategy allows."""

from __future__ import annotations

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import PROGRAMS, Fixture

TELLING = ("2x2", "1x3")  # several hosts with several devices; else replicas that share unevenly

LIKE_OTHERS = ("legacy_keras_loop",)  # each host imports Keras 2: one program of it is enough


def _telling(fixture: Fixture) -> str:
    return next(one for one in TELLING if one in fixture.topologies)


@pytest.mark.parametrize(
    "fixture",
    [pytest.param(one, id=one.name, marks=pytest.mark.slow if one.name in LIKE_OTHERS else ()) for one in PROGRAMS],
)
def test_a_correct_program_is_equivalent_on_several_hosts_or_else_on_uneven_replicas(
    fixture: Fixture, preload: Preload
) -> None:
    _check(fixture, [_telling(fixture)], preload)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", PROGRAMS, ids=lambda fixture: fixture.name)
def test_a_correct_program_is_equivalent_on_every_topology_of_its_strategy(fixture: Fixture, preload: Preload) -> None:
    _check(fixture, [one for one in fixture.topologies if one != _telling(fixture)], preload)


def _check(fixture: Fixture, topologies: list[str], preload: Preload) -> None:
    verdict = emulate.verify(fixture.path, topologies, preload=preload)
    assert [run.verdict for run in verdict.runs] == ["equivalent"] * len(topologies) != [], render(verdict)
    assert verdict.exit_code == 0
    assert verdict.reference.repeatable
    for run in verdict.runs:
        epoch = run.steps_run.epoch_batches or 0
        whole = epoch if 20 < epoch <= 50 else 20
        assert run.steps == whole if run.steps_run.stopped else 20 <= run.steps <= whole
        assert run.first_divergence is None
        assert run.samples.missing == run.samples.repeated == 0
        assert run.samples.reference == run.samples.seen > 0
