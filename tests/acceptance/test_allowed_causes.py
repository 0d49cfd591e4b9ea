"""`--allow CODE` covers what it names: another cause beside it decides."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

JOINED = Path(__file__).parents[2] / "fixtures" / "everyday_cases" / "files_joined_with_a_range.py"


def of_joined(by: str, folder: Path, patch: pytest.MonkeyPatch, preload: Preload) -> emulate.Verdict:
    patch.chdir(folder)
    return emulate.verify(JOINED, "2x1", args=[by], allow=["samples-reordered"], preload=preload)


def test_examples_that_auto_sharding_loses_are_missing_where_another_order_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: Preload
) -> None:
    verdict = of_joined("concatenate", tmp_path, monkeypatch, preload)
    (run,) = verdict.runs
    assert (run.verdict, run.deciding, verdict.exit_code) == ("divergent", ("samples-missing",), 1), render(verdict)
    assert (run.samples.reference, run.samples.missing) == (64, 16)
    assert "AutoShardPolicy.DATA" in run.causes[0].fix


def test_examples_that_auto_sharding_pairs_wrongly_are_said_to_be_with_the_policy_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: Preload
) -> None:
    verdict = of_joined("zip", tmp_path, monkeypatch, preload)
    (cause,) = verdict.runs[0].causes
    assert cause.code == "samples-missing", render(verdict)
    assert "8 examples are paired wrongly" in cause.evidence
    assert "auto_shard_policy = (\n        tf.data.experimental.AutoShardPolicy.DATA" in cause.fix
    assert "Shard once" not in cause.fix
