"""What ran with each pair: results.json, and from it the table that the documentation includes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compat.pairs import PAIRS, Pair

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
TABLE = HERE.parents[1] / "docs" / "compat_table.md"
_PROGRAMS = "tests/compat/programs.py"
_MARK = "<!-- Made by `make compat`: do not edit. -->\n"
_HEAD = f"""{_MARK}| TensorFlow | Keras | Python | Programs with the expected verdict | Tests passed |
|---|---|---|---|---|
"""


def add(pair: Pair, versions: Mapping[str, str], outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write down what ran with a pair, and make the table again; a scheduled pair is shown nowhere."""
    collected = dict(outcomes).get("", {}).get("collected", [])
    tests = {name: {key: outcomes[name][key] for key in ("outcome", "why")} for name in sorted(collected) if name in outcomes}
    results = read()
    results[pair.name] = {"versions": dict(versions), "collected": len(collected), "tests": tests}
    if pair.is_scheduled:
        return
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(text(results))


def read() -> dict[str, Any]:
    """Return what ran."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.is_file() else {}


def text(results: Mapping[str, Any]) -> str:
    """Return the table, with what failed and what could not run below it."""
    tried = [(PAIRS[name], results[name]) for name in PAIRS if name in results]
    if not tried:
        return f"{_MARK}No pair was tried with this version yet: run `make compat`.\n"
    below = [line for pair, result in tried for line in _exceptions(pair, result)]
    return _HEAD + "".join(_row(*one) for one in tried) + ("\n" + "\n".join(below) + "\n" if below else "")


def _row(pair: Pair, result: Mapping[str, Any]) -> str:
    versions = result["versions"]
    named = f"tf_keras {versions[pair.keras]}" if pair.keras == "tf_keras" else versions[pair.keras]
    programs, tests = (_count(result, is_program) for is_program in (True, False))
    return f"| {versions['tensorflow']} | {named} | {versions['python']} | {programs} | {tests} |\n"


def _count(result: Mapping[str, Any], is_program: bool) -> str:
    outcomes = [one["outcome"] for name, one in result["tests"].items() if name.startswith(_PROGRAMS) is is_program]
    ran = [one for one in outcomes if one != "skipped"]
    return f"{ran.count('passed')} of {len(ran)}" if ran else "none"


def _exceptions(pair: Pair, result: Mapping[str, Any]) -> Iterator[str]:
    if pair.is_legacy:
        yield f"- {pair.name}: the programs run with Keras 2 (`{pair.keras}`); those of gpudist_core need Keras 3."
    if missing := result["collected"] - len(result["tests"]):
        yield f"- {pair.name}: {missing} of {result['collected']} have not run."
    for name, one in result["tests"].items():
        if one["outcome"] != "passed":
            yield f"- {pair.name}: `{_shown(name)}` {one['outcome']}: {_short(one['why'])}"


def _shown(test: str) -> str:
    """Return the program's name for a test of a program; other tests have their own."""
    return test.rpartition("[")[2].rstrip("]") if test.startswith(_PROGRAMS) else test


def _short(why: str) -> str:
    return next((line.strip() for line in reversed(why.splitlines()) if line.strip()), "")[:200]
