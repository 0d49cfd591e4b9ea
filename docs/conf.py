"""Configure Sphinx for `make docs` and Read the Docs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # autodoc imports gpudist_core, which imports TensorFlow
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

project = "gpudist"
author = "The gpudist authors"
copyright = "2026, the gpudist authors"  # noqa: A001 (Sphinx's name)
REPOSITORY = "https://github.com/gpudist/gpudist"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "causes",
    "command_line",
    "layers",
]
exclude_patterns = ["_build", "explanation/layers.md", "compat_table.md", "gallery_arms.md", "plan_accuracy.md", "outputs"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False  # "--steps" keeps its hyphens
# Links to functions, pages and headings must exist. Annotations also name classes that are not public, or not ours.
nitpicky = True
suppress_warnings = ["ref.python"]  # both packages have an error UsageError and an error Unavailable
nitpick_ignore_regex = [("py:(class|exc)", ".*")]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
add_module_names = False
default_role = "code"  # docstrings mark code as Markdown does
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "gpudist"
html_static_path = ["_static"]
html_css_files = ["gpudist.css"]
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True


def as_restructured_text(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Keep `[*ids, dim]` from being read as emphasis, and a letter from following code: docstrings are plain text."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...", "*")):
            lines[number] = re.sub(r"(`[^`]*`)(?=\w)|(`[^`]*`)|\*", _escaped, line)


def _escaped(match: re.Match[str]) -> str:
    if match[1]:
        return match[1] + "\\ "
    return match[2] or r"\*"


def setup(sphinx: Any) -> None:
    """Read docstrings before napoleon does (priority 500)."""
    sphinx.connect("autodoc-process-docstring", as_restructured_text, priority=400)
