"""Ask all causes, in one loop: the first group that sees something tells it, then all are asked again of what is left.

A search changes nothing. What a cause explains is taken out of the case once it is told (`Sign.then`), so all causes of a group
see one state, and their order means nothing; tests ask them in another one. Beside what a cause names in `unless` it is not
told: that explains what it sees.

The order of the groups follows a step, and within a stage the price. How a run ended and what it trained on is told without a
number; what makes all numbers others comes before what explains one of them; an update is looked at once its gradients are
explained, a report once its update is. What may start a run comes behind what costs nothing. Last is what nothing explains.
"""

from __future__ import annotations

from collections.abc import Collection

from emulate.errors import UsageError, did_you_mean
from emulate.told import told
from emulate.verify.case import Case
from emulate.verify.causes import (
    endings,
    gradients,
    hosts,
    local_batches,
    randomness,
    replicas,
    reports,
    samples,
    shared_files,
    surprises,
    tensors,
    updates,
)
from emulate.verify.causes.cause import NUMBERS_MEAN_NOTHING, OF_GROUPS, Cause, Group, Sign, is_assigned, names_in_words
from emulate.verify.compare import Point
from emulate.verify.lines import Blame, between, made, operations
from emulate.verify.verdict import Finding


def _search_unexplained(case: Case) -> Sign | None:
    left = case.left()
    if case.is_of_groups and not case.found:
        return Sign("The gradients depend on which replica has which examples, and no known cause explains it.", OF_GROUPS)
    if not left and not case.found:
        return _unexplained_examples(case)
    if not left:
        return None
    first = left[0]
    # Experiments explain one step. A replay stands for the later ones, and may differ in them for reasons of its own, such as
    # an optimizer's state. A variable that differs may be read by code between the steps.
    explained = [joins.step for joins in case.joined]
    if case.has(updates.VARIABLE_AGGREGATION.code):
        explained += [point.step for point in case.comparison.exceeding if is_assigned(case, point)]
    if first.step > min(explained, default=first.step):
        case.unreachable.append(_MAY_FOLLOW.format(first.step))
        return None
    d = first.difference()
    where = f"{d.kind} of {d.tensor}" if d.kind in ("gradient", "weight") else f"{d.kind} {d.tensor}"
    names = _assigned(case, d.step)
    too = f"; in the same step {names_in_words(names)}, which the step assigns, differ{'s' * (len(names) == 1)} too"
    return Sign(
        f"From step {d.step} on the {where} differs, and no known cause explains it.",
        f"error {d.error:.2g}, noise floor {d.noise:.2g} ({first.ratio:.0f}x); {len({p.measure.key for p in left})} "
        f"of {len({p.measure.key for p in case.base.points})} compared values differ in some "
        f"step{too if names else ''}",
        _fix_of_unexplained(case, first),
        blame=_blame(case, first),
    )


_MAY_FOLLOW = told("later-steps")(
    "gradients, weights and losses from step {} on: they may follow from what is named for the steps before. Fix that first, "
    "then verify again"
)


def _blame(case: Case, first: Point) -> list[Blame]:
    """Return where the lines of the first difference are looked for: all of its stage."""
    key, step = first.measure.key, first.step
    of_kind = {
        "initial-weight": [made("start", "num_replicas", in_step=False)],
        "weight": [operations("update", "apply"), made("update", "apply"), operations("assigned", "assign")],
        "variable": [operations("assigned", "assign")],
        "loss": [operations("reported", "made", "reduced")],
        "metric": [operations("reported", "made", "reduced")],
        "data": [made("examples", "dataset function", "map", "shuffle", "batch", "distribute")],
        "final-weight": [made("ending", "restore")],
    }
    if key.kind != "gradient":
        return of_kind.get(key.kind, [])
    loss_differs = any(point.exceeds for point in case.base.objectives if point.step == step)
    numbered = [operations("loss", "numbers")] if case.facts.gathers else []  # labels and masks of gathered examples
    return [*numbered, between("loss")] if loss_differs else [*numbered, between("given"), between("loss")]


def _assigned(case: Case, step: int) -> list[str]:
    """Return variables that the step assigns itself and that differ in the same step."""
    points = (point for point in case.base.exceeding if point.step == step and is_assigned(case, point))
    return list(dict.fromkeys(point.measure.key.tensor for point in points))


def _fix_of_unexplained(case: Case, first: Point) -> str | None:
    """Return where to look; None for the general advice."""
    if first.measure.key.kind == "gradient" and _assigned(case, first.step):
        return _OF_ASSIGNED
    key, before = first.measure.key, case.base.first_step("gradient")
    if key.kind == "weight" and key.optimizer == "tape" and (before is None or before > first.step):
        return _OF_UPDATE
    return _OF_GATHERED if case.facts.gathers else None


_OF_ASSIGNED = "If the step assigns a variable"
_OF_UPDATE = "If you write the update yourself"
_OF_GATHERED = "If the step gathers over the replicas"


