"""Judge one topology's run: the verdict, its causes, and what was not compared.

A judgement is a function of a case: of traces, and of what its lab gives when a cause asks. What is asked, in this order, and
why (the groups of causes are in `causes/catalogue.py`):

1. Has gpudist itself failed inside of the program? Its records have holes then, and no cause is looked for.
2. Do runs change each other's files? Then nothing else is told by what they did, and no run is spent on it.
3. How did the run end, and do all devices train? That is told without a number of any step.
4. On which examples and weights are the numbers compared (`Case.choose_base`)? As they came; on the examples of the run, where
   they are others; or only up to the step from which on they cannot be compared.
5. Which examples did it train on, and where did it start? What differs there explains differences later on.
6. What would drown or look like something else: a sum over the replicas that is missing, BatchNormalization, state that steps
   assign. The numbers that follow are judged with it switched off, or on a base that does it too (`Case.rebase`).
7. Why do gradients differ? Explanations are asked by their price (`causes/gradients.py`).
8. What is made of the same gradients, what is reported, random numbers, hosts that differ. Last, what nothing explains; where
   something is left, the reference is repeated before it is called unexplained.

Causes are asked in groups. All of a group see one state of the case, so their order means nothing. What is found takes its
differences out (`explain`, `cut`, `rebase`), and all are asked again, from the first group on, of what is left.

The verdict is the first of these that holds: failed or hung; not recovered from faults; unverified, because records have holes
or files are shared; divergent, if a cause decides that is not by design; unverified, if something is missing that equivalence
needs; by design; equivalent. A cause that is allowed, or advice, does not decide. Where the batch grows with the replicas, what
each replica does with its own rows alone does not either: one device that has as many rows does it, too.

What is not done, and why: rows are not replayed where runs share files, as that tells nothing; factors are not measured with
each replica's own statistics left in, as these drown them; equivalent is not said without a gradient, a weight and a loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from emulate.told import Told, told
from emulate.trace import Trace
from emulate.verify.case import LATER, Case
from emulate.verify.causes import find_causes, get
from emulate.verify.causes.cause import Cause, names_in_words, numbers
from emulate.verify.causes.changed_gradients import DROPPED
from emulate.verify.causes.shared_files import SHARED_FILES
from emulate.verify.compare import ONE_RUN
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import aligned, kept, names_of, objective
from emulate.verify.lines import located, step_graph
from emulate.verify.measure import changed_in_the_end, ends_of_hosts, left_to_compare
from emulate.verify.verdict import BY_DESIGN, Difference, Farthest, Finding, Run, Samples, StepGraph

NEEDED = ("gradient", "weight", "loss")
"""Kinds that must be compared before a run can be equivalent."""


@dataclass(frozen=True)
class Judgement:
    """Hold the fields of a verdict's run that follow from the traces.

    Attributes:
        is_amplified: Not one of them: whether gradients show little beside rounding that is amplified.
        case: Not one of them: what was judged.
    """

    verdict: str
    reason: str | None
    replicas: int
    steps: int
    samples: Samples
    worst: Difference | None
    first_divergence: Difference | None
    causes: tuple[Finding, ...]
    not_compared: tuple[Told, ...]
    notes: tuple[Told, ...]
    course: tuple[Farthest, ...]
    rows: tuple[tuple[int, ...], ...]
    step_graph: StepGraph | None = None
    non_finite_after: int | None = None
    is_amplified: bool = False
    case: Case | None = field(default=None, repr=False, compare=False)

    @property
    def has_unexplained(self) -> bool:
        """Return whether something that decides has no known cause."""
        return any(cause.code == "unexplained" for cause in _deciding(self.causes))

    @property
    def is_unexplained(self) -> bool:
        """Return whether a difference without a known cause decides, alone or beside what replicas do with their own rows."""
        return {cause.code for cause in _deciding(self.causes)} - {*_OF_REPLICAS_ALONE} == {"unexplained"}

    @property
    def is_well(self) -> bool:
        """Return whether the run agrees with one device, apart from differences by design."""
        return self.verdict in ("equivalent", BY_DESIGN)

    @property
    def leaves_the_scale_open(self) -> bool:
        """Return whether dependent examples explain everything: then a factor of each replica stays unknown."""
        is_well = self.verdict in ("equivalent", "unverified")
        return is_well and any(cause.code == "in-batch-negatives" for cause in self.causes)

    @property
    def is_scaled(self) -> bool:
        """Return whether a wrong divisor of the loss decides."""
        return any(cause.code == "loss-scaling" for cause in _deciding(self.causes))

    def advised_by(self, other: Judgement) -> Judgement:
        """Return a copy with another judgement's differences by design: one device has them here, too."""
        codes = {cause.code for cause in self.causes}
        causes = [cause for cause in other.causes if cause.code in _OF_OWN_ROWS and cause.code not in codes]
        advice, note = _as_advice(causes)
        return replace(self, causes=(*self.causes, *advice), notes=(*self.notes, *note))

    def of_16_bits(self) -> Judgement:
        """Return a copy whose arithmetic causes are replaced by '16-bit rounding only': in 32 bits everything agrees."""
        if any(DROPPED in cause.fixes for cause in self.causes):  # 0 is no rounding
            return self
        arithmetic = [cause for cause in self.causes if cause.code in _ARITHMETIC and not (cause.allowed or cause.advice)]
        others = [cause for cause in self.causes if cause not in arithmetic]
        first = self.first_divergence
        away = "" if first is None else f"; {first.tensor} ({first.kind}) differs by {first.error:.2g} in step {first.step}"
        rounded = Finding(
            "unexplained",
            "It differs in 16 bits only: rounding errors are larger there than the noise floor, or are amplified.",
            f"With the program's layers in 32 bits everything agrees{away}",
            get("unexplained").fix(_IN_16_BITS),
            fixes=(_IN_16_BITS,),
        )
        return replace(self, causes=(*others, *([rounded] if arithmetic else [])), notes=(*self.notes, _OF_16_BITS))

    def in_16_bits(self, other: Judgement) -> Judgement:
        """Return a copy with what another judgement, in 16 bits, says of steps that one of the runs skips there."""
        later = [Told(text.code, f"in 16 bits, {text}") for text in other.not_compared if text.code == LATER]
        return replace(self, causes=(*self.causes, *other.skipped), not_compared=(*self.not_compared, *later))

    @property
    def skipped(self) -> list[Finding]:
        """Return the findings of steps that the optimizer of one run skips, as it is made for, if no other cause decides."""
        return [] if _deciding(self.causes) else [cause for cause in self.causes if cause.code == "nan" and cause.advice]

    def fill(self, run: Run) -> Run:
        """Return the run with these fields; its own notes come first."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name in Run.__dataclass_fields__}
        return replace(run, **{**own, "notes": run.notes + self.notes})


def judge(
    case: Case, allow: Collection[str] = (), *, grows: bool = False, asynchronous: bool = False, only: Cause | None = None
) -> Judgement:
    """Judge a run.

    Args:
        case: Everything that is known about it.
        allow: Codes of causes that are expected: they are reported and do not decide.
        grows: Whether the batch grows with the replicas. Each has as many rows then as one device that is alone, and does with
            them by design what that does: it is told, and does not decide where nothing else does.
        asynchronous: Whether the program leaves the order of its updates to chance: it is never called equivalent.
        only: The one cause to look for; None for all.

    Returns:
        The verdict with its causes.
    """
    causes = () if _is_broken(case) else find_causes(case, allow, only)
    if _is_shared(_deciding(causes)):
        case.rebase(case.compare())  # a replay would tell nothing
    case.choose_base()
    if _has_workers_with_data(case):
        causes = tuple(cause for cause in causes if cause.code not in _OF_ROWS)
    deciding = _deciding(causes)
    besides = _drawn_apart(case) + _uneven_too(case)
    if grows and deciding and all(cause.code in _OF_OWN_ROWS for cause in deciding):
        advice, note = _as_advice(deciding)
        besides += note
        causes, deciding = (*(cause for cause in causes if cause not in deciding), *advice), []
    verdict, missing = _verdict(case, deciding, allow)
    if verdict in ("equivalent", BY_DESIGN, "unverified"):
        missing = _unordered(case, missing, asynchronous=asynchronous)
        verdict = "unverified" if missing else verdict
    base = case.base
    # A cause that says how many steps or examples there are says it too.
    is_told = verdict in ("failed", "hung") or any(cause.code in _OF_ROWS for cause in deciding)
    not_compared = [text for text in base.not_compared if not (is_told and text.code == ONE_RUN.code)]
    not_compared += [*case.unreachable, *missing, *case.undecided.values()]
    not_compared += [*_other_rows(case), *_changed_after(case), *_kept_apart(case)]
    notes = [
        *case.notes,
        *base.notes,
        *_unreported(case, verdict),
        *_unchanged(case),
        *_of_first(case),
        *_rounded(case),
        *besides,
    ]
    decided_on = base if verdict == "equivalent" else case.comparison
    with_faults = case.recovery.lives.last.reason if case.recovery is not None and not case.recovery.has_ended else None
    return Judgement(
        verdict=verdict,
        reason=case.outcome.hung or with_faults,
        replicas=case.num_replicas if case.untouched.of("strategy") or case.untouched.replicas else 0,
        steps=case.topology.num_steps,
        samples=case.ledger.samples if case.ledger else Samples(),
        worst=base.worst_by_rounding if verdict == "equivalent" else case.comparison.worst,
        first_divergence=None if verdict == "equivalent" or _OTHERS_FILES in missing or _is_broken(case) else _first(case),
        causes=causes,
        not_compared=tuple(dict.fromkeys(not_compared)),
        notes=tuple(dict.fromkeys(notes)),
        course=decided_on.course,
        rows=case.ledger.rows if case.ledger else (),
        step_graph=step_graph(case.plain, case.untouched, case.num_replicas),
        is_amplified=base.drowned_from is not None,
        non_finite_after=base.non_finite_after,
        case=case,
    )


_IN_16_BITS = "If it differs in 16 bits only"
_OF_16_BITS = told("differs-in-16-bits")(
    "With the program's layers in 32 bits everything agrees: only the rounding to 16 bits differs."
)
_ARITHMETIC = (
    "batchnorm-local-statistics",
    "clip-before-reduce",
    "depends-on-replicas",
    "double-all-reduce",
    "in-batch-negatives",
    "local-normalization",
    "loss-scaling",
    "regularization-per-replica",
    "sparse-gradient",
    "uneven-batch",
    "unexplained",
    "variable-aggregation",
)
"""Causes that the values of the steps show, in 32 bits and in 16 bits."""
_OF_OWN_ROWS = ("batchnorm-local-statistics", "in-batch-negatives")
"""Causes that come from each replica's use of its own rows only."""
_OF_REPLICAS_ALONE = (*_OF_OWN_ROWS, "identical-dropout")


