"""The tests that the guide to pytest shows pass, run as a user runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from docs.examples import PRELUDE, ROOT, programs


def test_the_tests_of_the_guide_pass(run: Callable[..., pytest.RunResult], suite: pytest.Pytester) -> None:
    program = (ROOT / "fixtures" / "tutorial" / "train_fixed.py").read_text()
    (suite.path / "train.py").write_text(program.replace("tf.distribute.MirroredStrategy()", "gd.make_strategy()"))
    run(PRELUDE + programs()["docs/guides/pytest.md"]).assert_outcomes(passed=4)
