"""Write `docs/causes/`: an index and a page for each cause, from the texts that `gpudist causes` reads too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.verify.causes.cause import EDIT, EVIDENCE, FIX, GENERAL, LINKS, RIGHT, WRONG

if TYPE_CHECKING:
    from sphinx.application import Sphinx

    from emulate.verify.causes import Cause

_INDEX = """# Causes

A verdict names what is wrong by one of these codes. `gpudist causes CODE` shows the same text as its page.

| code | what is wrong |
|---|---|
{rows}

```{{toctree}}
:hidden:

{pages}
```
"""
_SIDE_BY_SIDE = """````{{grid}} 1 1 2 2
:gutter: 2

```{{grid-item}}
**{wrong_title}**
{wrong}
```

```{{grid-item}}
**{right_title}**
{right}
```
````
"""


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages before Sphinx looks for its sources."""
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "causes"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(folder: Path) -> None:
    """Write the index and a page for each cause; a page that is the same stays as it is, so that Sphinx does not read it again.

    Args:
        folder: The folder of the pages, which holds nothing else.
    """
    from emulate.verify.causes import all_causes

    causes = sorted(all_causes(), key=lambda cause: cause.code)
    pages = {f"{cause.code}.md": page_of(cause) for cause in causes}
    pages["index.md"] = _INDEX.format(
        rows="\n".join(f"| [{cause.code}]({cause.code}.md) | {cause.text.title}{_kind(cause)} |" for cause in causes),
        pages="\n".join(cause.code for cause in causes),
    )
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def page_of(cause: Cause) -> str:
    """Return the page of a cause."""
    return "\n\n".join(_parts(cause)) + "\n"


def _parts(cause: Cause) -> Iterator[str]:
    text = cause.text
    yield f"# {text.title}"
    yield f"`{cause.code}`{_kind(cause)}"
    yield text.meaning
    if text.wrong:
        yield _SIDE_BY_SIDE.format(
            wrong_title=WRONG, wrong=_indented_fence(text.wrong), right_title=RIGHT, right=_indented_fence(text.right)
        )
    yield f"## {EVIDENCE}\n\n{text.evidence}"
    yield f"## {FIX}\n\n{text.fixes[GENERAL]}"
    for heading, fix in text.fixes.items():
        if heading != GENERAL:
            yield f"### {heading}\n\n{fix}"
    if text.edit:
        yield f"## {EDIT}\n\n{text.edit}"
    if text.links:
        yield f"## {LINKS}\n\n{text.links}"


def _indented_fence(code: str) -> str:
    """Return code between tildes, which may stand inside of a directive between backticks."""
    return f"~~~python\n{code}\n~~~"


def _kind(cause: Cause) -> str:
    return " (advice: the same model is trained)" if cause.advice else " (by design)" if cause.by_design else ""
