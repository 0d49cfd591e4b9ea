"""The recipes: what people write is found out with its own cause first, and as it should be it is equivalent."""

from __future__ import annotations

from operator import attrgetter

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import ALSO_ASKED, RECIPES, AlsoAsked, Recipe
from tests.few import few

FEW = ("1x4", "2x2")
"""Of one host and of several hosts one topology each: benchmarks/features has the others."""
ONE_REPLICA_A_HOST = "K2"
"""Its batches are of plain tensors on `2x1`, as nowhere else."""
ASKED = (*RECIPES, *ALSO_ASKED)
FAST_ASKED = ("S1",)
"""Its cause no other fast test has."""
FAST = ("d1_own_loop",)
"""The cheapest of what they should be. tests/core proves what gpudist_core makes of them, on several hosts too."""
STEPS = 20
"""As many as show each cause, and the last, uneven batch of those that have one."""


def _few(topologies: tuple[str, ...]) -> list[str]:
    return [one for one in FEW if one in topologies] or [topologies[0]]


@pytest.mark.parametrize("recipe", few(RECIPES, FAST_ASKED, attrgetter("id")))
def test_what_people_write_is_found_out_with_its_own_cause_first(recipe: Recipe, preload: Preload) -> None:
    wanted = {_few(expected.topologies)[0]: expected for expected in recipe.expected}
    verdict = emulate.verify(recipe.as_asked, list(wanted), steps=STEPS, timeout=60, preload=preload)
    for run in verdict.runs:
        expected = wanted[run.topology]
        assert run.verdict in expected.verdicts, render(verdict)
        assert run.causes, render(verdict)
        assert run.causes[0].code == expected.cause, render(verdict)


@pytest.mark.parametrize("program", few(ASKED, FAST, attrgetter("name")))
def test_as_it_should_be_it_is_equivalent_and_nothing_is_advised(program: Recipe | AlsoAsked, preload: Preload) -> None:
    several = isinstance(program, Recipe) and program.id == ONE_REPLICA_A_HOST
    _check(program, ["2x1"] if several else _few(program.topologies)[-1:], preload)


@pytest.mark.slow
@pytest.mark.parametrize("program", [one for one in ASKED if _few(one.topologies)[1:]], ids=lambda program: program.name)
def test_for_several_hosts_it_is_equivalent_on_one_too(program: Recipe | AlsoAsked, preload: Preload) -> None:
    _check(program, _few(program.topologies)[:1], preload)


def _check(program: Recipe | AlsoAsked, topologies: list[str], preload: Preload) -> None:
    path = program.as_it_should_be if isinstance(program, Recipe) else program.path
    verdict = emulate.verify(path, topologies, steps=STEPS, timeout=60, preload=preload)
    for run in verdict.runs:
        assert (run.verdict, run.causes) == ("equivalent", ()), render(verdict)
        assert run.samples.reference == run.samples.seen > 0
