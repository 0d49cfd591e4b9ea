"""The pages themselves: README is short, links lead somewhere, and what must be documented is."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpudist_core
from docs.examples import PAGES, ROOT
from emulate.verify import verdict
from emulate.verify.causes import all_causes

DOCS = "https://gpudist.readthedocs.io/en/latest/"
REPOSITORY = "https://github.com/gpudist/gpudist/"
MOST_WORDS = 900


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS


def test_the_readme_has_absolute_links_alone_as_it_is_shown_on_pypi_too() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_readme_has_the_figures_of_the_baselines() -> None:
    table = (ROOT / "docs" / "baselines.md").read_text()
    rows = re.findall(r"^\| \**([^|*]+)\** \|[^|]*\| (\d+) of (\d+) \| (\d+) of (\d+) \|", table, re.MULTILINE)
    figures = {name: tuple(map(int, numbers)) for name, *numbers in rows}
    (found, wrong, accused, right), (also, _, innocent, _) = figures["gpudist"], figures["weights, rtol=1e-05"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"[Of {wrong + right} programs]({DOCS}baselines.html) gpudist finds {found} of {wrong} wrong ones" in text
    assert f"accuses {accused} of {right} right ones. A comparison of the final weights (rtol=1e-05) finds {also} and" in text
    assert f"and accuses {innocent}." in text


def _exists(link: str) -> bool:
    if link.startswith(DOCS):
        page = link.removeprefix(DOCS).partition("#")[0].removesuffix(".html")
        causes = {"causes/index", *(f"causes/{cause.code}" for cause in all_causes())}
        return (ROOT / "docs" / f"{page}.md").is_file() or page in causes
    match = re.fullmatch(r"(?:blob|tree)/main/([^#]+)(?:#.*)?", link.removeprefix(REPOSITORY))
    return (ROOT / match[1]).exists() if match else True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_to_our_own_pages_and_files_leads_somewhere(page: Path) -> None:
    links = re.findall(rf"(?:{DOCS}|{REPOSITORY})[^\s)\"]+", page.read_text())
    assert [link for link in links if not _exists(link)] == []


def test_every_key_of_the_json_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "json.md").read_text()
    objects = [one for one in vars(verdict).values() if isinstance(one, type) and dataclasses.is_dataclass(one)]
    keys = {field.name for one in objects for field in dataclasses.fields(one)}
    assert len(objects) > 5
    assert {key for key in keys if f"`{key}`" not in text} == set()


def test_every_public_name_of_gpudist_core_is_in_its_reference() -> None:
    text = (ROOT / "docs" / "reference" / "gpudist_core.md").read_text()
    assert [name for name in gpudist_core.__all__ if f"gpudist_core.{name}\n" not in text] == []


def _shown_in_the_reference() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The public functions and methods of what the reference has, by their names."""
    pages = [(ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in ("emulate", "gpudist_core")]
    shown = {name.rpartition(".")[2] for page in pages for name in re.findall(r"^\.\. auto\w+:: (\S+)", page, re.MULTILINE)}
    for file in (path for package in ("emulate", "gpudist_core") for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in shown:
                parts = [node] if isinstance(node, ast.FunctionDef) else node.body
                public = [one for one in parts if isinstance(one, ast.FunctionDef) and not re.match("_(?!_call)", one.name)]
                yield from ((f"{file.relative_to(ROOT)}: {node.name}: {one.name}", one) for one in public)


def test_no_colon_makes_sphinx_take_what_a_function_returns_for_a_type() -> None:
    split: list[str] = []
    shown = list(_shown_in_the_reference())
    for name, function in shown:
        docstring = ast.get_docstring(function) or ""
        is_property = any("property" in ast.unparse(decorator) for decorator in function.decorator_list)
        returned = re.search(r"^Returns:\n(.*)", docstring, re.MULTILINE)
        lines = [docstring.partition("\n")[0]] * is_property + ([returned[1]] if returned else [])
        split += [name for line in lines if re.search(r":(?!\w)|\[\w*:", line)]
    assert len(shown) > 50
    assert split == []


def _texts_of_the_sources() -> str:
    """Return all texts in the code of both packages; parts of a text that change are left out, as between `...` on the page."""
    files = [path for package in ("emulate", "gpudist_core") for path in sorted((ROOT / package).rglob("*.py"))]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_the_messages_of_the_troubleshooting_page_are_those_that_users_meet() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    parts = [part.strip(" (),:") for message in quoted for part in message.split("...")]
    texts = _texts_of_the_sources() + "\n".join(cause.code for cause in all_causes())
    assert len(quoted) > 30
    assert [part for part in parts if part not in texts] == []
