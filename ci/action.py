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
    extras = f"[{_input('extras')}]" if _input("extras") else ""
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
    strict = _input("strict")
    if strict not in ("true", "false"):
        print(_annotation("error", "usage error", f"strict must be true or false. Received: strict={strict!r}.", None))
        sys.exit(2)
    return [
        *("gpudist", "verify"),
        *(program.split(maxsplit=1) if program.startswith("-m ") else [program]),
        *(word for name in _input("topologies").split() for word in ("--topology", name)),
        *("--steps", _input("steps")),
        *(word for code in _input("allow").split() for word in ("--allow", code)),
        *(["--strict"] if strict == "true" else []),
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
    return f"### gpudist: {', '.join(results)}\n\n````text\n{report.strip()}\n````\n"


def _append(variable: str, text: str) -> None:
    with open(os.environ[variable], "a", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit({"install": install, "verify": verify}[sys.argv[1]]())
