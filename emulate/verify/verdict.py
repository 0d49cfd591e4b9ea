"""Define the verdict: the result of a verification as plain data, for reports and `--json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from emulate.told import Told

SCHEMA = "gpudist.verdict/1"
PAGES = "https://gpudist.readthedocs.io/en/latest/causes/"
"""The folder of the pages of all causes."""
BY_DESIGN = "by-design"
"""Verdict if all deciding causes are by design of TensorFlow and Keras."""
_EXIT_CODES = {"divergent": 1, "unverified": 1, "failed": 3, "hung": 4, "unavailable": 5, BY_DESIGN: 0, "equivalent": 0}
"""The order decides: the first verdict here that has the exit code of the command is the overall one."""
OF_REFERENCE = "reference"
"""Reason of a run that ended well, but gets the verdict failed or hung from the reference."""


def url_of(code: str) -> str:
    """Return the address of the page of a cause."""
    return f"{PAGES}{code}.html"


STAGES = ("examples", "loss", "gradient", "given", "sum", "update", "assigned", "reported", "start", "ending")
"""The stages of a step, in their order, with what lies before the first and after the last."""


@dataclass(frozen=True)
class Location:
    """Describe a line of the user's program.

    Attributes:
        file: Relative to the current folder where the file is in it.
        line: Its number, from 1; in a notebook that within its cell.
        text: The line without its indentation.
        cell: The number of the notebook's cell, None elsewhere.
    """

    file: str
    line: int
    text: str = ""
    cell: int | None = None

    @property
    def place(self) -> str:
        """Return `train.py:63`, or `train.ipynb, cell 3:5`."""
        return f"{self.file}:{self.line}" if self.cell is None else f"{self.file}, cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """Describe one cause that was found, with the numbers that led to it.

    Attributes:
        code: The stable kebab-case code of the cause.
        summary: One sentence: what is wrong in this program.
        evidence: The numbers that led to it.
        fix: What to change.
        by_design: True for a difference that every user of tf.distribute gets (BatchNormalization for each replica).
        allowed: True if the user allowed it (`--allow CODE`): it is reported, but does not decide.
        advice: True if the same model is trained anyway (it only costs time, or one device has it, too): it does not decide.
        stage: The stage of the step in which it arises, one of `STAGES`; None where that cannot be said.
        locations: The lines to blame, the likeliest first; empty where that cannot be said.
        fixes: The headings of the fixes in the text, as in the cause's page and `gpudist causes --json`; "" is the general one.
        location: The first of them, or None.
        url: The page of the cause, with wrong and right code.
    """

    code: str
    summary: str
    evidence: str
    fix: str
    by_design: bool = False
    allowed: bool = False
    advice: bool = False
    stage: str | None = None
    locations: tuple[Location, ...] = ()
    fixes: tuple[str, ...] = ()
    location: Location | None = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", next(iter(self.locations), None))
        object.__setattr__(self, "url", url_of(self.code))


@dataclass(frozen=True)
class Difference:
    """Describe one tensor in one step, with its error against the noise floor.

    Attributes:
        tensor: The variable's path in the model, or the name of a loss or metric.
        kind: `initial-weight`, `gradient`, `weight`, `variable`, `loss`, `metric`, `final-weight` or `data`.
        step: The step, counted from 0.
        error: The largest absolute difference from the reference.
        noise: The noise floor of this tensor at this step, in the same unit.
        value: The element that differs most, in the topology. `reference_value`: the same element in the reference.
        report: The index of the report among those with its name, from 0, if that is not the number of its step.
    """

    tensor: str
    kind: str
    step: int
    error: float
    noise: float
    replica: int | None = None
    host: int | None = None
    optimizer: str | None = None
    value: float | None = None
    reference_value: float | None = None
    non_finite: bool = False
    report: int | None = None


@dataclass(frozen=True)
class Samples:
    """Describe the data ledger in four numbers: examples of the reference, seen, missing, and seen too often."""

    reference: int = 0
    seen: int = 0
    missing: int = 0
    repeated: int = 0


@dataclass(frozen=True)
class Farthest:
    """Describe the largest difference of one kind in one step. All of them show where a run leaves the noise.

    Attributes:
        kind: As in `Difference`.
        step: The training step, counted from 0. With more than `MOST_STEPS` steps: the one of several with the largest
            difference.
        tensor: The variable's path in the model, or the name of a loss or metric.
        error: Its largest absolute difference from the reference.
        noise: Its noise floor, in the same unit.
        non_finite: Whether exactly one side is not finite.
    """

    kind: str
    step: int
    tensor: str
    error: float
    noise: float
    non_finite: bool = False


MOST_STEPS = 400
"""Largest number of steps that the verdict lists one by one."""


@dataclass(frozen=True)
class FaultReport:
    """Describe how a program fared with a fault.

    Attributes:
        fault: The fault as it was given.
        fired: Whether it occurred.
        host: The number of its host; None for the links of all hosts.
        step: The step in which it occurred, counted from 1. If it did not occur: the requested step.
        phase: The phase of the step.
        recovered: Whether the program ended well; None if the fault did not occur.
        restarts: How often all hosts were restarted because of it.
        went_on_from: For each of these restarts, after how many steps the program continued; 0 for a new start.
        result: `identical` to the run without faults, `within-noise` or `different`; None if it is unknown.
        error: The largest difference in units of the noise, as an absolute number.
    """

    fault: str
    fired: bool
    host: int | None = None
    step: int | None = None
    phase: str | None = None
    recovered: bool | None = None
    restarts: int = 0
    went_on_from: tuple[int, ...] = ()
    result: str | None = None
    error: float | None = None


@dataclass(frozen=True)
class StepsRun:
    """Say which training steps of the program were run.

    Attributes:
        first: The first step, counted from 0.
        last: The last step, None where no step was made.
        stopped: Whether gpudist stopped the program there (`--steps`).
        epoch_batches: The number of batches in the first epoch, None where it is unknown.
        last_batch_examples: The number of examples in the last batch of an epoch, where known and smaller than in the others.
        epoch_complete: Whether the last batch of the first epoch was run, None where it is unknown.
    """

    first: int = 0
    last: int | None = None
    stopped: bool = False
    epoch_batches: int | None = None
    last_batch_examples: int | None = None
    epoch_complete: bool | None = None


@dataclass(frozen=True)
class StepGraph:
    """Say whether the graph of the step depends on the number of replicas.

    Attributes:
        text: The result in one sentence.
        same_on_replicas: Whether each replica has the same graph.
        depends_on_number: Whether it differs from that on one device; None where the replicas have different graphs.
        locations: The lines that differ or, where none does, those that use the replica's own number.
    """

    text: str
    same_on_replicas: bool
    depends_on_number: bool | None
    locations: tuple[Location, ...] = ()


@dataclass(frozen=True)
class Run:
    """Describe the verdict on one topology.

    Attributes:
        course: The largest difference in each step, kind by kind.
        rows: How many examples each replica had in each step, for at most `MOST_STEPS` steps.
        steps_run: Which steps were run.
        step_graph: Whether the graph of the step depends on the number of replicas; None where that is not known.
        non_finite_after: The step after which weights are not finite any more, on one device too; None if they are.
        not_compared_codes: The code of each sentence of `not_compared`.
        note_codes: The code of each note.
        against: What the program was given in the second arm (`--against`), which is the reference then; None without one.
    """

    topology: str
    verdict: str
    reason: str | None = None
    replicas: int = 0
    steps: int = 0
    all_reduce: str = "auto"
    samples: Samples = field(default_factory=Samples)
    worst: Difference | None = None
    first_divergence: Difference | None = None
    causes: tuple[Finding, ...] = ()
    not_compared: tuple[Told, ...] = ()
    notes: tuple[Told, ...] = ()
    seconds: float = 0.0
    failure: str | None = None
    stacks: dict[int, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    faults: tuple[FaultReport, ...] = ()
    course: tuple[Farthest, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    steps_run: StepsRun = field(default_factory=StepsRun)
    step_graph: StepGraph | None = None
    non_finite_after: int | None = None
    against: str | None = None
    not_compared_codes: tuple[str, ...] = field(init=False)
    note_codes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "not_compared_codes", _codes_of(self.not_compared))
        object.__setattr__(self, "note_codes", _codes_of(self.notes))

    @property
    def deciding(self) -> tuple[str, ...]:
        """Return the codes of the causes that decide the verdict."""
        return tuple(cause.code for cause in self.causes if not (cause.allowed or cause.advice))

    @property
    def is_of_reference(self) -> bool:
        """Return whether the reference failed or hung, while the run itself ended well."""
        return self.reason == OF_REFERENCE


@dataclass(frozen=True)
class Reference:
    """Describe what the reference did, and where: `status` is `ok`, `failed`, `hung` or `none`; `against` as of a run."""

    status: str
    steps: int = 0
    repeatable: bool = True
    failure: str | None = None
    topology: str = "1x1"
    against: str | None = None

    @property
    def where(self) -> str:
        """Return where it ran, in words."""
        return "one worker with one server" if "ps" in self.topology else "one device"


@dataclass(frozen=True)
class Fix:
    """Describe an edit that removed a cause.

    Attributes:
        code: The cause's.
        words: What the edit does.
        place: The line of the finding, `train.py:33`, in the program with the edits before this one.
        patch: Its unified diff, which follows those of the edits before it.
        form: `plain` or `core`.
        verdict_after: The verdict on the program with this edit and those before it.
        proven: Whether the program with all edits trains the same model as the unedited program does on one device.
    """

    code: str
    words: str
    place: str
    patch: str
    form: str
    verdict_after: str
    proven: bool = False


@dataclass(frozen=True)
class Verdict:
    """Hold the result of `gpudist verify`: the reference and one run for each topology.

    Attributes:
        strict: Whether the verdict `by-design` counts as a failure.
        program_starts: How often gpudist started the program, however few steps it made; on several hosts it counts once.
        evaluations: How often it evaluated kept functions of the program's steps instead.
        fixes: The edits that `gpudist verify --fix` has made in memory.
        patch: The unified diff of all of them together, where that is proven; else empty.
    """

    program: str
    seed: int
    device: str
    versions: dict[str, str]
    reference: Reference
    runs: tuple[Run, ...]
    notes: tuple[Told, ...] = ()
    strict: bool = False
    program_starts: int = 0
    evaluations: int = 0
    fixes: tuple[Fix, ...] = ()
    patch: str = ""

    @property
    def is_equivalent(self) -> bool:
        """Tell whether every topology trains the same model as one device; `by-design` counts as the same unless strict."""
        accepted = ("equivalent",) if self.strict else ("equivalent", BY_DESIGN)
        return bool(self.runs) and all(run.verdict in accepted for run in self.runs)

    @property
    def by_design(self) -> dict[str, tuple[str, ...]]:
        """Return the causes of each topology whose verdict is `by-design`."""
        return {run.topology: run.deciding for run in self.runs if run.verdict == BY_DESIGN}

    @property
    def exit_code(self) -> int:
        """Return 0 if all is well, otherwise the exit code of the most serious verdict (3, then 4, then 1, then 5)."""
        codes = set(self._codes.values())
        return next((code for code in (3, 4, 1, 5) if code in codes), 0)

    @property
    def verdict(self) -> str:
        """Return the verdict of the run that decides the exit code; `unverified` without runs."""
        return next((verdict for verdict, code in self._codes.items() if code == self.exit_code), "unverified")

    @property
    def _codes(self) -> dict[str, int]:
        codes = {**_EXIT_CODES, **({BY_DESIGN: 1} if self.strict else {})}
        return {verdict: code for verdict, code in codes.items() if verdict in {run.verdict for run in self.runs}}

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`: strict JSON (a number that is not finite becomes null)."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            **_plain(self),
            "note_codes": list(_codes_of(self.notes)),
            "against": self.reference.against,
        }


def _codes_of(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(getattr(text, "code", "") for text in texts)  # a user of the API may add a plain one


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
