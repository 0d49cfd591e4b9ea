"""`[tool.gpudist]` of pyproject.toml stands for what the command line does not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import emulate.verify
from emulate.cli.app import app
from emulate.topology import Topology
from emulate.verify.verdict import Reference, Run, Verdict

Verify = Callable[..., tuple[Any, dict[str, Any]]]


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Return a call of the command in a folder below that of pyproject.toml: its result, and what the library is told."""
    folder = tmp_path / "sub" / "sub"
    folder.mkdir(parents=True)
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    told: dict[str, Any] = {}

    def called(program: Any, **options: Any) -> Verdict:
        told.update(options)
        return Verdict("train.py", 0, "cpu", {}, Reference("ok", 20), (Run("1x4", "equivalent"),))

    monkeypatch.setattr(emulate.verify, "verify", called)

    def verify(table: str, *args: str) -> tuple[Any, dict[str, Any]]:
        (tmp_path / "pyproject.toml").write_text(table)
        return CliRunner().invoke(app, ["verify", "train.py", *args], prog_name="gpudist"), told

    return verify


ALL = """
[tool.gpudist]
topologies = ["1x2", "2x2"]
steps = "all"
allow = ["nan"]
strict = true
timeout = 7.5
"""


def test_the_nearest_file_upwards_sets_what_the_command_line_does_not(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "sub" / "pyproject.toml").write_text("[tool.other]\nsteps = 1\n")  # it says nothing of gpudist
    done, told = verify(ALL)
    assert done.exit_code == 0, done.output
    assert (told["topology"], told["steps"]) == ([Topology(1, 2), Topology(2, 2)], None)
    assert (told["allow"], told["strict"], told["timeout"]) == (("nan",), True, 7.5)
    said = " ".join(done.stdout.split())
    assert "Set by [tool.gpudist] of" in said
    assert said.endswith(": topologies, steps, allow, strict, timeout.")


def test_the_command_line_wins(verify: Verify) -> None:
    line = "--topology 1x3 --steps 20 --allow empty-shard --no-strict --timeout 300"
    done, told = verify(ALL, *line.split())
    assert (told["topology"], told["steps"], told["allow"]) == ([Topology(1, 3)], 20, ("empty-shard",))
    assert (told["strict"], told["timeout"]) == (False, 300.0)
    assert "[tool.gpudist]" not in done.stdout


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'topologys = ["1x2"]',
            "A key of [tool.gpudist] must be one that gpudist knows. Received: topologys in {file}. Did you mean 'topologies'?",
        ),
        (
            "seed = 3",
            (
                "A key of [tool.gpudist] must be one that gpudist knows. Received: seed in {file}. "
                "Possible keys: topologies, steps, allow, strict, timeout."
            ),
        ),
        (
            'topologies = "1x2"',
            "topologies must be a list of texts. Received: topologies = '1x2'. (topologies of [tool.gpudist] in {file})",
        ),
        ("strict = 1", "strict must be true or false. Received: strict = 1. (strict of [tool.gpudist] in {file})"),
        (
            'steps = "few"',
            'steps must be a whole number, "all" or "auto". Received: steps = \'few\'. (steps of [tool.gpudist] in {file})',
        ),
        (
            "steps = 0",
            (
                "--steps must be a positive whole number, 'all' or 'auto'. Received: --steps '0'. Try --steps 20. "
                "(steps of [tool.gpudist] in {file})"
            ),
        ),
        (
            'timeout = "9"',
            "timeout must be a number of seconds. Received: timeout = '9'. (timeout of [tool.gpudist] in {file})",
        ),
        (
            'allow = ["nam"]',
            (
                "--allow must be the code of a cause. Received: --allow 'nam'. Did you mean 'nan'? "
                "(allow of [tool.gpudist] in {file})"
            ),
        ),
    ],
)
def test_a_setting_that_cannot_be_meant_is_named(verify: Verify, tmp_path: Path, table: str, message: str) -> None:
    done, told = verify(f"[tool.gpudist]\n{table}\n")
    file = tmp_path / "pyproject.toml"
    assert (done.exit_code, told) == (2, {})
    assert done.stderr == f"gpudist: {message.format(file=file)}\n"


def test_a_file_that_is_no_toml_is_named(verify: Verify, tmp_path: Path) -> None:
    done, _ = verify("[tool.gpudist\n")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"gpudist: pyproject.toml must be valid TOML. Received: '{tmp_path / 'pyproject.toml'}' (")
