"""Texts of the report as HTML: what stands in backticks, and indented lines, are code."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from emulate.report.page import clean, is_code

if TYPE_CHECKING:
    from markupsafe import Markup

_INLINE_CODE = re.compile(r"`([^`\n]+)`")


def marked_up(text: str) -> Markup:
    """Return a text as HTML.

    Args:
        text: Lines that are indented by four spaces are code, and so is what stands in backticks.

    Returns:
        HTML; everything else in the text is escaped.
    """
    from markupsafe import Markup, escape

    parts = []
    for code, lines in groupby(clean(text).splitlines(), key=is_code):
        if code:
            block = "\n".join(line[4:] for line in lines)
            parts.append(f"<pre>{escape(block)}</pre>")
        else:
            parts.append(_INLINE_CODE.sub(r"<code>\1</code>", str(escape("\n".join(lines)))))
    return Markup("".join(parts))
