"""A sample of the scorecard is judged rightly, and the scorecard itself can fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import emulate
from benchmarks.scorecard import cells, table
from benchmarks.scorecard.__main__ import jobs
from benchmarks.scorecard.cells import Job, Result, assess, judge_all
from benchmarks.scorecard.corpus import Answer, Entry, corpus, read
from benchmarks.scorecard.fixes import with_fixes
from benchmarks.scorecard.generated import LOOP_BUGS, Spec, drawn
from benchmarks.scorecard.partners import partners
from emulate.cluster import Preload
from emulate.report import render
from fixtures.corpus.index import marked_lines

SAMPLE = (
    "right_mlp_loop 2x2",
    "right_mlp_eager 1x3",
    "right_mlp_fit 1x3",
    "right_dropout_fit 1x2",
    "wrong_augmented_alike 2x1",
    "wrong_chief_evaluates 2x1",
    "wrong_counter_of_batches 1x4",
    "wrong_mean_by_strategy 1x4",
    "wrong_mean_legacy 1x2",
    "wrong_not_sharded 2x1",
    "wrong_plateau_of_a_maximum 1x2",
    "wrong_sharded_twice 2x1",
    "wrong_shuffled_per_host 2x1",
    "wrong_summed_twice_on_hosts 2x1",
    "wrong_weight_decay_by_hand 1x4",
    "wrong_weights_of_one_replica 1x2",
)
"""The cheapest programs that together have `fit`, compiled and eager loops, one host and several, and tf_keras.

