"""A coding agent that reads nothing but exit codes and JSON gets a wrong program right, as docs/guides/agents.md tells it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")

FIXTURES = Path(__file__).parents[2] / "fixtures"


@dataclass
class Agent:
    """Verify, fix and verify again; what commands print is thrown away unread.

    Attributes:
        program: What it works on.
        commands: The commands that it has run, with their exit codes.
    """

    program: Path
    commands: list[tuple[str, int]] = field(default_factory=list)

    def work(self) -> str:
        """Return how it ends: `right`, `fixed`, or the lines that a person must look at."""
        code, verdict = self._run("verify")
        if code == 0:
            return "right"
        if code != 1:
            return f"cannot go on: {verdict.get('message', verdict['verdict'])}"
        code, report = self._run("fix", "--write")
        if code != 0:
            causes = [cause for run in report["after"]["runs"] for cause in run["causes"]]
            return "; ".join(f"line {cause['location']['line']}: {cause['fix']}" for cause in causes)
        assert all(one["proven"] for one in report["fixes"])
        code, _ = self._run("verify", "--steps", "all")
        return "fixed" if code == 0 else "wrong again"

    def _run(self, command: str, *options: str) -> tuple[int, dict[str, Any]]:
        written = self.program.with_suffix(f".{len(self.commands)}.json")
        words = ["gpudist", command, str(self.program), "--topology", "1x2", "--json", str(written), *options]
        done = subprocess.run(
            [sys.executable, "-m", "emulate", *words[1:]],
            cwd=self.program.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=500,
            check=False,
        )
        self.commands.append((command, done.returncode))
        content = json.loads(written.read_text())
        assert content["exit_code"] == done.returncode
        return done.returncode, content


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """Return an agent for a program that lies beside its data as the fixtures do."""
    (tmp_path / "data").symlink_to(FIXTURES / "data")
    (tmp_path / "bugs").mkdir()
    return Agent(Path(shutil.copy(FIXTURES / "bugs" / "loss_scaling.py", tmp_path / "bugs" / "train.py")))


def test_an_agent_fixes_a_wrong_program_with_json_and_exit_codes_alone(agent: Agent) -> None:
    before = agent.program.read_text()
    assert agent.work() == "fixed"
    assert agent.commands == [("verify", 1), ("fix", 0), ("verify", 0)]
    assert agent.program.with_name("train.py.orig").read_text() == before != agent.program.read_text()
    assert agent.work() == "right"


def test_an_agent_is_told_why_a_program_cannot_be_judged(agent: Agent) -> None:
    agent.program.write_text("def broken(:\n")
    assert agent.work().startswith("cannot go on: ")
    assert agent.commands == [("verify", 2)]
