"""What is verified: the programs, the package of each, and the faults that gpudist found in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
CHECKS = HERE / "checks"
TOPOLOGIES = ("1x4", "2x1")


@dataclass(frozen=True)
class Finding:
    """A fault of a package, shown on the page while gpudist reports its causes.

    Attributes:
        causes: The codes of the causes, of which gpudist reports one on each topology.
        text: Sentences with the version and the line of the package, and with names of the check's figures in braces.
    """

    causes: tuple[str, ...]
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
        checked: Plain TensorFlow shows the fault, too: a file in `checks` with the name of the case.
        python: The Python of the environment.
    """

    name: str
    package: str
    environment: str
    trains: str
    arguments: tuple[str, ...] = ()
    program: str = ""
    finding: Finding | None = None
    checked: bool = False
    python: str = "3.11"

    @property
    def path(self) -> Path:
        """The program's file."""
        return PROGRAMS / f"{self.program or self.name}.py"

    @property
    def check(self) -> Path | None:
        """The program of plain TensorFlow that shows the fault."""
        return CHECKS / f"{self.name}.py" if self.checked else None

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
                ("in-batch-negatives",),
                "tensorflow-recommenders 0.7.7 takes as negatives only the other examples of the same replica "
                "(`tasks/retrieval.py:178`). With N replicas each example has about N times fewer negatives.",
            ),
        ),
        Case(
            "masked_lm",
            "tf-models-official",
            "models",
            "`MaskedLMTask`, orbit",
            finding=Finding(
                ("local-normalization",),
                "tf-models-official 2.20.0 divides by the replica's own number of masked tokens "
                "(`nlp/tasks/masked_lm.py:91`), so tokens on different replicas have different weights. By default "
                "it also adds up the replicas' losses without a division by their number (`scale_loss`, line 48).",
            ),
        ),
        Case(
            "gnn",
            "tensorflow-gnn",
            "gnn",
            "`runner.run`, `KerasTrainer`, `RootNodeMulticlassClassification`",
            finding=Finding(
                ("unseeded-randomness",),
                "tensorflow-gnn 1.0.3 parses and prepares batches with `deterministic=False` "
                "(`runner/utils/parsing.py:49`, `runner/orchestration.py:289`). Two runs with the same seed train on "
                "the batches in different orders.",
            ),
        ),
        Case(
            "gnn_ordered",
            "tensorflow-gnn",
            "gnn",
            "the same, with `enable_op_determinism()`",
            arguments=("ordered",),
            program="gnn",
        ),
        Case(
            "privacy",
            "tensorflow-privacy",
            "privacy",
            "`DPSequential`",
            finding=Finding(
                ("unexplained", "loss-scaling"),
                "tensorflow-privacy 0.9.0 clips the gradients of a loss that Keras has already divided by the number of "
                "replicas (`privacy/keras_models/dp_keras_model.py:191`), so N replicas clip each example at N times "
                "`l2_norm_clip`. Plain TensorFlow shows it: the weights of four replicas that clip at 1 differ by "
                "{same_clip:.1g} from those of one device that clips at 1, and by {clip_times_four:.1g} from those of "
                "one device that clips at 4. The verdicts are right, but the causes are not: gpudist reports "
                "`unexplained` on four replicas and `loss-scaling` on two, and should name this clipping. "
                "This is an open fault of gpudist.",
            ),
            checked=True,
        ),
    )
}