def _unordered(case: Case, missing: list[Told], *, asynchronous: bool) -> list[Told]:
    """Return what an equivalent run with parameter servers lacks: a fixed order of updates and of rows."""
    if not case.topology.topology.num_ps:
        return missing
    if asynchronous and not case.topology.num_steps:
        return [_UNORDERED]
    order = [_UNORDERED if missing else _ASYNCHRONOUS] if asynchronous else []
    is_apart = case.ledger is not None and case.ledger.first_apart is not None
    own_rows = [_OWN_ROWS] if is_apart and _has_workers_with_data(case) else []
    return [*order, *own_rows, *missing]


def _has_workers_with_data(case: Case) -> bool:
    """Return whether workers take their examples themselves; a coordinator that applies their results also sends them."""
    return case.topology.topology.num_ps > 0 and not case.topology.applies_sums


_OF_ROWS = ("batch-size", "samples-missing", "samples-repeated", "samples-reordered", "empty-shard")
"""Causes that are not errors if workers use their own data."""
_OWN_ROWS = told("workers-own-data")(
    "data: workers use their own data, so a step has other examples than on a single worker; gradients and "
    "weights were compared on the same examples"
)
_UNORDERED = told("random-order")(
    "order: the program makes updates without waiting for earlier ones. Their order, and the age of the "
    "variables that workers read, are random, and so is the result"
)
_ASYNCHRONOUS = told("random-order")(
    f"{_UNORDERED}. In the order of this run, one after the other, they are those of one worker on the same examples"
)


