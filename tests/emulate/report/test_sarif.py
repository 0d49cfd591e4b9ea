"""`--sarif`: a log that its official schema accepts, with each finding at its lines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from emulate.report import check_writable, to_sarif, write_sarif
from emulate.verify.verdict import Location

SCHEMA = Path(__file__).with_name("data") / "sarif-schema-2.1.0.json"
"""https://github.com/oasis-tcs/sarif-spec, sarif-2.1/schema."""
LINES = (Location("src/train.py", 63, "loss = tf.reduce_mean(losses)"), Location("train.ipynb", 2, "step()", cell=3))


def results_of(log: dict[str, Any]) -> list[dict[str, Any]]:
    return list(log["runs"][0]["results"])


def test_the_schema_accepts_what_is_written(made: Any, tmp_path: Path) -> None:
    located = replace(made.loss_scaling, stage="loss", locations=LINES)
    runs = made.divergent(causes=[located, made.batchnorm]), made.divergent("2x2", verdict="failed", causes=[], failure="E: 1")
    write_sarif(made.verdict(*runs), tmp_path / "found.sarif")
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(SCHEMA), str(tmp_path / "found.sarif")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    check_writable(tmp_path / "found.sarif", "--sarif")  # a later verification may replace it


def test_a_finding_is_at_its_first_line_and_related_to_the_others(made: Any) -> None:
    located = replace(made.loss_scaling, stage="loss", locations=LINES)
    (result,) = results_of(to_sarif(made.verdict(made.divergent(causes=[located]))))
    where = result["locations"][0]["physicalLocation"]
    assert where == {
        "artifactLocation": {"uri": "src/train.py"},
        "region": {"startLine": 63, "snippet": {"text": "loss = tf.reduce_mean(losses)"}},
    }
    assert result["relatedLocations"] == [{"physicalLocation": {"artifactLocation": {"uri": "train.ipynb"}}}]
    assert (result["ruleId"], result["level"], result["properties"]["stage"]) == ("loss-scaling", "error", "loss")
    assert result["message"]["text"].startswith(located.summary)


def test_several_topologies_with_the_same_finding_are_one_result(made: Any) -> None:
    log = to_sarif(made.verdict(made.divergent("1x4"), made.divergent("2x2"), made.equivalent("1x1")))
    (result,) = results_of(log)
    assert result["properties"]["topologies"] == ["1x4", "2x2"]
    (rule,) = log["runs"][0]["tool"]["driver"]["rules"]
    assert rule["id"] == "loss-scaling"
    assert rule["helpUri"].endswith("/loss-scaling.html")


def test_what_does_not_decide_is_a_warning_or_a_note(made: Any) -> None:
    causes = [made.batchnorm, replace(made.loss_scaling, allowed=True)]
    results = results_of(to_sarif(made.verdict(made.divergent(causes=causes))))
    assert [result["level"] for result in results] == ["warning", "note"]


def test_a_program_that_raised_is_a_result_at_the_line_where_it_did(made: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\nraise ValueError('no')\n")
    failure = f'Traceback (most recent call last):\n  File "{script}", line 2, in <module>\nValueError: no'
    (result,) = results_of(to_sarif(made.verdict(made.divergent(verdict="failed", causes=[], failure=failure))))
    assert result["message"]["text"] == "ValueError: no"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 2


def test_the_log_is_strict_json(made: Any) -> None:
    assert json.loads(json.dumps(to_sarif(made.verdict()), allow_nan=False))["version"] == "2.1.0"
