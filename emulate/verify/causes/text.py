"""Read the text of a cause: one Markdown file in `texts/`, which the command and the documentation share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("texts")
GENERAL = ""
"""Heading of the fix for most programs, which comes first."""
WRONG, RIGHT, EVIDENCE, FIX, LINKS = SECTIONS = (
    "Wrong",
    "Right",
    "How gpudist recognizes it",
    "How to fix it",
    "See also",
)
_FENCE = "```"
_LINK = re.compile(r"\[([^\]]+)\]\((https?://[^)]+)\)")


@dataclass(frozen=True)
class CauseText:
    """Hold the text of a cause in Markdown; `plain` turns it into text for a terminal.

    Attributes:
        title: A few words.
        meaning: What goes wrong, and why.
        wrong: Code that has the cause; empty where a few lines cannot show it.
        right: The same code without the cause.
        evidence: How gpudist recognizes it.
        fixes: The general fix under `GENERAL`, then others by the heading that says when they suit.
        links: Issues and documentation elsewhere.
    """

    title: str
    meaning: str
    evidence: str
    wrong: str = ""
    right: str = ""
    fixes: Mapping[str, str] = field(default_factory=dict)
    links: str = ""


@cache
def read(code: str) -> CauseText:
    """Return the text of the cause with this code."""
    return parse((FOLDER / f"{code}.md").read_text(encoding="utf-8"))


def parse(markdown: str) -> CauseText:
    """Return the parts of a cause's file.

    Args:
        markdown: A title, the meaning, and the sections of `SECTIONS` in this order; the evidence and the fix are required.

    Returns:
        The parts.

    Raises:
        ValueError: When there is no title, or a section is unknown or in the wrong place.
    """
    title, _, body = markdown.partition("\n")
    (_, meaning), *sections = _split(body, "## ")
    names = [name for name, _ in sections]
    if not title.startswith("# ") or names != [name for name in SECTIONS if name in names]:
        raise ValueError(f"A title and some of {SECTIONS} must come in this order. Received: {title!r}, {names}.")
    of = dict(sections)
    return CauseText(
        title=title.removeprefix("# "),
        meaning=meaning,
        evidence=of[EVIDENCE],
        wrong=code_of(of.get(WRONG, "")),
        right=code_of(of.get(RIGHT, "")),
        fixes=dict(_split(of[FIX], "### ")),
        links=of.get(LINKS, ""),
    )


def _split(markdown: str, mark: str) -> list[tuple[str, str]]:
    """Return (heading, text) of each part that such a heading begins; the text before the first has the heading `GENERAL`."""
    parts: list[tuple[str, list[str]]] = [(GENERAL, [])]
    is_code = False
    for line in markdown.splitlines():
        is_code ^= line.startswith(_FENCE)
        if line.startswith(mark) and not is_code:  # a comment of Python begins with "# " too
            parts.append((line.removeprefix(mark).strip(), []))
        else:
            parts[-1][1].append(line)
    return [(heading, "\n".join(lines).strip()) for heading, lines in parts]


def code_of(markdown: str) -> str:
    """Return the code of a section without its fences."""
    return "\n".join(line for line in markdown.splitlines() if not line.startswith(_FENCE))


def plain(markdown: str) -> str:
    """Return Markdown as text: a line for each paragraph, code indented by four spaces, `name: address` for a link."""
    return "\n".join(_lines(markdown))


def _lines(markdown: str) -> Iterator[str]:
    paragraph: list[str] = []
    is_code = False
    for line in [*markdown.splitlines(), ""]:
        is_fence = line.startswith(_FENCE)
        if paragraph and (is_fence or not line.strip() or line.startswith("- ")):
            yield _LINK.sub(r"\1 <\2>", " ".join(paragraph))
            paragraph = []
        if is_fence:
            is_code = not is_code
        elif is_code:
            yield ("    " + line).rstrip()
        elif line.strip():
            paragraph.append(line.strip())