The command judges one more. No cause is in test_wrong_programs.py or test_lines.py as well, except in what `make slow` judges.
"""
DEARER = ("wrong_synchronized_pixels 1x4", "wrong_synchronized_uneven_fit 1x4")
PROGRAMS = [entry for entry in corpus() if entry.group == "corpus"]


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cells, "KEPT", tmp_path)


def _job(name: str) -> tuple[Job, str]:
    program, topology = name.split()
    (entry,) = (one for one in PROGRAMS if one.name == program)
    return Job(replace(entry, topologies=(topology,))), topology


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in DEARER)])
def test_a_program_of_the_sample_is_judged_rightly(
    name: str, preload: Preload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, topology = _job(name)
    monkeypatch.chdir(tmp_path)
    verdict = emulate.verify(job.entry.path, topology, preload=preload)
    seen = verdict.to_json()
    result = assess(job, topology, {**seen["runs"][0], "starts": seen["program_starts"], "plain": None})
    assert result.is_well_judged, render(verdict)
    assert result.line_right is not False, render(verdict)


def test_a_program_is_judged_by_the_command_and_not_again_while_nothing_changes(
    nothing_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = _job("wrong_metric_in_replica 1x4")
    monkeypatch.setattr(cells, "plain", lambda entry: 1.0)  # the program alone is timed, which no judgement depends on
    (result,) = judge_all([job])
    assert result.is_well_judged, result
    assert result.line_right is not False, result
    assert result.starts is not None
    assert result.starts >= 2
    monkeypatch.setattr(cells, "verify", None)
    assert judge_all([job]) == [result]


def test_the_corpus_has_the_programs_and_cells_that_the_docs_claim() -> None:
    right, wrong = ([one for one in PROGRAMS if one.answer.is_right is is_right] for is_right in (True, False))
    assert len({one.path for one in right}) >= 50
    assert len({one.path for one in wrong}) >= 40
    assert sum(len(one.topologies) for one in right) >= 160
    assert all(one.source for one in wrong)
    assert len(drawn()) == 100


def test_every_wrong_program_marks_the_line_that_is_to_blame() -> None:
    assert [one.name for one in PROGRAMS if not one.answer.is_right and not one.answer.lines] == []
    assert [one.name for one in PROGRAMS if one.answer.is_right and one.answer.lines] == []


def test_each_wrong_program_has_a_partner_and_one_that_is_accused_is_a_false_alarm(tmp_path: Path) -> None:
    wrong = {one.name for one in PROGRAMS if not one.answer.is_right}
    written = partners(tmp_path)
    assert {one.name.removeprefix("partner/") for one in written} == wrong
    judged = {"verdict": "divergent", "causes": [], "seconds": 1.0, "plain": None}
    assert all(assess(Job(one), topology, judged).false_alarm for one in written for topology in one.topologies)


def test_a_partner_that_differs_by_its_bug_alone_is_not_accused(
    preload: Preload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (partner,) = (one for one in partners(tmp_path) if one.name == "partner/wrong_plateau_of_a_maximum")
    monkeypatch.chdir(tmp_path)
    verdict = emulate.verify(partner.path, "1x2", preload=preload)
    assert verdict.runs[0].verdict in partner.answer.verdicts, render(verdict)


def test_cells_have_names_of_their_own() -> None:
    names = Counter(name for job in jobs() for name in job.names.values())
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("On: 1x4", "without ['Cause', 'Source']"),
        ("Cause: loss-scaling\nSource: x", "without ['On']"),
    ],
)
def test_a_wrong_program_that_does_not_tell_its_answer_is_refused(head: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong_it.py"
    path.write_text(f'"""A program.\n\n{head}\n"""\n')
    with pytest.raises(ValueError, match="must tell") as raised:
        read(path)
    assert message in str(raised.value)


JOB = Job(Entry("it", Path(__file__), ("1x4",), Answer(("divergent",), ("loss-scaling",), (7,))))


def _assessed(verdict: str, *codes: str, line: int | None = None, job: Job = JOB) -> Result:
    location = None if line is None else {"line": line}
    causes = [{"code": code, "allowed": False, "location": location} for code in codes]
    return assess(job, "1x4", {"verdict": verdict, "causes": causes, "starts": 3, "seconds": 2.0, "plain": 1.0})


@pytest.mark.parametrize(
    ("result", "is_well_judged", "line_right"),
    [
        (_assessed("divergent", "loss-scaling", line=7), True, True),
        (_assessed("divergent", "loss-scaling", line=8), True, False),
        (_assessed("divergent", "loss-scaling"), True, False),
        (_assessed("equivalent"), False, False),
        (_assessed("divergent", "unexplained"), False, False),
        (_assessed("divergent", "uneven-batch", "loss-scaling"), False, False),
        (_assessed("divergent", "loss-scaling", "uneven-batch"), False, False),
        (_assessed("divergent", "loss-scaling", "identical-dropout"), True, False),
    ],
)
def test_a_wrong_program_is_well_judged_where_it_is_found_named_and_accused_of_nothing_else(
    result: Result, is_well_judged: bool, line_right: bool
) -> None:
    assert (result.is_well_judged, result.line_right) == (is_well_judged, line_right)


@pytest.mark.parametrize(("verdict", "is_false_alarm"), [("equivalent", False), ("divergent", True), ("unverified", True)])
def test_a_right_program_that_is_not_called_equivalent_is_a_false_alarm(verdict: str, is_false_alarm: bool) -> None:
    right = replace(JOB, entry=replace(JOB.entry, answer=Answer(("equivalent",))))
    assert _assessed(verdict, job=right).false_alarm is is_false_alarm


def test_what_was_right_before_and_is_wrong_now_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "STORED", tmp_path / "stored.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    table.store([_assessed("divergent", "loss-scaling", line=7)], ["it 1x4", "another 1x4"])
    assert table.worse_than_stored([_assessed("divergent", "loss-scaling", line=7)]) == []
    assert table.worse_than_stored([_assessed("divergent", "unexplained")]) == [
        "it 1x4: well judged before, now divergent unexplained",
        "it 1x4: line right before, now divergent unexplained",
    ]
    text = (tmp_path / "table.md").read_text()
    assert "1 of 1" in text
    assert "1 cells of the scorecard have not been judged yet." in text
    table.store([], ["it 1x4"])
    assert table.stored() == {"it 1x4": _assessed("divergent", "loss-scaling", line=7)}


def test_what_a_fix_made_of_a_cell_stays_until_a_fix_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "STORED", tmp_path / "stored.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "table.md")
    judged = _assessed("divergent", "loss-scaling", line=7)
    [fixed] = with_fixes([judged], {judged.name: (True, 2)})
    table.store([fixed], ["it 1x4"])
    table.store([judged], ["it 1x4"])
    assert table.stored()["it 1x4"] == fixed
    assert "| 1 of 1 (2) |" in (tmp_path / "table.md").read_text()
    assert table.worse_than_stored([judged]) == []
    [worse] = with_fixes([judged], {judged.name: (False, 3)})
    assert table.worse_than_stored([worse]) == ["it 1x4: fixed before, now divergent loss-scaling"]


def test_the_docs_show_the_stored_figures() -> None:
    stored = table.stored()
    names = [name for job in jobs() for name in job.names.values()]
    assert set(stored) <= set(names)
    assert table.PAGE.read_text() == table.markdown(
        [stored[name] for name in names if name in stored], len(names) - len(stored)
    )


@pytest.mark.parametrize("bug", LOOP_BUGS)
def test_a_composed_program_marks_the_line_of_its_bug_and_is_python(bug: str) -> None:
    spec = Spec(bugs=(bug,), weights=bug == "local-normalization", l2=True, clip=bug == "clip-before-reduce")
    compile(spec.text, "composed", "exec")
    assert len(marked_lines(spec.text)) == 1
    assert marked_lines(replace(spec, bugs=()).text) == ()
