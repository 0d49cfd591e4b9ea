"""Write report files: complete or not at all, and checked to be writable before the work starts.

JSON is strict. SARIF 2.1.0 has the findings, which code hosts and editors show at the lines of the program.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.errors import Unavailable, UsageError
from emulate.files import replace_file
from emulate.program import lines_of_traceback
from emulate.report.runs import kind_of, last_line

if TYPE_CHECKING:
    from emulate.verify.verdict import Run, Verdict

STANDARD_OUTPUT = Path("/dev/stdout")
_OUR_JSON = rb'\s*\{\s*"schema"\s*:\s*"gpudist\.'
_OUR_PAGE = rb'<!DOCTYPE html>.{,400}<meta name="generator" content="gpudist">'
_OUR_SARIF = rb'\s*\{\s*"\$schema".{,300}"driver"\s*:\s*\{\s*"name"\s*:\s*"gpudist"'
_OUR_CERTIFICATE = rb'PK.{28}about\.npy.{,200}\{"format": "gpudist\.certificate/'
_OURS = re.compile(b"|".join((_OUR_JSON, _OUR_PAGE, _OUR_SARIF, _OUR_CERTIFICATE)), re.DOTALL)
_HEAD = 1024  # bytes of a file that tell whose it is


def check_writable(path: Path, option: str) -> None:
    """Find out before the work starts whether the file can be written at its end, and that nothing is lost by it.

    Args:
        path: The file.
        option: The option that names it, for the message.

    Raises:
        UsageError: When it cannot, or when it has something else than an earlier report.
    """
    if path.is_dir():
        raise UsageError(f"{option} must name a file. Received: {option} {str(path)!r}, which is a folder. Name a file in it.")
    if _is_special(path):
        return
    try:
        descriptor, probe = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
        os.unlink(probe)
        is_lost = False
        if path.exists():
            with path.open("r+b") as file:  # for writing, too
                head = file.read(_HEAD)
            is_lost = bool(head) and _OURS.match(head) is None
    except OSError as error:
        raise UsageError(
            f"{option} must name a file that can be written. Received: {option} {str(path)!r} ({error.strerror}). "
            "Name one in a folder that exists and is yours."
        ) from None
    if is_lost:
        raise UsageError(
            f"{option} must name a new file or an earlier report. Received: {option} {str(path)!r}, which has something else. "
            "Name another, or delete it first."
        )


def write_whole(path: Path, text: str) -> None:
    """Write a file; a reader of it sees all of it or nothing.

    Args:
        path: The file.
        text: All that it is to have.

    Raises:
        BrokenPipeError: When it is a pipe that nobody reads any more.
        Unavailable: When it cannot be written: the disk is full, its folder is gone.
    """
    try:
        if path == STANDARD_OUTPUT:
            # If standard output is a file, opening it again would overwrite its content.
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode("utf-8"))
            sys.stdout.buffer.flush()
        elif _is_special(path):
            with path.open("a", encoding="utf-8") as file:  # behind /dev/fd/3 there may be a file that others write too
                file.write(text)
        else:
            replace_file(path, text.encode("utf-8"))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unavailable(
            f"A report must find room in its file. Received: file={str(path)!r} ({error.strerror or error}). "
            "Make room there, or name another."
        ) from None


def _is_special(path: Path) -> bool:
    """Return whether it is a device, a pipe or an open stream (`/dev/stdout`): such a file is written, not replaced."""
    is_stream = path.is_symlink() and (path.is_relative_to("/dev") or path.is_relative_to("/proc"))
    return is_stream or (path.exists() and not path.is_file())


def write_json(verdict: Verdict, path: Path) -> None:
    """Write the verdict; a reader of the file sees all of it or nothing."""
    write_object(verdict.to_json(), path)


def write_object(content: Mapping[str, Any], path: Path) -> None:
    """Write one JSON object, as a verdict is written."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"": "error", "by design": "warning", "advice": "note", "allowed": "note"}
_WITHOUT_CAUSE = ("failed", "hung", "unverified")
"""Verdicts that are results of their own where no cause explains them."""


def write_sarif(verdict: Verdict, path: Path) -> None:
    """Write the findings; a reader of the file sees all of it or nothing."""
    write_object(to_sarif(verdict), path)


