"""Runs that take files from each other: the difference is told of them only where a run has read what another wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import judge
from emulate.verify.result import Met, Outcome
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import LOCALS, ROWS, hand_made, right_reference, right_topology, weights_after
from tests.emulate.verify.made_traces import Made

PATH = "/data/ckpts/model.weights.h5"
FOUND, READ_BACK, WRITTEN = Met(found=(PATH,), written=(PATH,)), Met(read_back=(PATH,), written=(PATH,)), Met(written=(PATH,))


def begun_elsewhere(folder: Folder, steps: int = 3) -> Trace:
    """A run on one device that begins with other weights."""
    made = folder.made()
    made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": 1, "local": 1})
    made.initial({"w": np.full(128, 7, "f4")})
    for k in range(steps):
        right_reference(made, k)
    return made.trace()


def drifted(folder: Folder) -> Trace:
    """One that does the same with other gradients."""

    def other(made: Made, k: int) -> None:
        made.step(k, {"w": 2 * LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, rows=ROWS[8 * k : 8 * k + 8], objective=1.0)

    return loop(folder.made(), other)


def test_where_runs_meet_is_what_both_use_and_who_was_first() -> None:
    read = {"/a": False, "/b": True, "/c": False}
    assert Met.of(read, ["/b", "/d"], {"/a", "/b", "/d"}) == Met(("/a",), ("/b",), ("/b", "/d"))
    both = Met.together([Met(read_back=("/a",)), Met(found=("/b", "/a"), written=("/c",))])
    assert (both.read, both.paths) == (("/b", "/a"), ("/b", "/a", "/c"))


def test_a_reference_that_begins_with_what_another_run_left_is_unverified(folder: Folder) -> None:
    found = judge(
        hand_made(folder, right_topology, repeat=lambda: begun_elsewhere(folder), met_alone=lambda: [Met(), FOUND], met=FOUND)
    )
    assert (found.verdict, codes(found), found.first_divergence) == ("unverified", ["shared-files"], None)
    assert PATH in found.causes[0].summary
    assert "two runs on one device with the same seed differ in the initial weights" in found.causes[0].evidence
    assert "Use a relative path" in found.causes[0].fix
    assert any("shared-files" in text for text in found.not_compared)


@pytest.mark.parametrize("met", [Met(), WRITTEN, READ_BACK])
def test_what_is_only_written_or_read_back_explains_no_other_beginning(folder: Folder, met: Met) -> None:
    found = judge(
        hand_made(folder, right_topology, repeat=lambda: begun_elsewhere(folder), met_alone=lambda: [met] * 2, met=FOUND)
    )
    assert (found.verdict, codes(found)[0]) == ("divergent", "unseeded-randomness")


@pytest.mark.parametrize(("met", "code"), [(READ_BACK, "shared-files"), (WRITTEN, "unseeded-randomness")])
def test_what_is_read_back_explains_what_comes_later(folder: Folder, met: Met, code: str) -> None:
    found = judge(hand_made(folder, right_topology, repeat=lambda: drifted(folder), met_alone=lambda: [met] * 2, met=met))
    assert codes(found)[0] == code


def test_noise_runs_that_begin_with_what_another_run_left_are_no_yardstick(folder: Folder) -> None:
    repeat = loop(folder.made(), right_reference)
    found = judge(
        hand_made(
            folder,
            right_topology,
            repeat=lambda: repeat,
            noise=[begun_elsewhere(folder)],
            met_alone=lambda: [Met(), Met(), FOUND],
            met=FOUND,
        )
    )
    assert (found.verdict, codes(found)) == ("unverified", ["shared-files"])


@pytest.mark.parametrize("apart", ["weights", "steps"])
def test_a_topology_that_begins_with_what_another_run_left_is_unverified(folder: Folder, apart: str) -> None:
    repeat, reference = loop(folder.made(), right_reference), loop(folder.made(), right_reference)
    topology = begun_elsewhere(folder) if apart == "weights" else loop(folder.made("1x4"), right_topology, steps=1)
    found = judge(case_of(reference, topology, repeat=lambda: repeat, met=FOUND))
    assert (found.verdict, codes(found)) == ("unverified", ["shared-files"])
    harmless = judge(case_of(reference, topology, repeat=lambda: repeat, met_alone=lambda: [Met(), FOUND], met=FOUND))
    assert "shared-files" not in codes(harmless)


def test_a_found_file_explains_no_wrong_gradient_where_all_runs_begin_alike(folder: Folder) -> None:
    def wrong(made: Made, k: int) -> None:
        for r in range(4):
            rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
            made.step(k, {"w": 4 * LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=1.0)

    repeat = loop(folder.made(), right_reference)
    found = judge(hand_made(folder, wrong, repeat=lambda: repeat, met_alone=lambda: [Met(), FOUND], met=FOUND))
    assert (found.verdict, codes(found)[0]) == ("divergent", "loss-scaling")
    right = judge(hand_made(folder, right_topology, repeat=lambda: repeat, met_alone=lambda: [Met(), FOUND], met=FOUND))
    assert (right.verdict, codes(right)) == ("equivalent", [])


def test_allowed_it_leaves_what_else_there_is_to_be_told(folder: Folder) -> None:
    case = hand_made(
        folder, right_topology, repeat=lambda: begun_elsewhere(folder), met_alone=lambda: [Met(), FOUND], met=FOUND
    )
    found = judge(case, ["shared-files"])
    assert (found.verdict, codes(found)[:2]) == ("divergent", ["shared-files", "unseeded-randomness"])


@pytest.mark.parametrize(
    ("failure", "is_told"),
    [
        (f"FileNotFoundError: [Errno 2] No such file or directory: '{PATH}'", True),
        ("BlockingIOError: [Errno 11] Unable to synchronously open file (unable to lock file, errno = 11)", True),
        ("ValueError: mine", False),
    ],
)
def test_a_program_that_raises_over_a_file_that_others_write_is_told_so(folder: Folder, failure: str, is_told: bool) -> None:
    nothing: Any = folder.made().with_nothing()
    found = judge(case_of(nothing, nothing, outcome=Outcome(failure=failure, hosts={0: "raised"}), met=WRITTEN))
    assert found.verdict == "failed"
    assert codes(found) == (["shared-files"] if is_told else [])


@pytest.mark.parametrize(("factor", "size", "what"), [(1, 3e-9, None), (2, 1e-9, "the gradients (first w in step 0)")])
def test_without_noise_runs_gradients_that_cancel_do_not_tell_runs_apart(
    folder: Folder, factor: int, size: float, what: str | None
) -> None:
    """Threads decide what is left of them; two equal runs of a bias before BatchNormalization differ there alone."""

    def run(factor: int, size: float) -> Trace:
        def step(made: Made, k: int) -> None:
            gradients = {"w": factor * LOCALS[k].sum(axis=0), "b": np.full(4, size, "f4")}
            weights = {"w": weights_after(k), "b": np.full(4, k * size, "f4")}
            made.step(k, gradients, weights, rows=ROWS[8 * k : 8 * k + 8], objective=1.0)

        return loop(folder.made(), step)

    case = case_of(run(1, 1e-9), loop(folder.made("1x4"), right_topology))
    assert case.drifted(run(factor, size)) == what
