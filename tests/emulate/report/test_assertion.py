"""assert_equivalent passes, passes with a warning, or fails with the whole report."""

import re
from dataclasses import replace

import pytest

import emulate
import emulate.verify
from emulate.report import render


def test_an_equivalent_program_passes(made, monkeypatch):
    calls = []

    def verify(*args, **options):
        calls.append((args, options))
        return made.verdict(made.equivalent())

    monkeypatch.setattr(emulate.verify, "verify", verify)
    emulate.assert_equivalent("train.py", "2x2", steps=5)
    assert calls == [(("train.py", "2x2"), {"steps": 5})]


def test_a_divergent_program_fails_with_the_report(made, monkeypatch):
    verdict = made.verdict(made.equivalent("1x2"), made.divergent("1x4"))
    monkeypatch.setattr(emulate.verify, "verify", lambda *_, **__: verdict)
    with pytest.raises(AssertionError) as caught:
        emulate.assert_equivalent("train.py")
    assert str(caught.value) == render(verdict)


def test_a_program_that_differs_by_design_alone_passes_with_a_warning_unless_strict(made, monkeypatch):
    differs = made.divergent("1x4", causes=[made.batchnorm], verdict="by-design")
    verdict = made.verdict(made.equivalent("1x2"), differs)
    monkeypatch.setattr(emulate.verify, "verify", lambda *_, strict=False, **__: replace(verdict, strict=strict))
    said = "only by design of TensorFlow and Keras: batchnorm-local-statistics on 1x4. strict=True makes it fail."
    with pytest.warns(emulate.ByDesignWarning, match=re.escape(said)) as warned:
        emulate.assert_equivalent("train.py")
    assert warned[0].filename == __file__
    with pytest.raises(AssertionError, match="1x4  by-design: only batchnorm-local-statistics"):
        emulate.assert_equivalent("train.py", strict=True)


@pytest.mark.parametrize(
    ("verdicts", "code", "strict_code"),
    [
        (["equivalent"], 0, 0),
        (["equivalent", "by-design"], 0, 1),
        (["by-design", "unavailable"], 5, 1),
        (["by-design", "divergent"], 1, 1),
        (["by-design", "hung"], 4, 4),
        (["by-design", "failed", "hung"], 3, 3),
    ],
)
def test_by_design_counts_as_0_and_strict_as_1(made, verdicts, code, strict_code):
    runs = [made.equivalent(f"1x{at + 2}", verdict=verdict) for at, verdict in enumerate(verdicts)]
    lenient, strict = made.verdict(*runs), made.verdict(*runs, strict=True)
    assert (lenient.exit_code, strict.exit_code) == (code, strict_code)
    assert (lenient.is_equivalent, strict.is_equivalent) == (code == 0, strict_code == 0)