def _deciding(causes: Sequence[Finding]) -> list[Finding]:
    return [cause for cause in causes if not (cause.allowed or cause.advice)]


def _as_advice(causes: Sequence[Finding]) -> tuple[list[Finding], list[Told]]:
    """Return these causes as advice, with a note."""
    codes = ", ".join(cause.code for cause in causes)
    note = told("same-on-one-device")(f"{codes}: each replica does this, and so does one device that has as many examples")
    return [replace(cause, advice=True) for cause in causes], [note] if causes else []


def _verdict(case: Case, deciding: list[Finding], allow: Collection[str]) -> tuple[str, list[Told]]:
    missing = _missing(case, allow)
    if case.has_ended_early:
        return ("hung" if case.outcome.hung else "failed"), []
    if case.recovery is not None and not case.recovery.has_ended:
        return ("hung" if case.recovery.lives.last.status == "hung" else "failed"), []
    if _is_broken(case):
        return "unverified", [_OF_GPUDIST.format("; ".join(f"{at} ({error})" for at, error in case.facts.broken.items()))]
    if _is_shared(deciding):
        return "unverified", [_OTHERS_FILES, *missing]
    if not all(cause.by_design for cause in deciding):
        return "divergent", []
    return ("unverified" if missing else BY_DESIGN if deciding else "equivalent"), missing


