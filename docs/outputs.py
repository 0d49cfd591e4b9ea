"""The verdicts that README and documentation show, kept as files that pages include. `make outputs` writes them again."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emulate.verify import Verdict

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "outputs"


@dataclass(frozen=True)
class Output:
    """One verdict that a page shows.

    Attributes:
        name: The file in docs/outputs, without `.txt`.
        program: The script, from the root of the repository.
        topologies: The topologies of `--topology`.
        verdict: What the program gets on each topology.
        shown_as: The name of the script on the page; the script's own by default.
        options: Other arguments of `emulate.verify`.
    """

    name: str
    program: str
    topologies: tuple[str, ...]
    verdict: str = "divergent"
    shown_as: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """The file that the page includes."""
        return FOLDER / f"{self.name}.txt"

    def verify(self, **more: Any) -> Verdict:
        """Verify the program. The current folder must be the repository's root."""
        import emulate

        verdict = emulate.verify(self.program, list(self.topologies), **self.options, **more)
        if {run.verdict for run in verdict.runs} != {self.verdict}:
            raise AssertionError(f"{self.program} must be {self.verdict}. Received:\n{self.render(verdict)}")
        return verdict

    def render(self, verdict: Verdict) -> str:
        """Return what `gpudist verify` prints."""
        from emulate.report import render

        lines = [line.rstrip() for line in render(verdict).strip().splitlines()]
        return ("\n".join(lines) + "\n").replace(self.program, self.shown_as or self.program)


KILL = {"faults": ["kill:host=1,step=8,phase=all-reduce"]}
ARMS = "fixtures/gallery/arms"
XLA = {"args": ["120993"], "against": "120993 --xla"}
OUTPUTS = (
    Output("tutorial", "fixtures/tutorial/train.py", ("1x4",), shown_as="train.py"),
    Output("tutorial_fixed", "fixtures/tutorial/train_fixed.py", ("1x4",), "equivalent", "train.py"),
    Output("loss_scaling", "fixtures/bugs/loss_scaling_multiworker.py", ("1x4", "2x2")),
    Output("recovery", "fixtures/recoveries/loses_the_optimizer.py", ("2x1",), options=KILL),
    Output("collaborative_filtering", "fixtures/gallery/collaborative_filtering.py", ("1x4",)),
    Output("custom_train_step", "fixtures/gallery/custom_train_step.py", ("1x4",)),
    Output("arms_120993", f"{ARMS}/compiled_step.py", ("1x2",), "equivalent", options=XLA),
    Output("multi_worker_shuffle", "fixtures/gallery/multi_worker_shuffle.py", ("2x2",)),
)


def comparable(text: str) -> list[str]:
    """Return the lines that are alike on all machines: versions, seconds and the digits of numbers are left out."""
    kept = [line for line in text.strip().splitlines() if not re.match(r"seed \d|   topology|\S +\d+x\d+ ", line)]
    return [re.sub(r"\d[\d.e+-]*", "N", line) for line in kept]


def write(output: Output, text: str) -> None:
    """Write the file, and README's excerpt of it: everything before the evidence of the first cause."""
    output.file.write_text(text)
    readme = ROOT / "README.md"
    mark = f"<!-- from: {output.file.relative_to(ROOT)} -->\n```text\n"
    head, found, rest = readme.read_text().partition(mark)
    if found:
        excerpt = text.partition("     evidence")[0]
        readme.write_text(f"{head}{mark}{excerpt}...\n```{rest.partition('```')[2]}")


def main() -> int:
    """Write the outputs that the command line names, or all."""
    from emulate.cluster import Preload

    wanted = sys.argv[1:] or [output.name for output in OUTPUTS]
    with Preload(modules=("emulate.verify",)) as preload:
        for output in OUTPUTS:
            if output.name in wanted:
                write(output, output.render(output.verify(preload=preload)))
                print(output.file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
