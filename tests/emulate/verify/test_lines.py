"""Which lines a cause blames: queries over what runs recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emulate.verify.causes import all_causes
from emulate.verify.lines import (
    Blame,
    ProgramLines,
    between,
    counted_apart,
    locate,
    made,
    made_apart,
    operations,
    raised,
    seeded_apart,
    stopped,
    stuck,
    updates_of,
)
from emulate.verify.result import Outcome
from emulate.verify.verdict import STAGES, Finding, Location
from tests.emulate.verify.cases import Folder


def entry(line: int, *roles: str, near: int = 0, called: bool = False, file: str = "/away/train.py") -> dict[str, Any]:
    told: dict[str, Any] = {"file": file, "line": line, "text": f"line {line}", "near": near, "operations": {"Mul": 1}}
    return told | {"roles": dict.fromkeys(roles, near)} | ({"called": True} if called else {})


@pytest.fixture
def lines(folder: Folder) -> ProgramLines:
    made_trace = folder.made("1x2")
    loss = [entry(9, "scale", near=1, called=True), entry(7, "mean", near=2), entry(8, "mean", "scale", near=1)]
    stages = {"loss": loss, "update": [entry(12, "apply")]}
    made_trace.event({"event": "lines", "function": "step", "stages": stages})
    made_trace.event({"event": "lines", "function": "test_step", "stages": {"loss": [entry(99, "mean")]}})
    for kind, line in (("batch", 3), ("shuffle", 4), ("shuffle", 5)):
        about = {"kind": kind, "in_step": False, "seeded": line == 4}
        made_trace.event({"event": "made", **about, "line": {"file": "/away/data.py", "line": line, "text": kind}})
    return ProgramLines(made_trace.trace())


def found(lines: ProgramLines, *blame: Blame) -> tuple[str | None, list[int]]:
    stage, locations = locate(blame, lines)
    return stage, [one.line for one in locations]


def test_the_nearest_operation_of_the_first_role_comes_first(lines: ProgramLines) -> None:
    assert found(lines, operations("loss", "mean", "scale")) == ("loss", [8, 7])
    assert found(lines, operations("loss", "scale")) == ("loss", [8])


def test_a_library_s_own_operations_are_blamed_only_where_the_program_has_none(lines: ProgramLines) -> None:
    assert found(lines, between("loss"))[1][-1] == 9
    assert found(lines, operations("loss", "count", "scale")) == ("loss", [8])


def test_a_seed_that_differs_between_hosts_is_found_by_its_call(folder: Folder) -> None:
    made_trace = folder.made("2x1")
    seeds = {3: (7, 7), 4: (7, 8), 5: (None, None), 6: (1, 2)}
    for line, of_hosts in seeds.items():
        for host, seed in enumerate(of_hosts):
            about = {"kind": "shuffle" if line == 6 else "generator"} | ({} if seed is None else {"seed": seed})
            made_trace.event({"event": "made", **about, "line": {"file": "/away/data.py", "line": line}}, host)
    lines = ProgramLines(made_trace.trace())
    assert found(lines, seeded_apart("examples", "generator")) == ("examples", [4])
    assert found(lines, seeded_apart("examples", "shuffle", "generator"))[1] == [4, 6]


def test_a_call_that_only_some_hosts_make_is_found(folder: Folder) -> None:
    made_trace = folder.made("2x1")
    for line, hosts, trainable in ((3, (0, 1), True), (4, (0,), True), (5, (1,), False), (6, (1,), True)):
        for host in hosts:
            about = {"kind": "assign", "trainable": trainable}
            made_trace.event({"event": "made", **about, "line": {"file": "/away/train.py", "line": line}}, host)
    lines = ProgramLines(made_trace.trace())
    assert found(lines, made_apart("start", "assign", trainable=True)) == ("start", [6, 4])
    assert found(lines, made_apart("update", "assign", trainable=False)) == ("update", [5])
    assert found(lines, made_apart("start", "restore")) == ("start", [])


def test_a_call_that_gets_other_numbers_than_on_one_device_is_found(folder: Folder) -> None:
    judged, reference = folder.made("1x2"), folder.made("1x1")
    counts = {3: ("skip", (0, 16), (0, 4)), 4: ("take", (4, 8), (8, 4)), 5: ("batch", (8,), (4,)), 6: ("skip", (9,), ())}
    for line, (kind, *of_runs) in counts.items():
        for trace, numbers in zip((judged, reference), of_runs, strict=True):
            for count in numbers:
                about = {"kind": kind, "count": count}
                trace.event({"event": "made", **about, "line": {"file": "/away/data.py", "line": line}})
    lines = ProgramLines(judged.trace(), reference.trace())
    assert found(lines, counted_apart("examples", "take", "skip")) == ("examples", [3])
    assert found(lines, counted_apart("examples", "take", "batch"))[1] == [5]


def test_a_function_that_does_not_train_is_not_blamed(lines: ProgramLines) -> None:
    assert 99 not in found(lines, between("loss"))[1]


def test_the_first_query_that_finds_something_tells_the_stage(lines: ProgramLines) -> None:
    assert found(lines, operations("given", "norm"), made("examples", "batch")) == ("examples", [3])


def test_a_metric_s_own_updates_are_told_from_those_of_others_by_the_names_of_its_variables(folder: Folder) -> None:
    made_trace = folder.made("1x2")
    of = {28: "loss/total", 29: "loss_weight/total", 30: "total"}
    updates = [entry(line, "update") | {"name": name} for line, name in of.items()]
    stages = {"update": [entry(12, "apply")], "reported": updates}
    made_trace.event({"event": "lines", "function": "step", "stages": stages})
    lines = ProgramLines(made_trace.trace())
    everything = operations("reported", "update")
    assert found(lines, updates_of("loss"), everything) == ("reported", [28])
    assert found(lines, updates_of("accuracy"), everything)[1] == [28, 29, 30]


def test_nothing_found_is_a_stage_without_lines(lines: ProgramLines) -> None:
    assert found(lines, operations("given", "norm"), made("start", "optimizer")) == ("given", [])
    assert found(lines) == (None, [])


def test_what_is_made_is_asked_for_by_kind_and_by_what_is_known_of_it(lines: ProgramLines) -> None:
    assert found(lines, made("examples", "shuffle"))[1] == [5, 4]
    assert found(lines, made("examples", "shuffle", seeded=False))[1] == [5]


def test_places_that_a_cause_knows_itself_come_first(lines: ProgramLines) -> None:
    _, locations = locate([made("examples", "batch")], lines, ["data.py, line 8", "unknown.py:3"])
    assert [(one.file, one.line) for one in locations] == [("/away/data.py", 8)]


def test_the_line_of_a_traceback_or_a_stack_is_the_innermost_of_the_user(lines: ProgramLines, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("step()\nx = 1\n")
    library = "/usr/lib/python3/dist-packages/keras/src/trainer.py"
    text = f'  File "{script}", line 1, in <module>\n  File "{library}", line 5, in fit\n'
    lines.outcome = Outcome(failure=f"Traceback (most recent call last):\n{text}ValueError: no", stacks={1: text})
    expected = ("ending", (Location(str(script), 1, "step()"),))
    assert locate([raised()], lines) == expected
    assert locate([stuck()], lines) == expected
    quoting = f'Traceback (most recent call last):\n{text}Error: defined at\n  File "{script}", line 2, in made\n'
    lines.outcome = Outcome(failure=quoting)
    assert locate([stopped()], lines) == expected
    assert found(lines, raised())[1] == [2]


def test_a_finding_has_its_first_line_as_location() -> None:
    lines = (Location("train.py", 3, "x"), Location("train.py", 4, "y"))
    assert Finding("nan", "", "", "", locations=lines).location == lines[0]
    assert Finding("nan", "", "", "").location is None
    assert Location("train.ipynb", 2, cell=3).place == "train.ipynb, cell 3:2"


def test_every_cause_looks_in_known_stages() -> None:
    assert {blame.stage for cause in all_causes() for blame in cause.blame} <= set(STAGES)