def _is_broken(case: Case) -> bool:
    """Return whether gpudist itself has failed inside of a program that has ended well: its records have holes."""
    return bool(case.facts.broken) and not (case.outcome.hung or case.outcome.failure)


def _is_shared(deciding: Sequence[Finding]) -> bool:
    """Return whether runs have changed each other's files: then a difference does not come from the program."""
    return any(cause.code == SHARED_FILES.code for cause in deciding)


def _unreported(case: Case, verdict: str) -> list[Told]:
    """Note that no number reported by the program was seen: what it prints may be one replica's."""
    is_seen = any(point.measure.key.kind in ("loss", "metric") for point in case.base.points)
    if is_seen or verdict not in ("equivalent", BY_DESIGN):
        return []
    return [_UNREPORTED if "loss" in case.base.kinds() else _UNSEEN_LOSS]


def _unchanged(case: Case) -> list[Told]:
    """Note variables that no step changes: nobody applies their gradients, or these or the learning rate are 0."""
    by_tensor: dict[str, set[str]] = {}
    steps = [step for name in case.untouched.optimizers for step in complete(case.untouched, name)]
    trained = {tensor for step in steps for tensor in names_of(step)}
    for tensor, variable in (entry for step in steps for entry in next(iter(step.values())).weights.items()):
        if tensor in trained or not trained:
            by_tensor.setdefault(tensor, set()).add(variable.digest)
    fixed = [tensor for tensor, digests in by_tensor.items() if len(digests) == 1]
    if case.untouched.num_steps < 2 or not fixed or "weight" not in case.base.kinds():
        return []
    return [_UNCHANGED if len(fixed) == len(by_tensor) else _SOME_UNCHANGED.format(names_in_words(fixed))]


def _rounded(case: Case) -> list[Told]:
    """Note variables of which the replicas have copies that differ by rounding."""
    names = case.agreement.rounded
    return [_ROUNDED.format(names_in_words(names))] if names else []


_ROUNDED = told("copies-differ-by-rounding")(
    "The replicas' copies of {} differ by rounding: each replica adds up the rows of a sparse gradient itself, and threads "
    "do so in any order. tf.config.experimental.enable_op_determinism() keeps them equal"
)


