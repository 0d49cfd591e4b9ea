"""assert_equivalent passes in silence or fails with the whole report."""

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
