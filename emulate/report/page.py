"""Build a report from lines of styled text, before it goes to a terminal or into a string."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TextIO

Span = tuple[str, str]
_PLAIN = str.maketrans("✔✘●◆▲■░·│└─", "+xox^#:.|+-")
"""Replacement of marks that the encoding of the stream lacks. A question mark is itself a mark."""
PLAIN_WIDTH = 100
_WIDEST = 120
_CODE = 4  # a line indented by this much is code, or a table: it is not wrapped
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_JOINT = "\x00"  # `clean` has removed those of the text
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


def clean(text: str) -> str:
    """Remove terminal control sequences: a program's output must not change the user's screen."""
    return _CONTROL.sub("", text)


@dataclass
class Page:
    """Hold lines, each a list of (text, style); a style is a word or two as rich knows them, or empty.

    Attributes:
        width: Columns to wrap at. A word longer than that stays whole, so that it can be copied.
    """

    width: int = PLAIN_WIDTH
    lines: list[list[Span]] = field(default_factory=list)

    def line(self, *spans: Span | str) -> None:
        """Add one line, not wrapped."""
        self.lines.append([(clean(s), "") if isinstance(s, str) else (clean(s[0]), s[1]) for s in spans])

    def blank(self) -> None:
        """Add an empty line, unless there is one or nothing above."""
        if self.lines and self.lines[-1]:
            self.lines.append([])

    def text(self, text: str, indent: int = 0, style: str = "") -> None:
        """Add text, wrapped and indented; its own line breaks and indentations stay."""
        self.labelled("", text, indent, indent, style)

    def labelled(self, label: str, text: str, indent: int, column: int, style: str = "", label_style: str = "") -> None:
        """Add text at a column, with a label before its first line. Code that is too wide there begins further left."""
        parts = clean(text).splitlines() or [""]
        is_too_wide = column + max((len(part) for part in parts if is_code(part)), default=0) > self.width
        for number, part in enumerate(parts):
            begins_left = is_too_wide and number > 0 and is_code(part)
            for inner, wrapped in enumerate(self._wrap(part, column)):
                first = number == inner == 0
                front = (" " * indent + (label if first else "")).ljust(indent if begins_left else column)
                self.lines.append([(front, label_style if first else ""), (wrapped, style)])

    def _wrap(self, text: str, column: int) -> list[str]:
        if is_code(text):
            return [text]
        own = text[: len(text) - len(text.lstrip())]
        width = max(24, self.width - column)
        wrapped = textwrap.wrap(
            _INLINE_CODE.sub(lambda span: _joined(span[0]) if len(span[0]) <= width else span[0], text.strip()),
            width,
            initial_indent=own,
            subsequent_indent=own + "  " * text.lstrip().startswith("- "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [line.replace(_JOINT, " ") for line in wrapped] or [""]

    def verbatim(self, text: str, indent: int = 0, style: str = "") -> None:
        """Add text line by line, indented, not wrapped (tracebacks, code)."""
        for part in clean(text).rstrip().splitlines():
            self.lines.append([(" " * indent + part, style)])

    def plain(self) -> str:
        """Return the page as a string without any style or final newline."""
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self.lines).rstrip()

    def print(self, stream: TextIO | None = None) -> None:
        """Write the page: with colour on a terminal, plain elsewhere."""
        stream = stream or sys.stdout
        if not stream.isatty():
            stream.write(_encodable(self.plain(), stream) + "\n")
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False)
        for line in self.lines:
            console.print(Text.assemble(*((_encodable(text, stream), style) for text, style in line)), soft_wrap=True)


def _joined(code: str) -> str:
    """Return code as one word, which is not broken at its spaces."""
    return code.replace(" ", _JOINT)


def is_code(line: str) -> bool:
    """Return whether a line of a text is code."""
    return line.startswith(" " * _CODE)


def width_of(stream: TextIO) -> int:
    """Return the number of columns to write on this stream."""
    if not stream.isatty():
        return PLAIN_WIDTH
    from rich.console import Console

    return min(_WIDEST, Console(file=stream).width)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text