def _of_first(case: Case) -> list[Told]:
    """Note numbers that the step keeps for the first replica alone, and that are others than one device's."""
    names = list(dict.fromkeys(point.measure.key.tensor for point in case.base.of_first if point.exceeds))
    return [_OF_FIRST.format(names_in_words(names))] if names and not case.has("variable-aggregation") else []


def _uneven_too(case: Case) -> list[Told]:
    """Note that the replicas' numbers of examples differ where clipping may hide what that does to the gradients."""
    is_weighted = case.facts.distributed or case.facts.train_steps
    is_seen = case.without("no-clipping") or case.has("uneven-batch") or case.has("empty-shard")
    steps = case.ledger.uneven if case.ledger is not None and case.has("clip-before-reduce") else ()
    return [_UNEVEN_TOO.format(step=step) for step in steps[:1] if not (is_seen or is_weighted)]


def _drawn_apart(case: Case) -> list[Told]:
    """Note what each replica draws for its batch as a whole, where one device has one draw.

    In both runs it has the same place and shape: what is drawn for each example has as many entries as a batch.
    """
    apart: set[str] = set()
    for step in (step for name in case.untouched.optimizers for step in complete(case.untouched, name)):
        places = [draw.rpartition("=")[0] for draw in {draw for local in step.values() for draw in local.draws if "=" in draw}]
        apart |= {place for place in places if places.count(place) > 1}
    alone = {event["of"] for _, event in case.plain.of("made") if event["kind"] == "draw"}
    ours = [event for _, event in case.untouched.of("made") if event["kind"] == "draw" and event["of"] in apart & alone]
    lines = located(event["line"] for event in ours)
    return [_DRAWN_APART.format(numbers(line.place for line in lines))] if lines else []


_DRAWN_APART = told("own-draws")(
    "Each replica makes its own random draw for its whole part of the batch at {}, where one device makes one draw for the "
    "batch: by design of tf.distribute, as with Dropout. gpudist compared with equal draws. For equal draws give the "
    "operation a `seed`, or draw outside of `Strategy.run`."
)
_OF_FIRST = told("first-replica-only")(
    "What the first replica assigns to {} (aggregation ONLY_FIRST_REPLICA) is not what one device has: numbers that the "
    "program makes of it do not cover the other replicas."
)
_UNEVEN_TOO = told("uneven-batch-too")(
    "The replicas have different numbers of examples in step {step}. If each divides its loss by its own number, that is "
    "uneven-batch, which clipping may hide here: after the fix of clipping verify again."
)
_UNCHANGED = told("weights-unchanged")(
    "No step changes any weight: gradients are computed but not applied, or they are 0, or the learning rate "
    "is 0, or updates are lost by rounding. gpudist compared only what an untrained model computes."
)
_SOME_UNCHANGED = told("some-weights-unchanged")(
    "No step changes {}, also not on one device, although the step takes gradients of it. They are 0 if no loss depends on it, "
    "or if another factor is 0: after load_weights, LoRA layers have two such factors (Keras 3.15)."
)
_OTHER_ROWS = told("other-examples")(
    "data from step {step} on: the examples differ from those of one device, as they may if the batch grows and an epoch has "
    "another number of steps; gradients, weights and losses were compared on the examples of this run"
)
_REST = told("rest-of-examples")(
    "data from step {step} on: the run was stopped before gpudist saw whether all examples come as often as on one device"
)
_OF_OTHER_HOSTS = told("final-weights-of-other-hosts")("the final weights of other hosts than the first: only {} replaced {}")


def _other_rows(case: Case) -> list[Told]:
    """Note steps of a larger batch with examples from other epochs, and steps after those that an allowed cause is about."""
    ledger, is_allowed = case.ledger, any(cause.allowed and cause.code in _OF_ROWS for cause in case.found)
    if ledger is not None and is_allowed and not (ledger.ended and ledger.is_whole):
        return [_REST.format(step=len(ledger.topology))]
    step = ledger.others_from if ledger else None
    return [] if step is None else [_OTHER_ROWS.format(step=step)]


