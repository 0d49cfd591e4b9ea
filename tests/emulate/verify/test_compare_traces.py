"""Recorded runs are compared as they ended: one that was killed or raised is not equivalent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from emulate.errors import UsageError
from emulate.verify import compare_traces
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Problem, train


def recorded(folder: Path, replicas: int, ends: str | None) -> Path:
    made = train(Problem(steps=2), Made(folder, f"1x{replicas}"), replicas)
    if ends is not None:
        made.event({"event": "end", "reason": ends})
    made.trace()
    return folder


def test_a_recorded_run_that_ended_well_is_compared(tmp_path: Path) -> None:
    for ends in ("returned", "steps"):
        run = compare_traces(recorded(tmp_path / f"one-{ends}", 1, ends), recorded(tmp_path / f"two-{ends}", 2, ends))
        assert (run.verdict, run.failure) == ("equivalent", None)


@pytest.mark.parametrize(("ends", "how"), [(None, "stopped"), ("raised", "raised")])
def test_a_recorded_run_that_was_killed_or_raised_failed(tmp_path: Path, ends: str | None, how: str) -> None:
    run = compare_traces(recorded(tmp_path / "one", 1, "returned"), recorded(tmp_path / "two", 2, ends))
    assert run.verdict == "failed"
    assert run.failure == f"The recorded run did not end well: host 0 {how} after 2 steps."


@pytest.mark.parametrize(("ends", "how"), [(None, "stopped"), ("raised", "raised")])
def test_a_reference_that_was_killed_or_raised_is_nothing_to_compare_with(tmp_path: Path, ends: str | None, how: str) -> None:
    run = compare_traces(recorded(tmp_path / "one", 1, ends), recorded(tmp_path / "two", 2, "steps"))
    assert (run.verdict, run.reason) == ("failed", "reference")
    assert run.failure is not None
    assert run.failure.endswith(f"run did not end well: host 0 {how} after 2 steps.")


def test_a_trace_whose_arrays_were_cut_off_is_refused(tmp_path: Path) -> None:
    reference, topology = recorded(tmp_path / "one", 1, "steps"), recorded(tmp_path / "two", 2, "steps")
    with (topology / "host-0" / "arrays.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(UsageError, match=r"A trace's arrays must be complete\. Received: .* Copy it again"):
        compare_traces(reference, topology)


def write(path: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_text(text)


def add(line: str) -> Callable[[Path], object]:
    def append(folder: Path) -> None:
        with (folder / "host-0" / "events.jsonl").open("a") as file:
            file.write(line + "\n")

    return append


ABOUT = '{"format": "gpudist.trace/1", "topology": "1x2", %s}'
DAMAGES = {
    "trace.json is empty": (write("trace.json", ""), "Expecting value"),
    "trace.json is a list": (write("trace.json", "[]"), r"A trace\.json is a JSON object"),
    "trace.json is null": (write("trace.json", "null"), r"A trace\.json is a JSON object"),
    "trace.json is of another format": (write("trace.json", "{}"), "A trace has the format"),
    "the topology is missing": (write("trace.json", '{"format": "gpudist.trace/1"}'), "topology"),
    "the topology is a number": (
        write("trace.json", '{"format": "gpudist.trace/1", "topology": 3}'),
        "A topology has the form",
    ),
    "the seed is a text": (write("trace.json", ABOUT % '"seed": "x"'), r"trace\.json has seed 'x'"),
    "the versions are a number": (write("trace.json", ABOUT % '"versions": 3'), r"trace\.json has versions 3"),
    "a line is not JSON": (add('{"event": "st'), r"host-0/events\.jsonl, line \d+, is not JSON"),
    "a line is an empty object": (add("{}"), r"host-0/events\.jsonl, line \d+, is not an event"),
    "a line is a number": (add("1"), r"host-0/events\.jsonl, line \d+, is not an event"),
    "an end without a reason": (add('{"event": "end"}'), r"an event lacks something.*\(KeyError: 'reason'\)"),
    "a step without its optimizer": (add('{"event": "step"}'), r"an event lacks something.*\(KeyError: 'optimizer'\)"),
    "variables that are a list": (add('{"event": "final", "replica": 0, "variables": []}'), "an event lacks something"),
}


@pytest.mark.parametrize("damaged", ["one", "two", "noise-1"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_trace_is_named_with_what_is_wrong_and_what_to_do(tmp_path: Path, damage: str, damaged: str) -> None:
    reference, topology = recorded(tmp_path / "one", 1, "steps"), recorded(tmp_path / "two", 2, "steps")
    recorded(tmp_path / "noise-1one", 1, "steps")
    inflict, told = DAMAGES[damage]
    folder = next(tmp_path.glob(f"{damaged}*"))
    inflict(folder)
    with pytest.raises(UsageError) as refused:
        compare_traces(reference, topology)
    text = str(refused.value)
    assert text.startswith(f"A trace must not be damaged. Received: trace='{folder}' (")
    assert re.search(told, text)
    assert text.endswith("Copy the whole folder again, or record it anew with `gpudist verify PROGRAM --traces DIR`.")


def test_a_trace_without_its_arrays_is_refused(tmp_path: Path) -> None:
    reference, topology = recorded(tmp_path / "one", 1, "steps"), recorded(tmp_path / "two", 2, "steps")
    (topology / "host-0" / "arrays.bin").unlink()
    with pytest.raises(
        UsageError, match=r"A trace's arrays must be readable\. Received: .*/arrays\.bin .* Copy the whole folder"
    ):
        compare_traces(reference, topology)
