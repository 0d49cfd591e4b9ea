"""Find the example programs and their data: beside this file in an installed package, `fixtures/` in a source checkout."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("bugs", "data", "programs", "recipes", "recoveries")


def examples_folder() -> Path:
    """Return the folder that holds `FOLDERS`."""
    # pyproject.toml copies fixtures/ into the wheel. A checkout, also an editable install, has only the original.
    here = Path(__file__).resolve().parent
    return here if (here / "programs").is_dir() else here.parents[1] / "fixtures"
