"""Build a report from lines of styled text, before it goes to a terminal or into a string.

The words, marks and numbers of all reports are here, too.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from emulate.told import counted, number

if TYPE_CHECKING:
    from emulate.verify.verdict import Difference

Span = tuple[str, str]
_PLAIN = str.maketrans("✔✘●◆▲■░·│└─", "+xox^#:.|+-")
"""Replacement of marks that the encoding of the stream lacks. A question mark is itself a mark."""
PLAIN_WIDTH = 100
_WIDEST = 120
_CODE = 4  # a line indented by this much is code, or a table: it is not wrapped
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_JOINT = "\x00"  # in place of spaces of code, which is not broken there; `clean` has removed those of the text
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
        for at, part in enumerate(parts):
            begins_left = is_too_wide and at > 0 and is_code(part)
            for inner, wrapped in enumerate(self._wrap(part, column)):
                first = at == inner == 0
                front = (" " * indent + (label if first else "")).ljust(indent if begins_left else column)
                self.lines.append([(front, label_style if first else ""), (wrapped, style)])

    def _wrap(self, text: str, column: int) -> list[str]:
        if is_code(text):
            return [text]
        own = text[: len(text) - len(text.lstrip())]
        width = max(24, self.width - column)
        wrapped = textwrap.wrap(
            _INLINE_CODE.sub(lambda span: span[0].replace(" ", _JOINT) if len(span[0]) <= width else span[0], text.strip()),
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


_LOOKS = {
    "equivalent": ("✔", "green"),
    "by-design": ("!", "yellow"),
    "divergent": ("✘", "red"),
    "failed": ("✘", "red"),
    "hung": ("✘", "red"),
    "unverified": ("?", "yellow"),
    "unavailable": ("-", "yellow"),
}
_ON_PAPER = {"green": "#2b8a3e", "yellow": "#a36a00", "red": "#c92a2a"}
MARKS = {verdict: mark for verdict, (mark, _) in _LOOKS.items()}
STYLES = {verdict: f"bold {colour}" for verdict, (_, colour) in _LOOKS.items()}
COLOURS = {verdict: _ON_PAPER[colour] for verdict, (_, colour) in _LOOKS.items()}
DIVERGES = ("divergent", "by-design")
"""The verdicts of runs that differ from the reference."""
_KINDS = {
    "gradient": "the gradient of {}",
    "weight": "the weight {}",
    "variable": "the variable {}",
    "initial-weight": "the initial weight {}",
    "final-weight": "the final weight {}",
}


def tensor(difference: Difference) -> str:
    """Return what differs: `the gradient of dense/kernel`."""
    return _KINDS.get(difference.kind, difference.kind + " {}").format(difference.tensor)


def where(difference: Difference) -> str:
    """Return where it differs: `at step 3, replica 1, optimizer adam`, `at report 1 (after step 15)`, `after all 16 steps`."""
    step = f"step {difference.step}"
    parts = [f"at {step}" if difference.report is None else f"at report {difference.report} (after {step})"]
    if difference.kind == "final-weight":
        parts = [f"after all {counted(difference.step, 'step')}"]
    for name in ("replica", "host", "optimizer"):
        value = getattr(difference, name)
        if value is not None:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def against_noise(difference: Difference) -> str:
    """Return the error and its ratio: `error 0.38, 3.8e+06 times the noise (1e-07)`."""
    if difference.non_finite:
        return "not finite"
    error, noise = difference.error, difference.noise
    if not noise or not math.isfinite(error / noise):
        return f"error {number(error)}, noise {number(noise)}"
    return f"error {number(error)}, {number(error / noise)} times the noise of {number(noise)}"
