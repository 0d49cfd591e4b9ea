"""List all causes, in the order in which they are checked and fixed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from emulate.errors import UsageError, did_you_mean
from emulate.verify.case import Case
from emulate.verify.causes.accumulation import ACCUMULATION
from emulate.verify.causes.batchnorm import BATCHNORM, BATCHNORM_CANCELLED
from emulate.verify.causes.cause import Cause
from emulate.verify.causes.checkpoint_conflict import CHECKPOINT_CONFLICT
from emulate.verify.causes.clipping import CLIP_BEFORE_REDUCE
from emulate.verify.causes.cross_replica_tensor import CROSS_REPLICA_TENSOR
from emulate.verify.causes.depends_on_replicas import DEPENDS_ON_REPLICAS
from emulate.verify.causes.endings import (
    COLLECTIVE_MISMATCH,
    COLLECTIVE_ORDER,
    HOST_EXITED,
    PYTHON_DEADLOCK,
    UNEQUAL_STEPS,
    WAITS_FOR_DATA,
)
from emulate.verify.causes.file_order import FILE_ORDER
from emulate.verify.causes.final_weights import FINAL_WEIGHTS
from emulate.verify.causes.framework_limits import FRAMEWORK_LIMIT
from emulate.verify.causes.hash_order import HASH_ORDER
from emulate.verify.causes.host_values import HOST_VALUES
from emulate.verify.causes.identical_augmentation import IDENTICAL_AUGMENTATION
from emulate.verify.causes.in_batch_negatives import IN_BATCH_NEGATIVES
from emulate.verify.causes.loss_scaling import DOUBLE_ALL_REDUCE, LOSS_SCALING, LOSS_SCALING_OF_A_PART
from emulate.verify.causes.numerics import EMPTY_SHARD, NAN
from emulate.verify.causes.python_state import PYTHON_STATE
from emulate.verify.causes.randomness import IDENTICAL_DROPOUT, UNSEEDED
from emulate.verify.causes.recovery import CHECKPOINT_NOT_RESTORED, NOT_RECOVERED, RECOVERED_DIFFERENTLY
from emulate.verify.causes.regularization import REGULARIZATION
from emulate.verify.causes.replicas import INITIAL_WEIGHTS, MISSING_ALL_REDUCE, REPLICAS_DISAGREE
from emulate.verify.causes.replicas_missing import REPLICAS_MISSING
from emulate.verify.causes.reports import LOSS_REPORT, METRIC_AGGREGATION
from emulate.verify.causes.samples import BATCH_SIZE, COUNTED, MISSING, REORDERED, REPEATED
from emulate.verify.causes.shared_files import SHARED_FILES
from emulate.verify.causes.sparse_gradient import SPARSE_GRADIENT
from emulate.verify.causes.static_tensors import CACHED_RANDOMNESS, STATIC_IN_GRAPH, STATIC_SPLIT
from emulate.verify.causes.uneven_batch import LOCAL_NORMALIZATION, UNEVEN_BATCH
from emulate.verify.causes.unexplained import UNEXPLAINED
from emulate.verify.causes.unseeded_hosts import UNSEEDED_HOSTS
from emulate.verify.causes.update_scaling import UPDATE_SCALING
from emulate.verify.causes.variable_aggregation import VARIABLE_AGGREGATION
from emulate.verify.verdict import Finding

_CAUSES: tuple[Cause, ...] = (
    SHARED_FILES,  # where runs change each other nothing else is told by what they did
    FRAMEWORK_LIMIT,
    HOST_EXITED,
    UNEQUAL_STEPS,
    COLLECTIVE_ORDER,
    COLLECTIVE_MISMATCH,
    WAITS_FOR_DATA,
    PYTHON_DEADLOCK,
    REPLICAS_MISSING,
    UNSEEDED,
    COUNTED,
    BATCH_SIZE,  # before what it looks like
    REPEATED,
    MISSING,
    REORDERED,
    STATIC_SPLIT,
    CROSS_REPLICA_TENSOR,  # the numbers of such a step say nothing of anything else
    INITIAL_WEIGHTS,
    MISSING_ALL_REDUCE,
    REPLICAS_DISAGREE,
    BATCHNORM,  # before what it would drown: the arithmetic is judged with it synchronized
    BATCHNORM_CANCELLED,
    VARIABLE_AGGREGATION,  # before what follows from it
    EMPTY_SHARD,
    NAN,
    ACCUMULATION,  # a factor, a decay and clipping of its own
    SPARSE_GRADIENT,
    PYTHON_STATE,  # what it does to a loss looks like clipping, a count, rows that depend on each other
    CLIP_BEFORE_REDUCE,  # clipped gradients have a factor of their own on each replica
    DOUBLE_ALL_REDUCE,
    LOSS_SCALING,
    UNEVEN_BATCH,
    DEPENDS_ON_REPLICAS,
    UPDATE_SCALING,
    LOSS_SCALING_OF_A_PART,
    REGULARIZATION,
    LOCAL_NORMALIZATION,
    IN_BATCH_NEGATIVES,
    LOSS_REPORT,
    METRIC_AGGREGATION,
    IDENTICAL_DROPOUT,
    STATIC_IN_GRAPH,
    CACHED_RANDOMNESS,
    HASH_ORDER,
    FILE_ORDER,
    UNSEEDED_HOSTS,
    IDENTICAL_AUGMENTATION,
    CHECKPOINT_CONFLICT,
    FINAL_WEIGHTS,
    HOST_VALUES,  # where nothing else explains it
    UNEXPLAINED,
    NOT_RECOVERED,
    CHECKPOINT_NOT_RESTORED,
    RECOVERED_DIFFERENTLY,
)


_BY_CODE: dict[str, Cause] = {}
"""Every cause by its code. Where a code has two searches, at different places of the order, this is the first one."""
for _cause in _CAUSES:
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

    def add(finding: Finding | None) -> None:
        if finding is not None:
            case.found.append(replace(finding, allowed=finding.code in allow))

    if only is not None:
        add(only.look(case))
        return tuple(case.found)
    add(SHARED_FILES.look(case))
    nothing_else = bool(case.found) and not case.found[0].allowed and not case.has_ended_early
    for cause in (NOT_RECOVERED,) if nothing_else else _CAUSES[1:]:
        add(cause.look(case))
    if case.has(UNEXPLAINED.code) and not case.has(UNSEEDED.code):
        add(UNSEEDED.look(case))
        case.found.sort(key=lambda finding: finding.code != UNSEEDED.code)
    if case.has(IN_BATCH_NEGATIVES.code):
        for cause in _CAUSES:
            add(cause.look_behind(case))
        if case.has(STATIC_SPLIT.code):  # it is that tensor's rows that a row depends on, not those of its batch
            case.found[:] = [finding for finding in case.found if finding.code != IN_BATCH_NEGATIVES.code]
    elif _is_of_a_gradient(case):
        _look_for_parts(case, add)
    return tuple(sorted(case.found, key=lambda f: (f.advice, f.by_design or f.code == IN_BATCH_NEGATIVES.code)))


def _look_for_parts(case: Case, add: Callable[[Finding | None], None]) -> None:
    """Check for wrong parts of the loss: a tensor that other parts also reach is a mixture."""
    unexplained = case.found[-1]
    for cause in (LOSS_SCALING, LOCAL_NORMALIZATION):
        add(cause.look_behind(case))
    if case.found[-1] is not unexplained and not case.found[-1].allowed:
        case.found.remove(unexplained)


def _is_of_a_gradient(case: Case) -> bool:
    """Return whether a gradient is unexplained, in a batch equal to that of one device."""
    first = case.comparison.first
    is_last = bool(case.found) and case.found[-1].code == UNEXPLAINED.code
    return is_last and first is not None and first.kind == "gradient" and not (case.ledger and case.ledger.grows)