def _changed_after(case: Case) -> list[Told]:
    """Note what a program does to its weights after training: averages that it puts in their place, for example."""
    compared = left_to_compare(case.base.runs.as_they_came)
    ends, texts = ends_of_hosts(case.untouched), []
    if names := [name for name in changed_in_the_end(case.untouched) if name not in compared]:
        after = "after the last step: weights were compared as the steps left them"
        texts.append(told("changed-after-training")(f"what the program makes of {names_in_words(names)} {after}"))
    if names := [name for name in compared if len({end is None for end in ends.get(name, {}).values()}) > 1]:
        who = numbers([f"host {host}" for host, end in ends[names[0]].items() if end is not None])
        texts.append(_OF_OTHER_HOSTS.format(who, names_in_words(names)))
    return texts


def _kept_apart(case: Case) -> list[Told]:
    """Note variables that training changes and that no step has a value of: each replica's own, or the program's."""
    steps = [step for name in case.untouched.optimizers for step in complete(case.untouched, name)[:1]]
    recorded = {name for step in steps for local in step.values() for name in (*local.state, *local.weights)}
    own = [record for record in case.lines.of("assigned") if not record.get("called")]
    kept = told("own-variable")("variable {} (each replica keeps its own value, line {})")
    texts = {name: kept.format(name, record["line"]) for record in own for name in [str(record.get("name"))]}
    texts |= {
        name: told("assigned-outside")(f"variable {name} (assigned outside of Strategy.run)") for name in case.facts.outside
    }
    return [text for name, text in texts.items() if name not in recorded] if steps else []


_UNSEEN_LOSS = told("no-loss-seen")(
    "gpudist saw no loss: the step takes gradients inside of a loop of its graph, or workers keep the loss to themselves. "
    "Gradients and weights agree. What the program prints was not compared."
)
_UNREPORTED = told("no-report-seen")(
    "The loss that is minimized was compared. gpudist did not see a number that the program itself reports. "
    "It sees results of Strategy.reduce, a single number of experimental_local_results, and Keras's logs."
)


def _missing(case: Case, allow: Collection[str]) -> list[Told]:
    """Return what is missing for a verdict of equivalence."""
    compared = case.base.kinds()
    with_servers = case.topology.topology.num_ps > 0  # where workers may keep the loss to themselves
    is_shown = any(map(_shows_a_loss, (case.plain, case.untouched)))
    needed = [kind for kind in NEEDED if kind != "loss" or (is_shown and not with_servers)]
    seen = {point.measure.key.kind for point in case.base.points}
    infinite = told("not-finite")("{}: not finite, on one device too")
    unseen = told("none-seen")("{}: none was seen in both runs")
    missing = [(infinite if kind in seen else unseen).format(kind) for kind in needed if kind not in compared]
    if case.recovery is not None:
        missing += case.recovery.missed
        if not case.recovery.missed and case.recovery.result is None and case.recovery.has_ended:
            no_step = "faults: gpudist saw no step with them, so it compared nothing with the run without them"
            missing.append(told("no-step-with-faults")(no_step))
    if case.outcome.cut:
        missing.append(_CUT)
    missing += [*_incomparable(case), *_open_scale(case), *(why for code, why in case.undecided.items() if code not in allow)]
    return missing if case.ledger else [*missing, _UNSEEN_ROWS]


def _shows_a_loss(trace: Trace) -> bool:
    """Return whether a run shows what its program minimizes: not where gradients are taken inside of a loop of the graph."""
    steps = (step for name in trace.optimizers for step in complete(trace, name))
    return any(report.kind == "loss" for report in trace.reports) or any(objective(step) is not None for step in steps)


