"""The net of everyday programs draws what people write: different, right programs in which pairs of choices occur."""

from __future__ import annotations

import ast
from dataclasses import asdict, replace
from itertools import combinations

import pytest

from benchmarks.everyday.__main__ import is_wrong, job, summary
from benchmarks.everyday.choices import BUGS, CHOICES, Program, draw, go_together, pairs, simpler
from benchmarks.everyday.text import text
from benchmarks.scorecard import cells
from benchmarks.scorecard.cells import assess

PROGRAMS = draw(40, 1)


def test_programs_differ_and_keep_the_rules() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert all(go_together(asdict(program)) for program in PROGRAMS)


def test_the_same_seed_draws_the_same_programs_and_another_one_others() -> None:
    assert draw(5, 1) == PROGRAMS[:5]
    assert not set(draw(5, 2)) & set(PROGRAMS)


def test_few_programs_hold_many_pairs_and_every_choice() -> None:
    held = set().union(*map(pairs, PROGRAMS))
    all_pairs = sum(len(CHOICES[a]) * len(CHOICES[b]) for a, b in combinations(CHOICES, 2))
    assert len(held) > all_pairs / 3
    assert {(name, value) for name in CHOICES for value in CHOICES[name]} <= {item for pair in held for item in pair}


def test_each_program_is_python() -> None:
    for program in PROGRAMS:
        ast.parse(text(program))


def test_a_wrong_program_has_one_bug_with_its_line() -> None:
    for program in draw(20, 1, bugs=True):
        assert program.bug in BUGS[program.style]
        assert job(program).entry.answer.lines


def test_a_simpler_program_differs_by_one_choice() -> None:
    for program in PROGRAMS[:5]:
        for simple in simpler(program):
            assert sum(getattr(simple, name) != getattr(program, name) for name in CHOICES) == 1


@pytest.mark.parametrize(
    ("verdict", "codes", "noise", "wrong"),
    [
        ("equivalent", [], "none", False),
        ("divergent", ["loss-scaling"], "none", True),
        ("unverified", [], "none", True),
        ("by-design", ["identical-dropout"], "dropout", False),
        ("by-design", ["batchnorm-local-statistics"], "dropout", True),
    ],
)
def test_what_is_not_known_by_construction_counts_as_wrong(verdict: str, codes: list[str], noise: str, wrong: bool) -> None:
    program = replace(Program(), noise=noise)
    causes = [{"code": code, "allowed": False, "location": None} for code in codes]
    result = assess(job(program), "1x2", {"verdict": verdict, "causes": causes, "seconds": 1.0, "plain": None, "starts": 2})
    assert is_wrong(program, [result]) == wrong
    assert summary([(program, [result])])["wrong"] == int(wrong)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(cells, "KEPT", folder)
    monkeypatch.setattr("benchmarks.everyday.__main__.FOLDER", folder / "everyday")
