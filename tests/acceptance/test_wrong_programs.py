"""Every wrong program is found out, and its own cause comes first."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import BUGS, Fixture
from tests.few import few

JUDGED = tuple(one for one in BUGS if one.verdicts != ("wrong-use",))  # test_verification.py has the other
CODES = {"by-design": 0, "unverified": 1, "divergent": 1, "failed": 3, "hung": 4}
FEW = 6
"""Steps that show most causes; `make slow` verifies each program with the default."""
LATE = (
    "empty_shard",
    "file_order",
    "nan",
    "samples_missing",
    "samples_missing_multiworker",
    "uneven_batch",
    "uneven_batch_average_loss",
)
"""Programs that go wrong after that: in the last batch of an epoch, in another file."""
FAST = (
    "collective_order",
    "cross_replica_tensor",
    "empty_shard",
    "framework_limit_accumulation",
    "hangs",
    "host_exited",
    "nan",
    "unseeded_randomness",
)
"""Causes that no other fast test has: test_scorecard.py, test_lines.py and test_own_*.py have others; `make slow` has all."""


def _topologies(fixture: Fixture, *wanted: str) -> tuple[str, ...]:
    """Those of the wanted ones that the program applies to."""
    return tuple(one for one in wanted if one in fixture.topologies) or fixture.topologies[:1]


@pytest.mark.parametrize("fixture", few(JUDGED, FAST, attrgetter("name")))
def test_a_wrong_program_is_found_out_with_its_own_cause_first(fixture: Fixture, preload: Preload) -> None:
    shows_early = fixture.verdicts == ("divergent",)
    steps = {} if fixture.name in LATE else {"steps": FEW if shows_early else 20}
    _check(fixture, _topologies(fixture, "2x2", "1x2")[:1], preload, **steps)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", JUDGED, ids=lambda fixture: fixture.name)
def test_a_wrong_program_is_found_out_with_the_default_steps_and_on_one_host_too(fixture: Fixture, preload: Preload) -> None:
    _check(fixture, _topologies(fixture, "2x2", "1x4"), preload)


def _check(fixture: Fixture, topologies: tuple[str, ...], preload: Preload, **steps: int) -> None:
    timeout = 10 if fixture.verdicts == ("hung",) else 60  # the first is waited for to its end
    verdict = emulate.verify(fixture.path, topologies, timeout=timeout, preload=preload, **steps)
    for run in verdict.runs:
        assert run.verdict in fixture.verdicts, render(verdict)
        if fixture.cause is not None:
            assert run.causes, render(verdict)
            assert run.causes[0].code == fixture.cause, render(verdict)
            assert all((run.causes[0].summary, run.causes[0].evidence, run.causes[0].fix))
    assert verdict.exit_code in {CODES[one] for one in fixture.verdicts}
    assert replace(verdict, strict=True).exit_code in {CODES[one] or 1 for one in fixture.verdicts}


@pytest.mark.slow  # emulate/verify/test_causes_of_steps.py has the cause with Adam, on made traces
def test_adam_hides_a_wrong_scale_in_the_weights_and_it_is_found_in_the_gradients(preload: Preload) -> None:
    fixture = next(one for one in BUGS if one.name == "loss_scaling_adam")
    (run,) = emulate.verify(fixture.path, "1x4", steps=2, preload=preload).runs
    assert run.first_divergence is not None
    assert run.first_divergence.kind == "gradient"
    assert run.first_divergence.step == 0
    assert run.causes[0].code == "loss-scaling"
