"""The catalogue of causes: every one is explained, and unknown ones are refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from emulate.errors import UsageError
from emulate.report import Page
from emulate.verify import causes
from emulate.verify.case import Case
from emulate.verify.causes import catalogue
from emulate.verify.causes import cause as cause_module
from emulate.verify.causes.cause import GENERAL, TEXTS, Sign, parse_text, plain_text
from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of
from tests.emulate.verify.simulation import Problem


def test_every_cause_says_what_it_means_how_it_is_recognized_and_what_to_do() -> None:
    found = causes.all_causes()
    assert len({cause.code for cause in found}) == len(found)
    assert {path.stem for path in TEXTS.glob("*.md")} == {cause.code for cause in found}
    for cause in found:
        assert cause.code == cause.code.lower().replace("_", "-")
        assert cause.url == f"https://gpudist.readthedocs.io/en/latest/causes/{cause.code}.html"
        for text in (cause.text.title, cause.text.meaning, cause.text.evidence, cause.text.fixes[GENERAL]):
            assert len(text) > 10


def test_a_cause_is_one_function_one_text_and_one_row_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CONTRIBUTING tells how to add one."""
    text = "# Made up\n\nWhat it is.\n\n## How gpudist recognizes it\n\nBy a test.\n\n## How to fix it\n\nDelete the test.\n"
    (tmp_path / "made-up.md").write_text(text)
    monkeypatch.setattr(cause_module, "TEXTS", tmp_path)
    made_up = causes.Cause("made-up", lambda case: Sign("It is seen.", "4 replicas") if case.num_replicas == 4 else None)
    monkeypatch.setattr(catalogue, "_GROUPS", (*catalogue._GROUPS, causes.Group((made_up,))))
    folder, problem = Folder(tmp_path / "traces"), Problem(steps=2)
    noise = folder.noise(problem)
    for replicas in (2, 4):
        found = judge(case_of(folder.trained(problem), folder.trained(problem, replicas), noise)).causes
        assert [(one.code, one.summary, one.evidence, one.fix) for one in found] == [
            ("made-up", "It is seen.", "4 replicas", "Delete the test.")
        ] * (replicas == 4)


def test_a_sign_without_words_that_changes_nothing_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hides others is put out of the way as long as that shows something new."""
    asked: list[Case] = []
    empty = causes.Cause("loss-scaling", lambda case: Sign(then=lambda: asked.append(case)))
    monkeypatch.setattr(catalogue, "_GROUPS", (causes.Group((empty,)), *catalogue._GROUPS))
    folder, problem = Folder(tmp_path), Problem(steps=2)
    found = judge(case_of(folder.trained(problem), folder.trained(problem, 2), folder.noise(problem)))
    assert (found.verdict, len(asked)) == ("equivalent", 1)


@pytest.mark.parametrize("cause", causes.all_causes(), ids=lambda cause: cause.code)
def test_a_text_and_its_code_fit_into_80_columns_of_a_report(cause: causes.Cause) -> None:
    page = Page(80)
    for fix in cause.text.fixes.values():
        page.labelled("fix", plain_text(fix), 5, 15)
    for markdown in (cause.text.meaning, cause.text.evidence):
        page.text(plain_text(markdown), 2)
    for code in (cause.text.wrong, cause.text.right):
        page.verbatim(code, 4)
    assert [line for line in page.plain().splitlines() if len(line) > 80] == []


def test_each_fix_that_a_cause_chooses_stands_in_its_file_and_each_in_a_file_is_chosen() -> None:
    chosen = {
        node.value
        for path in Path(causes.__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    }
    written = {heading for cause in causes.all_causes() for heading in cause.text.fixes} - {GENERAL}
    assert written <= chosen


@pytest.mark.parametrize(
    ("markdown", "said"),
    [
        ("No title\n", "in this order. Received: 'No title', []"),
        ("# A title\n## How to mend it\n", "['How to mend it']"),
        ("# A title\n## How to fix it\n## How gpudist recognizes it\n", "['How to fix it', 'How gpudist recognizes it']"),
    ],
)
def test_a_text_with_other_sections_is_refused(markdown: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said + ".")):
        parse_text(markdown)


def test_a_cause_that_is_unknown_is_refused_with_the_nearest_one() -> None:
    assert causes.get("loss-scaling").code == "loss-scaling"
    with pytest.raises(UsageError) as refused:
        causes.get("loss-scalling")
    assert str(refused.value) == (
        "A cause must be one of the catalogue. Received: code='loss-scalling'. "
        "Did you mean 'loss-scaling'? `gpudist causes` lists all."
    )


@pytest.mark.parametrize(
    ("heading", "function"), [("clipnorm", "clip_by_norm"), ("clipvalue", "clip_by_value"), (GENERAL, "clip_by_global_norm")]
)
def test_the_fix_of_clipping_clips_in_the_way_of_the_option(heading: str, function: str) -> None:
    assert causes.get("clip-before-reduce").text.fixes[heading].count(f"tf.{function}(") == 1


def test_no_fix_sums_a_count_of_32_bits_which_collectives_of_gpus_refuse() -> None:
    for path in sorted(Path(causes.__file__).parent.rglob("*.md")):
        assert not re.search(r"ReduceOp\.\w+, tf\.(shape|size)\(", path.read_text()), path.name
