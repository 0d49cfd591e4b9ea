"""Fill a template: the text of a page that needs nothing beside itself.

In the report's texts what stands in backticks, and indented lines, are code.
"""

from __future__ import annotations

import base64
import importlib.util
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulate.errors import UsageError
from emulate.report.page import clean, is_code

if TYPE_CHECKING:
    from markupsafe import Markup

_LIBRARIES = ("jinja2", "matplotlib")


def check_libraries() -> None:
    """Find out before the work starts whether a page can be made.

    Raises:
        UsageError: When a library is not installed.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--html needs {' and '.join(_LIBRARIES)}. Received: {' and '.join(missing)} not installed. "
            'Install them: pip install "gpudist[html]". Or leave --html out: --json needs nothing.'
        )


def filled(template: str, **values: Any) -> str:
    """Return the text of a page; what stands in values is escaped.

    Args:
        template: The name of its file in this folder.
        **values: What it shows.

    Returns:
        HTML.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    return environment.get_template(template).render(marked_up=marked_up, **values)


def image(svg: str) -> str:
    """Return an SVG as a data URL, so that names in two pictures do not collide."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


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
