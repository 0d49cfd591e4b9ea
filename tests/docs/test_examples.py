"""The examples in README and documentation: each runs, is read, or is a piece of a file that a test runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.examples import NEEDS, PRELUDE, ROOT, Block, all_blocks, missing_lines, programs
from emulate.cli.app import app
from emulate.cluster import Cluster, Preload

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BLOCKS = all_blocks()
RUN_BY_OTHERS = ("docs/guides/pytest.md",)  # tests/acceptance/plugin/test_plugin_guide.py


def marked(kind: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.mark.partition(": ")[0] == kind]


def test_every_example_is_of_a_kind_that_is_checked() -> None:
    checked = ("python", "sh", "toml", "json", "")
    unknown = [block.place for block in BLOCKS if not block.mark and block.language not in checked]
    reasons = [block.mark for block in BLOCKS if block.mark.startswith("needs: ") and block.mark[7:] not in NEEDS]
    kinds = {block.mark.partition(": ")[0] for block in BLOCKS}
    assert (unknown, reasons, kinds - {"", "from", "diff", "needs", "printed by"}) == ([], [], set())


@pytest.mark.parametrize("block", marked("from"))
def test_a_piece_of_a_file_stands_in_it(block: Block) -> None:
    assert missing_lines(block.text.splitlines(), ROOT / block.mark.partition(": ")[2]) == []


@pytest.mark.parametrize("block", marked("diff"))
def test_a_difference_is_one_of_two_files(block: Block) -> None:
    old, new = (ROOT / name for name in block.mark.partition(": ")[2].split())
    lines = block.text.splitlines()
    for sign, file in (("-", old), ("+", new)):
        assert missing_lines([line.removeprefix(sign) for line in lines if line.startswith((sign, "..."))], file) == []
    assert all(line[0] in "-+" or line == "..." for line in lines)


@pytest.mark.parametrize("block", marked("printed by"))
def test_what_a_test_prints_has_that_test(block: Block) -> None:
    assert (ROOT / block.mark.partition(": ")[2]).is_file()


def _commands(program: str) -> list[Any]:
    lines = [
        (block, line.split("  #")[0].strip())
        for block in BLOCKS
        if block.language in ("sh", "")
        for line in block.text.splitlines()
    ]
    return [pytest.param(line, id=f"{block.place} {line}") for block, line in lines if line.split()[:1] == [program]]


@pytest.mark.parametrize("line", _commands("gpudist"))
def test_a_command_is_one_that_gpudist_takes(line: str) -> None:
    group: Any = typer.main.get_command(app)
    context = group.make_context("gpudist", [], resilient_parsing=True)
    for part in line.split("&&"):
        name, command, args = group.resolve_command(context, shlex.split(part)[1:])
        command.make_context(name, args, parent=context)


@pytest.mark.parametrize("line", _commands("make"))
def test_a_make_command_has_its_target(line: str) -> None:
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("block", [pytest.param(one, id=one.place) for one in BLOCKS if one.language == "toml"])
def test_toml_can_be_read(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("page", [page for page in programs() if page not in RUN_BY_OTHERS])
def test_the_python_of_a_page_runs(page: str, preload: Preload, tmp_path: Path) -> None:
    text = PRELUDE + programs()[page]

    def run() -> None:
        import os

        os.chdir(tmp_path)
        exec(compile(text, page, "exec"), {"__name__": "__main__"})

    with Cluster("1x2", preload=preload) as cluster:
        cluster.run(run)
