"""What is verified: the programs, the package of each, and the faults that gpudist found in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
TOPOLOGIES = ("1x4", "2x1")


@dataclass(frozen=True)
class Finding:
    """A fault of a package, shown on the page while gpudist reports its cause.

    Attributes:
        cause: The code of the cause that gpudist reports.
        text: Sentences with the version and the line of the package.
    """

    cause: str
    text: str


@dataclass(frozen=True)
class Case:
    """One program with its arguments.

    Attributes:
        name: Its name on the command line.
        package: The package on PyPI.
        environment: The name of the file in `requirements`, and of the virtual environment.
        trains: The classes of the package that train, for the page.
        arguments: The program's arguments.
        program: The file in `programs`, without its ending. Default: the name.
        finding: A fault of the package.
        python: The Python of the environment.
    """

    name: str
    package: str
    environment: str
    trains: str
    arguments: tuple[str, ...] = ()
    program: str = ""
    finding: Finding | None = None
    python: str = "3.11"

    @property
    def path(self) -> Path:
        """The program's file."""
        return PROGRAMS / f"{self.program or self.name}.py"

    @property
    def requirements(self) -> Path:
        """The file with the pinned versions."""
        return HERE / "requirements" / f"{self.environment}.txt"


CASES = {
    case.name: case
    for case in (
        Case("tfrs_ranking", "tensorflow-recommenders", "recommenders", "`experimental.models.Ranking`"),
        Case(
            "tfrs_retrieval",
            "tensorflow-recommenders",
            "recommenders",
            "`tasks.Retrieval`",
            finding=Finding(
                "in-batch-negatives",
                "tensorflow-recommenders 0.7.7 takes as negatives only the other examples of the same replica "
                "(`tasks/retrieval.py:178`). With N replicas each example has N times fewer negatives.",
            ),
        ),
    )
}