def _unexplained_examples(case: Case) -> Sign | None:
    """Check for examples that differ in a way that no cause explains."""
    ledger = case.ledger
    if ledger is None or ledger.grows or ledger.first_apart is None:
        return None
    n = ledger.samples
    return Sign(
        f"From step {ledger.first_apart} on the examples differ from those of one device, and no known cause explains it.",
        f"one device had none of {ledger.foreign} of {n.seen} examples. gpudist identifies an example by its "
        "contents, so an augmentation that depends on the host or the position makes other examples",
        "If the examples differ",
        blame=[made("examples", "dataset function", "map", "shuffle", "batch", "distribute")],
    )


UNEXPLAINED = Cause("unexplained", _search_unexplained, unless=NUMBERS_MEAN_NOTHING)


_FILES = Group((shared_files.SHARED_FILES,))
_OF_THE_RUN = Group(
    (
        endings.FRAMEWORK_LIMIT,
        endings.HOST_EXITED,
        endings.UNEQUAL_STEPS,
        endings.COLLECTIVE_ORDER,
        endings.COLLECTIVE_MISMATCH,
        endings.WAITS_FOR_DATA,
        endings.PYTHON_DEADLOCK,
        replicas.REPLICAS_MISSING,
        surprises.LOST_BATCHES,
    )
)
_ADVICE = Group((tensors.STATIC_IN_GRAPH, tensors.CACHED_RANDOMNESS, surprises.SURPRISING, shared_files.CHECKPOINT_CONFLICT))
_OF_EXAMPLES = (
    Group((randomness.UNSEEDED, samples.COUNTED, samples.BATCH_SIZE)),
    Group((samples.REPEATED, samples.MISSING, samples.REORDERED)),
)
_OF_NUMBERS = (
    Group(
        (
            tensors.STATIC_SPLIT,
            tensors.CROSS_REPLICA_TENSOR,
            replicas.INITIAL_WEIGHTS,
            replicas.MISSING_ALL_REDUCE,
            replicas.REPLICAS_DISAGREE,
        )
    ),
    Group((local_batches.BATCHNORM, local_batches.BATCHNORM_CANCELLED, local_batches.EMPTY_SHARD, local_batches.NAN)),
    Group((updates.VARIABLE_AGGREGATION,)),
)
_OF_UPDATES = (
    Group((updates.VARIABLES_LEFT, updates.DEPENDS_IN_UPDATE)),
    Group((updates.UPDATE_SCALING,)),
)
_OF_REPORTS = Group((reports.LOSS_REPORT, reports.METRIC_AGGREGATION))
_OF_HOSTS = Group(
    (
        randomness.IDENTICAL_DROPOUT,
        randomness.IDENTICAL_AUGMENTATION,
        hosts.HASH_ORDER,
        hosts.FILE_ORDER,
        hosts.UNSEEDED_HOSTS,
    )
)
_OF_THE_REST = (Group((updates.FINAL_WEIGHTS, hosts.OF_EXAMPLES, hosts.OF_THE_STEP)), Group((UNEXPLAINED,)))
_OF_RECOVERY = Group((endings.NOT_RECOVERED, endings.CHECKPOINT_NOT_RESTORED, endings.RECOVERED_DIFFERENTLY))
_GROUPS = (
    _OF_THE_RUN,
    _ADVICE,
    *_OF_EXAMPLES,
    *_OF_NUMBERS,
    *gradients.WAYS,
    *_OF_UPDATES,
    _OF_REPORTS,
    _OF_HOSTS,
    *_OF_THE_REST,
    _OF_RECOVERY,
)


_BY_CODE: dict[str, Cause] = {}
"""Every cause by its code. Where a code has several searches, this is the first one."""
for _cause in (cause for group in (_FILES, *_GROUPS) for cause in group.causes):
    _BY_CODE.setdefault(_cause.code, _cause)


def all_causes() -> tuple[Cause, ...]:
    """Return every known cause."""
    return tuple(_BY_CODE.values())


def get(code: str) -> Cause:
    """Return the cause with this code.

    Args:
        code: As in a verdict, `loss-scaling` say.

    Returns:
        The cause.

    Raises:
        UsageError: When there is none.
    """
    if code not in _BY_CODE:
        hint = " ".join(filter(None, (did_you_mean(code, _BY_CODE, 0.6), "`gpudist causes` lists all.")))
        raise UsageError(f"A cause must be one of the catalogue. Received: code={code!r}. {hint}")
    return _BY_CODE[code]


def find_causes(case: Case, allow: Collection[str] = (), only: Cause | None = None) -> tuple[Finding, ...]:
    """Return every cause seen in a case, or the one that is asked for, in the order in which to fix them.

    What replicas do with their own rows alone comes last, then advice.
    """
    case.allow = allow
    case.compare()
    if only is not None:
        Group((only,)).ask(case)
        return tuple(case.found)
    is_shared = _FILES.ask(case) and not case.found[0].allowed
    if not is_shared:
        case.choose_base()
    # Where runs change each other nothing else is told by what they did.
    groups = (_OF_RECOVERY,) if is_shared and not case.has_ended_early else _GROUPS
    while any(group.ask(case) for group in groups):
        pass
    if case.has(UNEXPLAINED.code):
        case.found.sort(key=lambda finding: finding.code != randomness.UNSEEDED.code)
    return tuple(sorted(case.found, key=lambda f: (f.advice, f.by_design or f.code == gradients.IN_BATCH_NEGATIVES.code)))
