"""Every wrong program is found out, and its own cause comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import BUGS, Fixture

JUDGED = tuple(one for one in BUGS if one.verdicts != ("wrong-use",))  # test_verification.py has the other
CODES = {"by-design": 0, "unverified": 1, "divergent": 1, "failed": 3, "hung": 4}


def _topologies(fixture: Fixture) -> tuple[str, ...]:
    """One topology of several hosts and one of a single host, where the program applies to both."""
    wanted = ("2x2", "1x4")
    return tuple(one for one in wanted if one in fixture.topologies) or fixture.topologies[:1]


def _first_of_its_cause(fixture: Fixture) -> bool:
    """The others of a cause are longer proofs of the same."""
    return fixture.cause is None or fixture is next(one for one in JUDGED if one.cause == fixture.cause)


@pytest.mark.parametrize(
    "fixture",
    [pytest.param(one, marks=[] if _first_of_its_cause(one) else [pytest.mark.slow], id=one.name) for one in JUDGED],
)
def test_a_wrong_program_is_found_out_with_its_own_cause_first(fixture: Fixture, preload: Preload) -> None:
    _check(fixture, _topologies(fixture)[0], preload)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", [one for one in JUDGED if _topologies(one)[1:]], ids=lambda fixture: fixture.name)
def test_a_wrong_program_for_several_hosts_is_found_out_on_one_too(fixture: Fixture, preload: Preload) -> None:
    _check(fixture, _topologies(fixture)[1], preload)


def _check(fixture: Fixture, topology: str, preload: Preload) -> None:
    timeout = 15 if fixture.verdicts == ("hung",) else 60  # the first is waited for to its end
    verdict = emulate.verify(fixture.path, topology, timeout=timeout, preload=preload)
    for run in verdict.runs:
        assert run.verdict in fixture.verdicts, render(verdict)
        if fixture.cause is not None:
            assert run.causes, render(verdict)
            assert run.causes[0].code == fixture.cause, render(verdict)
            assert all((run.causes[0].summary, run.causes[0].evidence, run.causes[0].fix))
    assert verdict.exit_code in {CODES[one] for one in fixture.verdicts}
    assert replace(verdict, strict=True).exit_code in {CODES[one] or 1 for one in fixture.verdicts}


def test_adam_hides_a_wrong_scale_in_the_weights_and_it_is_found_in_the_gradients(preload: Preload) -> None:
    fixture = next(one for one in BUGS if one.name == "loss_scaling_adam")
    (run,) = emulate.verify(fixture.path, "1x4", preload=preload).runs
    assert run.first_divergence is not None
    assert run.first_divergence.kind == "gradient"
    assert run.first_divergence.step == 0
    assert run.causes[0].code == "loss-scaling"
