"""A certificate's tolerances come from pairs of runs that differ by rounding alone, and its examples from every replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.certify import Evidence, certify
from emulate.verify.compare import compare
from emulate.verify.verdict import Finding, Run
from gpudist_core.certificates import Certificate, examples_of
from tests.emulate.verify.cases import Folder, case_of, loop
from tests.emulate.verify.made_traces import Made

LOCALS = np.random.default_rng(0).normal(size=(3, 2, 128)).astype("f4")
BATCH = np.random.default_rng(1).normal(size=(3, 4, 5)).astype("f4")
SIZES = ((2, 2), (2, 2), (1, 0))
"""How many examples each replica has in each step."""

IN_16_BITS = 2.0**-8
"""Half a unit in the last place of bfloat16."""


def trace(folder: Folder, topology: str, scale: float = 1.0, unit: float = 2.0**-23, seed: int = 0) -> Trace:
    """A run whose gradients are rounded by `unit`. That of b is nothing else."""
    made, random = folder.made(topology), np.random.default_rng(seed)

    def step(made: Made, k: int) -> None:
        parts = [LOCALS[k, 0], LOCALS[k, 1]] if topology == "1x2" else [LOCALS[k].sum(axis=0)]
        for replica, part in enumerate(parts):
            rounded = (part * scale * (1 + unit * random.normal(size=128))).astype("f4")
            rounded = (rounded.view("u4") & (0xFFFF0000 if unit == IN_16_BITS else 0xFFFFFFFF)).astype("u4").view("f4")
            gradients = {
                "w": rounded.astype("f4"),
                "v": rounded[::2].astype("f4"),
                "b": unit * random.normal(size=4).astype("f4"),
            }
            first = replica * SIZES[k][0]
            rows = slice(first, first + SIZES[k][replica]) if topology == "1x2" else slice(0, sum(SIZES[k]))
            names = [f"row-{k}-{number}" for number in range(4)][rows]
            weights = {name: np.ones(array.shape, "f4") for name, array in gradients.items()}
            made.step(k, gradients, weights, replica=replica, rows=names, inputs=[BATCH[k, rows]], objective=1.0)

    run = loop(made, step)
    Trace.describe(run.directory, {"topology": topology, "program": "train.py", "seed": 0, "versions": {}})
    return Trace(run.directory)


def test_a_replica_without_examples_is_part_of_the_batch(folder: Folder, tmp_path: Path) -> None:
    case = case_of(trace(folder, "1x1"), trace(folder, "1x2"), [trace(folder, "1x1", seed=1)])
    note = certify(Evidence(case, case.topology), Run("1x2", "equivalent"), tmp_path / "train.npz")
    assert "the examples" not in note
    written = Certificate.read(tmp_path / "train.npz")
    assert written.examples.tolist() == [examples_of([BATCH[k, : sum(SIZES[k])]]).tolist() for k in range(3)]


def test_16_bits_have_the_noise_that_was_measured(folder: Folder, tmp_path: Path) -> None:
    reference, topology = (trace(folder, place, unit=IN_16_BITS) for place in ("1x1", "1x2"))
    case = case_of(reference, topology, [trace(folder, "1x1", unit=IN_16_BITS, seed=1)])
    note = certify(Evidence(case, case.topology), Run("1x2", "equivalent"), tmp_path / "train.npz")
    assert "It does not cover the gradient of b in step 0, 1, 2 (rounding alone may change it by more than 5%)" in note
    written = Certificate.read(tmp_path / "train.npz")
    assert np.isfinite(written.projections[:, 0]).all()
    assert (written.tolerances(0, "float32") < 30 * IN_16_BITS * written.norms[0])[0]


@pytest.mark.parametrize("allowed", [False, True])
def test_batchnorm_has_the_noise_of_runs_that_normalize_alike(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    whole, topology = trace(folder, "1x1", scale=1.3), trace(folder, "1x2")
    by_share: Any = compare(trace(folder, "1x1", seed=2), topology, [trace(folder, "1x1", seed=1)])
    case = case_of(whole, topology)
    monkeypatch.setattr(case, "normalize_alike", lambda: ("batchnorm-by-share", by_share))
    cause = Finding("batchnorm-local-statistics", "", "", "", by_design=True, allowed=allowed)
    run = Run("1x2", "equivalent" if allowed else "by-design", causes=(cause,))
    assert "the gradient of b in step 0, 1, 2" in certify(Evidence(case, topology), run, tmp_path / "train.npz")
    written = Certificate.read(tmp_path / "train.npz")
    assert (written.noise[:, 0] < 2e-6 * written.norms[:, 0]).all()


def test_without_two_runs_that_differ_by_rounding_there_is_no_certificate(folder: Folder, tmp_path: Path) -> None:
    case = case_of(trace(folder, "1x1"), trace(folder, "1x2"))
    note = certify(Evidence(case, case.topology), Run("1x2", "by-design"), tmp_path / "train.npz")
    assert note == "No certificate was written: no two runs show what rounding alone makes of its gradients."