def to_sarif(verdict: Verdict) -> dict[str, Any]:
    """Return the findings of all topologies as a SARIF log: a result for each cause, by its lines."""
    results = _merged(_results(verdict))
    codes, changes = {one.code: one.words for one in verdict.fixes}, _changes(verdict.patch)
    for result in results:
        if changes and result["ruleId"] in codes:
            result["fixes"] = [{"description": {"text": codes[result["ruleId"]]}, "artifactChanges": changes}]
    rules: dict[str, dict[str, Any]] = {}
    for result in results:
        url = result.pop("url", None)
        rule = {"id": result["ruleId"], "shortDescription": {"text": result["ruleId"]}}
        rules[result["ruleId"]] = rule | ({"helpUri": url} if url is not None else {})
        result["ruleIndex"] = list(rules).index(result["ruleId"])
    version = verdict.versions.get("gpudist", "")
    home = "https://gpudist.readthedocs.io/"
    driver = {"name": "gpudist", "version": version, "informationUri": home, "rules": list(rules.values())}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _results(verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Yield a result for each cause, then one for each run that ended badly without a cause: at the line where it raised."""
    for run in verdict.runs:
        for cause in run.causes:
            lines = [_physical(at.file, at.line, at.text, at.cell) for at in cause.locations] or _whole_file(verdict.program)
            properties = {"stage": cause.stage, "evidence": cause.evidence, "fix": cause.fix}
            text = "\n\n".join(filter(None, (cause.summary, cause.fix)))
            yield _result(cause.code, _LEVELS[kind_of(cause)], text, lines, run, properties) | {"url": cause.url}
    for run in verdict.runs:
        if run.verdict in _WITHOUT_CAUSE and not run.causes:
            text = last_line(run.failure) or f"On {run.topology} the verdict is {run.verdict}."
            raised = list(lines_of_traceback(run.failure or ""))[-1:]
            lines = [_physical(line["file"], line["line"], line["text"], line.get("cell")) for line in raised]
            yield _result(run.verdict, "error", text, lines or _whole_file(verdict.program), run, {})


def _result(
    code: str, level: str, text: str, lines: list[dict[str, Any]], run: Run, properties: Mapping[str, Any]
) -> dict[str, Any]:
    given = {name: value for name, value in properties.items() if value is not None}
    return {
        "ruleId": code,
        "level": level,
        "message": {"text": text},
        "locations": lines[:1],
        "relatedLocations": lines[1:],
        "properties": {"topologies": [run.topology], **given},
    }


def _physical(file: str, line: int, text: str, cell: int | None = None) -> dict[str, Any]:
    """Return a location. SARIF has no cells, so that of a notebook is the whole file."""
    region = {"region": {"startLine": line, "snippet": {"text": text}}} if cell is None else {}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(file)}, **region}}


def _uri(file: str) -> str:
    path = Path(file)
    return path.as_uri() if path.is_absolute() else path.as_posix()


def _whole_file(program: str) -> list[dict[str, Any]]:
    """Return the program's file without a line: code hosts refuse a result without a place."""
    file = program.partition(":")[0]
    return [{"physicalLocation": {"artifactLocation": {"uri": _uri(file)}}}] if Path(file).is_file() else []


_HUNK = re.compile(r"@@ -(\d+),?(\d*) ")


def _changes(patch: str) -> list[dict[str, Any]]:
    """Return what a unified diff replaces in each file, line by line: with all of it the program is proven."""
    changes: list[dict[str, Any]] = []
    for line in patch.split("\n"):
        if line.startswith("--- a/"):
            name = line.removeprefix("--- a/")
            uri = _uri(
                name if Path(name).exists() else f"/{name}"
            )  # outside of the working directory the diff has the whole path
            changes.append({"artifactLocation": {"uri": uri}, "replacements": []})
        elif hunk := _HUNK.match(line):
            first = int(hunk[1])
            region = {"startLine": first, "endLine": first + int(hunk[2] or 1) - 1}
            changes[-1]["replacements"].append({"deletedRegion": region, "insertedContent": {"text": ""}})
        elif line.startswith((" ", "+")) and not line.startswith("+++ b/"):
            content = changes[-1]["replacements"][-1]["insertedContent"]
            content["text"] += ("\n" if content["text"] else "") + line[1:]
    return changes


def _merged(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results, those of several topologies with the same lines and text once."""
    merged: dict[str, dict[str, Any]] = {}
    for result in results:
        key = repr((result["ruleId"], result["level"], result["locations"]))
        first = merged.setdefault(key, result)
        if first is not result:
            first["properties"]["topologies"] += result["properties"]["topologies"]
    return list(merged.values())
