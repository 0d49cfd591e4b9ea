"""The verdicts that README and documentation show are what is printed, and those of the gallery are what is expected."""

from __future__ import annotations

from operator import attrgetter

import pytest

import emulate
from docs.outputs import OUTPUTS, ROOT, Output, comparable
from emulate.cluster import Preload
from emulate.report import render
from fixtures.manifest import GALLERY, Published
from tests.few import few

WRONG = {str(one.as_published.relative_to(ROOT)): one for one in GALLERY}


# README shows this one.
@pytest.mark.parametrize("output", few(OUTPUTS, ("tutorial",), attrgetter("name")))
def test_what_the_documentation_shows_is_printed(output: Output, preload: Preload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    verdict = output.verify(preload=preload)
    assert comparable(output.file.read_text()) == comparable(output.render(verdict))
    if output.program in WRONG:
        (run,) = verdict.runs
        assert run.causes[0].code == WRONG[output.program].cause


def test_the_documentation_shows_what_gpudist_says_of_each_program_of_the_gallery() -> None:
    assert WRONG.keys() <= {output.program for output in OUTPUTS}


@pytest.mark.slow
@pytest.mark.parametrize("published", GALLERY, ids=lambda published: published.name)
def test_a_program_of_the_gallery_is_equivalent_with_its_fix(published: Published, preload: Preload) -> None:
    verdict = emulate.verify(published.fixed, published.topology, preload=preload)
    assert [(run.verdict, run.causes) for run in verdict.runs] == [("equivalent", ())], render(verdict)
