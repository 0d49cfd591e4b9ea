"""Write the findings as SARIF 2.1.0, which code hosts and editors show at the lines of the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.program import lines_of_traceback
from emulate.report.files import write_object
from emulate.report.runs import kind_of, last_line

if TYPE_CHECKING:
    from emulate.verify.verdict import Finding, Location, Run, Verdict

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_HOME = "https://gpudist.readthedocs.io/"
_LEVELS = {"": "error", "by design": "warning", "advice": "note", "allowed": "note"}
_WITHOUT_CAUSE = ("failed", "hung", "unverified")
"""Verdicts that are results of their own where no cause explains them."""


def write_sarif(verdict: Verdict, path: Path) -> None:
    """Write the findings; a reader of the file sees all of it or nothing."""
    write_object(to_sarif(verdict), path)


def to_sarif(verdict: Verdict) -> dict[str, Any]:
    """Return the findings of all topologies as a SARIF log: a result for each cause, by its lines."""
    results = _merged([*_of_causes(verdict), *_of_endings(verdict)])
    rules = {result["ruleId"]: _rule(result) for result in results}
    for result in results:
        result["ruleIndex"] = list(rules).index(result["ruleId"])
    version = verdict.versions.get("gpudist", "")
    driver = {"name": "gpudist", "version": version, "informationUri": _HOME, "rules": list(rules.values())}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": list(map(_without_url, results))}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _of_causes(verdict: Verdict) -> Iterator[dict[str, Any]]:
    for run in verdict.runs:
        for cause in run.causes:
            lines = [_place(location) for location in cause.locations] or _whole_file(verdict.program)
            properties = {"stage": cause.stage, "evidence": cause.evidence, "fix": cause.fix}
            yield _result(cause.code, _LEVELS[kind_of(cause)], _text(cause), lines, run, properties) | {"url": cause.url}


def _text(cause: Finding) -> str:
    return "\n\n".join(filter(None, (cause.summary, cause.fix)))


def _of_endings(verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Yield a result for each run that ended badly without a cause: at the user's line where it raised."""
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


def _place(location: Location) -> dict[str, Any]:
    return _physical(location.file, location.line, location.text, location.cell)


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


def _merged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results, those of several topologies with the same lines and text once."""
    merged: dict[str, dict[str, Any]] = {}
    for result in results:
        key = repr((result["ruleId"], result["level"], result["locations"]))
        first = merged.setdefault(key, result)
        if first is not result:
            first["properties"]["topologies"] += result["properties"]["topologies"]
    return list(merged.values())


def _rule(result: Mapping[str, Any]) -> dict[str, Any]:
    rule = {"id": result["ruleId"], "shortDescription": {"text": result["ruleId"]}}
    return rule | ({"helpUri": result["url"]} if "url" in result else {})


def _without_url(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "url"}
