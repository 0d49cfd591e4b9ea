"""The examples of README and documentation: every fenced block, with the mark above it that says how a test checks it.

A mark is an HTML comment on the line before the fence:

- `<!-- from: FILE -->`: its lines stand in FILE in this order; `...` leaves lines out.
- `<!-- diff: OLD NEW -->`: lines with `-` stand in OLD, lines with `+` in NEW; `...` leaves lines out.
- `<!-- printed by: FILE -->`: FILE is the test that makes pytest print this.
- `<!-- needs: a GPU -->` (an account, a server, a package index, root, a script of its own): a test does not run it.
- no mark: Python runs, on two emulated devices, with `PRELUDE` and the blocks before it on the page; commands are parsed by the
  command line itself; TOML is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in ROOT.glob("docs/**/*.md") if page.parent.name not in ("causes", "_build")),
)
NEEDS = ("a GPU", "an account", "a server", "a package index", "root", "a script of its own")
PRELUDE = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
images = np.random.default_rng(2).normal(size=(200, 64)).astype("float32")
labels = (images.sum(axis=1) > 0).astype("int64")


def build_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(2, activation="softmax")])


def augment(image, label):
    return image * 2, label


def per_example_loss(y, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y, y_pred)


def train(model, strategy):
    import gpudist_core as gd

    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
    step = gd.TrainStep(model, optimizer, per_example_loss, strategy=strategy)
    data = gd.Pipeline.from_arrays((images, labels), global_batch_size=50)
    return [float(step(batch)) for batch in data.distribute(strategy)][-1]
"""
_FENCE = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The file.
        line: The line of its fence, or of the mark above.
        language: What follows the fence: `python`, `sh`, or a directive in braces.
        mark: What the comment above says; empty without one.
        text: Its lines.
    """

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for a message."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_directive(self) -> bool:
        """Sphinx reads it."""
        return self.language.startswith("{")


def blocks(page: Path) -> Iterator[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["language"].strip(), match["mark"] or "", match["text"])


def all_blocks() -> list[Block]:
    """Return the fenced blocks of all pages that people write."""
    return [block for page in PAGES for block in blocks(page) if not block.is_directive]


def programs() -> dict[str, str]:
    """Return for each page with Python that runs its name and that Python."""
    return {
        str(page.relative_to(ROOT)): text
        for page in PAGES
        if (text := "\n".join(block.text for block in blocks(page) if block.language == "python" and not block.mark))
    }


def missing_lines(wanted: list[str], file: Path) -> list[str]:
    """Return the lines that do not stand in the file, in this order; `...` leaves lines of the file out."""
    has = [_bare(line) for line in file.read_text(encoding="utf-8").splitlines()]
    at, gap, missing = 0, True, []
    for line in map(_bare, wanted):
        if not line or line == "...":
            gap = gap or line == "..."
            continue
        places = [place for place in range(at, len(has)) if has[place] == line]
        if not places or (not gap and any(has[at : places[0]])):
            missing.append(line)
            continue
        at, gap = places[0] + 1, False
    return missing


def _bare(line: str) -> str:
    """Return the line without indentation and without the comment at its end."""
    return re.sub(r"\s+#.*$", "", line).strip()
