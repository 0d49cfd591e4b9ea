"""What holds for the house as a whole: what importing it costs, and what its modules are allowed to touch."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import emulate
import gpudist_core

ROOT = Path(__file__).resolve().parents[1]


def modules_of_emulate() -> list[str]:
    found = pkgutil.walk_packages(emulate.__path__, "emulate.")
    return ["emulate", *(module.name for module in found if module.name != "emulate.__main__")]


def test_importing_any_module_of_emulate_imports_no_tensorflow() -> None:
    code = (
        f"import importlib, sys\nfor name in {modules_of_emulate()!r}:\n    importlib.import_module(name)\n"
        "    heavy = {'tensorflow', 'keras', 'tf_keras'} & sys.modules.keys()\n    assert not heavy, (name, heavy)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def private_imports(text: str) -> list[str]:
    """The private modules of TensorFlow and Keras that a file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{name.name}" for name in node.names]
    return [name for name in names if re.match(r"(tensorflow\.python|keras\.src|tf_keras\.src)\b", name)]


@pytest.mark.parametrize("package", ["emulate", "gpudist_core"])
def test_private_names_of_tensorflow_and_keras_stand_in_upstream_files_alone(package: str) -> None:
    touching = {
        str(path.relative_to(ROOT)): private_imports(path.read_text())
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "upstream.py" and path.parent.name != "upstream"
    }
    assert {path: names for path, names in touching.items() if names} == {}


@pytest.mark.parametrize("package", [emulate, gpudist_core])
def test_what_is_public_is_listed_although_it_is_loaded_when_it_is_used(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))


def test_every_package_is_marked_as_typed() -> None:
    assert [package for package in ("emulate", "gpudist_core") if not (ROOT / package / "py.typed").exists()] == []


def test_the_documentation_has_the_figures_that_were_measured() -> None:
    from benchmarks.table import PAGE, RESULTS, in_page

    text = PAGE.read_text()
    assert in_page(text, json.loads(RESULTS.read_text())) == text


def test_the_changelog_has_a_section_for_the_version() -> None:
    [version] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
