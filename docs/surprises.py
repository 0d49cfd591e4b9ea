"""Write `docs/explanation/surprises.md` from the headers of the scripts in `findings/`: `python -m docs.surprises`.

With `--check` it writes nothing, and fails if the page is out of date.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "surprises.md"
SCRIPTS = "https://github.com/gpudist/gpudist/blob/main/findings"
FIELDS = ("Guess", "What happens", "Why", "Workaround", "Versions", "Seen")
INTRODUCTION = """# Surprises of TensorFlow and Keras

A good engineer guesses wrong here. For each surprise this page has the guess, what happens instead, and the place in the source
that explains it. gpudist is not needed to see one: each script in `findings/` installs the named versions and runs on CPUs.
`make findings` runs them all, and fails if a surprise is gone. `make findings NEWEST=1` takes the newest versions.

The page is written from the headers of these scripts by `python -m docs.surprises`.
"""


def page() -> str:
    """Return the page, with a section for each script."""
    return "\n".join([INTRODUCTION, *(section(script) for script in sorted((ROOT / "findings").glob("*.sh")))])


def section(script: Path) -> str:
    """Return the section of a script.

    Raises:
        ValueError: If the header does not have a title and each field once, in order.
    """
    lines = script.read_text(encoding="utf-8").splitlines()[1:]
    header = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[: _first_command(lines)])
    title, *texts = re.split(rf"^({'|'.join(FIELDS)}):", header, flags=re.MULTILINE)
    fields = dict(zip(texts[::2], texts[1::2], strict=True))
    if tuple(texts[::2]) != FIELDS or not title.strip():
        raise ValueError(
            f"A header must have a title and {', '.join(FIELDS)}. Received: {script.name}: {', '.join(texts[::2])}"
        )
    what, _, output = fields.pop("Seen").strip().partition("\n    ")
    versions = " ".join(fields.pop("Versions").split())
    paragraphs = "\n\n".join(f"**{name}:** {text.strip()}" for name, text in fields.items())
    heading = " ".join(title.split()).removesuffix(".")
    return (
        f"## {heading}\n\n{paragraphs}\n\n**Seen** with {versions} by [{script.name}]({SCRIPTS}/{script.name}): {what}\n\n"
        f"```\n{textwrap.dedent('    ' + output)}\n```\n"
    )


def _first_command(lines: list[str]) -> int:
    return next(number for number, line in enumerate(lines) if not line.startswith("#"))


def main(arguments: list[str]) -> int:
    """Write or check the page, and return the exit code."""
    text = page()
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is out of date. Run: python -m docs.surprises", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
