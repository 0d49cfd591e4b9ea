"""The steps of the GitHub Action (action.yml): install gpudist, verify the program, report the verdict to GitHub."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSES = ("equivalent", "by-design")


def install() -> int:
    """Install gpudist and what the program needs in one go, so that pip finds versions that fit together."""
    named = [_input("extras"), "fix" if _input("fix") == "true" else ""]
    extras = f"[{','.join(filter(None, named))}]" if any(named) else ""
    version = _input("version")
    name = f"gpudist{extras}=={version}" if version else f"{ROOT}{extras}"
    return _run([sys.executable, "-m", "pip", "install", name, *shlex.split(_input("install"))]).returncode


def verify() -> int:
    """Verify the program. Write the report to the log and the job summary, and each cause as an annotation."""
    file = Path(os.environ["RUNNER_TEMP"], "gpudist-verdict.json")
    file.unlink(missing_ok=True)
    done = _run(_command(file), stdout=subprocess.PIPE)
    print(done.stdout, flush=True)
    verdict = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    for line in _no_verdict(done.returncode) if verdict is None else _annotations(verdict):
        print(line, flush=True)
    _append("GITHUB_STEP_SUMMARY", _summary(verdict, done.stdout))
    _append("GITHUB_OUTPUT", f"exit-code={done.returncode}\njson={file if verdict else ''}\n")
    return done.returncode


def _input(name: str) -> str:
    return os.environ[f"INPUT_{name.upper()}"].strip()


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    print(f"$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, check=False, encoding="utf-8", **options)


def _command(file: Path) -> list[str]:
    program = _input("program")
    for name in ("strict", "fix"):
        if (given := _input(name)) not in ("true", "false"):
            print(_annotation("error", "usage error", f"{name} must be true or false. Received: {name}={given!r}.", None))
            sys.exit(2)
    return [
        *("gpudist", "verify"),
        *(program.split(maxsplit=1) if program.startswith("-m ") else [program]),
        *(word for name in _input("topologies").split() for word in ("--topology", name)),
        *("--steps", _input("steps")),
        *(word for code in _input("allow").split() for word in ("--allow", code)),
        *(f"--{name}" for name in ("strict", "fix") if _input(name) == "true"),
        *shlex.split(_input("options")),
        *("--json", str(file)),
        *("--", *shlex.split(_input("args"))),
    ]


def _no_verdict(code: int) -> Iterator[str]:
    yield _annotation("error", "no verdict", f"gpudist ended with exit code {code}. The log of this step says why.", None)


def _annotations(verdict: dict[str, Any]) -> Iterator[str]:
    """Yield one annotation for each cause, with all topologies that have it, and for each failure without a cause."""
    found: dict[tuple[str, ...], tuple[dict[str, Any], list[str]]] = {}
    for run in verdict["runs"]:
        fails = run["verdict"] not in PASSES or (run["verdict"] == "by-design" and verdict["strict"])
        for cause in run["causes"]:
            level = "notice" if cause["allowed"] or cause["advice"] else "error" if fails else "warning"
            found.setdefault((level, cause["code"], cause["summary"]), (cause, []))[1].append(run["topology"])
        if fails and not run["causes"]:
            yield _annotation("error", f"{run['verdict']} ({run['topology']})", run["failure"] or "See the job summary.", None)
    for (level, code, summary), (cause, topologies) in found.items():
        title = f"{code} ({', '.join(topologies)})"
        yield _annotation(level, title, f"{summary}\nFix: {cause['fix']}", cause.get("location"))
    for edit in verdict.get("fixes", []):
        file, _, line = edit["place"].rpartition(":")
        is_proven = "proven together with all edits" if edit["proven"] else "not enough alone"
        place = {"file": _first_of(edit["patch"]) or file, "line": line} if line.isdigit() else None
        yield _annotation("notice", f"edit for {edit['code']}, {is_proven}", f"{edit['words']}\n{edit['patch']}", place)


def _first_of(patch: str) -> str:
    """Return the file that a unified diff changes, from the working directory."""
    return next((line.removeprefix("--- a/") for line in patch.splitlines() if line.startswith("--- a/")), "")


def _annotation(level: str, title: str, message: str, location: dict[str, Any] | None) -> str:
    """Return a workflow command: https://docs.github.com/actions/reference/workflow-commands-for-github-actions."""
    place = {}
    if location:
        root = os.environ.get("GITHUB_WORKSPACE", ".")
        place = {"file": os.path.relpath(location["file"], root)}
        if location.get("cell") is None:  # a notebook's line is that of its cell, not of its file
            place["line"] = str(location["line"])
    fields = {**place, "title": f"gpudist: {title}"}
    return f"::{level} " + ",".join(f"{name}={_escape(text, ':,')}" for name, text in fields.items()) + f"::{_escape(message)}"


def _escape(text: str, also: str = "") -> str:
    for character in "%\r\n" + also:  # the percent sign first
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _summary(verdict: dict[str, Any] | None, report: str) -> str:
    results = [f"{run['topology']} {run['verdict']}" for run in verdict["runs"]] if verdict else ["no verdict"]
    patch = verdict.get("patch", "") if verdict else ""
    proven = f"\nProven edits, for `git apply`:\n\n````diff\n{patch}````\n" if patch else ""
    return f"### gpudist: {', '.join(results)}\n\n````text\n{report.strip()}\n````\n{proven}"


def _append(variable: str, text: str) -> None:
    with open(os.environ[variable], "a", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit({"install": install, "verify": verify}[sys.argv[1]]())