def _incomparable(case: Case) -> list[Told]:
    """Note gradients of which no number can be compared: of other shapes than on one device, or complex ones."""
    texts = []
    for ours, theirs in (pair for name in case.base.runs.optimizers for pair in case.base.runs.pairs(name)[:1]):
        for tensor in names_of(theirs):
            here, there = (
                [one.gradients[tensor] for one in step.values() if tensor in one.gradients] for step in (ours, theirs)
            )
            shapes = [{array.shape for array in side if array.rows is None} for side in (here, there)]
            if all(shapes) and shapes[0] != shapes[1]:
                texts.append(_OTHER_SHAPE.format(tensor, *(" and ".join(map(str, sorted(of_side))) for of_side in shapes)))
            elif any(np.dtype(array.dtype).kind == "c" for array in here):
                texts.append(_COMPLEX.format(tensor))
    return texts


_OTHER_SHAPE = told("other-shape")("gradient of {}: its shape is {}, {} on one device")
_COMPLEX = told("complex-numbers")("gradient of {}: gpudist does not compare complex numbers")


def _open_scale(case: Case) -> list[Told]:
    """Note that a factor cannot be measured if an example's loss depends on others of its replica."""
    first = min(case.comparison.objectives, key=lambda point: point.step, default=None)
    is_of_parts = case.has("in-batch-negatives") or case.has("static-tensor-split")
    if first is None or case.has("loss-scaling") or not is_of_parts:
        return []
    factor, replicas = first.factor, case.num_replicas
    if not factor > 0 or abs(math.log(factor / replicas)) >= abs(math.log(factor)):
        return []
    text = told("scale-open")(
        f"scale: the replicas' losses add up to {factor:.3g}x that of one device in step {first.step}, which is nearer to the "
        f"number of replicas ({replicas}) than to 1. A loss that is divided by the examples of a replica instead of those "
        "of all replicas looks like that. gpudist cannot measure it for losses that compare examples; check the divisor of "
        "each loss"
    )
    return [text]


_OF_GPUDIST = told("gpudist-failed")(
    "everything: gpudist itself failed at {}. The program went on without it, but what was recorded has holes. "
    'This is a fault of gpudist: send a report, as the guide "I think this verdict is wrong" says'
)
_OTHERS_FILES = told("shared-files")(
    "everything: runs found files that other runs of the verification had written, and differ because of them (shared-files)"
)
_CUT = told("records-cut-off")(
    "steps: a process ended by os._exit() before its records were written, so gpudist did not see its last "
    "steps; end the program with sys.exit() or by returning"
)
_UNSEEN_ROWS = told("batch-not-seen")(
    "data: gpudist could not see the batch, because it is not an argument of the function given to "
    "Strategy.run. Pass it as an argument."
)


def _first(case: Case) -> Difference | None:
    """Return the first divergence: in the numbers, else in the data, else between replicas."""
    differences = [d for d in (case.first_deciding, _in_data(case), _between_replicas(case)) if d is not None]
    return min(differences, key=lambda d: (d.step, d.kind != "data"), default=case.comparison.first)


def _in_data(case: Case) -> Difference | None:
    ledger = case.ledger
    if ledger is None or ledger.grows or ledger.first_apart is None:
        return None
    k = ledger.first_apart
    size, expected = ledger.sizes(k)
    return Difference("rows", "data", k, float(abs(size - expected)), 0.0, value=float(size), reference_value=float(expected))


def _between_replicas(case: Case) -> Difference | None:
    apart = case.agreement.first
    if apart is None or apart.optimizer is None:
        return None
    replica = int(apart.groups[1][0].rsplit(" ", 1)[1])
    step = case.untouched.steps(apart.optimizer)[apart.step]
    arrays = [kept([step[r].weights[apart.tensor]]) for r in (int(apart.groups[0][0].rsplit(" ", 1)[1]), replica)]
    diff = Difference(apart.tensor, "weight", apart.step, math.nan, 0.0, replica=replica, optimizer=apart.optimizer)
    recorded = [array for array in arrays if array is not None]
    if len(recorded) < 2:
        return diff
    first, other = aligned(recorded)
    at = int(np.argmax(np.abs(other - first)))
    return replace(diff, error=float(abs(other[at] - first[at])), value=float(other[at]), reference_value=float(first[at]))
