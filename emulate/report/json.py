"""Write the verdict as one strict JSON object to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.report.files import write_whole

if TYPE_CHECKING:
    from emulate.verify.verdict import Verdict


def write_json(verdict: Verdict, path: Path) -> None:
    """Write the verdict; a reader of the file sees all of it or nothing."""
    write_object(verdict.to_json(), path)


def write_object(content: Mapping[str, Any], path: Path) -> None:
    """Write one JSON object, as a verdict is written."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
