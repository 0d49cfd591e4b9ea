"""Tell causes by a sequential replay: one device does what the replicas do, one after the other.

It is asked where a step cannot be cut for experiments. That one device explains a step says only that it happens on a replica
by itself; what differs then, when replicas come in another order or examples are grouped otherwise, tells causes apart.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from emulate.interventions import common_input
from emulate.told import told
from emulate.verify.arithmetic import ROUND, are_equal, explain
from emulate.verify.case import Case
from emulate.verify.causes.cause import Sign, is_assigned, numbers
from emulate.verify.causes.closed_forms import factor_in_words, is_padded_otherwise
from emulate.verify.compare import Comparison, explains_up_to
from emulate.verify.lines import between, made, operations

REPLAY = "one device that processes the replicas one after the other (sequential replay)"
NOTE = told("sequential-replay")(
    "gpudist compared with a sequential replay: one device that processes the replicas one after the other. If it could not "
    'compare something, that is listed under "not compared"'
)

_SUMS = ("replicas-summed", "replicas")
_SUMS_AT_TAPES = ("replicas-taped", "replicas-taped-told", "replicas-taped-mean")
"""For a program that does more with gradients by itself than to hand them to an optimizer."""
_REPORTED = ("loss", "metric")


def is_possible(case: Case) -> bool:
    """Return whether one device can get the replicas' examples: those of one device, or a multiple by the replicas."""
    ledger = case.ledger
    return case.num_replicas > 1 and ledger is not None and (ledger.grows or ledger.first_apart in (None, ledger.num_steps))


def of_turns(case: Case) -> Sign | None:
    """Look for what one replica does that changes what the next one does: turns matter."""
    first = _open_step(case)
    way = None if first is None or case.facts.clips else _explaining(case, first)
    if first is None or way is None:
        return None
    backwards = f"{way.switch}-backwards"
    if _apart(case, backwards, first, way.first) is None or _explains(case, backwards, first, way.first):
        return None
    return Sign(
        "The step changes something in Python (a counter, a list, a generator) with each replica's call: "
        f"{case.num_replicas} times in a step, with another value on each replica.",
        f"{_first_in_words(case, first)}; {way.in_words}; in the reverse order of the replicas it does not",
        then=lambda: _rebase(case, first, way),
    )


def of_changed_gradients(case: Case) -> Sign | None:
    """Look for gradients that each replica changes by itself, where the losses agree: clipped or normalized by hand."""
    first = _open_step(case)
    if first is None or not case.losses_agree([first]) or _adds_noise(case, first):
        return None
    if (way := _where_grouping(case, first, matters=True)) is None:
        return None
    return Sign(
        "Each replica clips or normalizes its own gradient before the gradients are summed. Do it to the sum instead.",
        f"In step {first} the loss agrees, but the gradients that enter the optimizer do not; {way.in_words}",
        then=lambda: _rebase(case, first, way),
    )


def of_what_a_step_gets(case: Case) -> Sign | None:
    """Look for what a replica gets otherwise than one device: other inputs, the number of replicas, or its own number."""
    first = case.find_first_unexplained()
    if first is None or not is_possible(case):
        return None
    replayed = case.switch("replay") if case.ledger is not None and case.ledger.by else None
    if replayed is not None and explains_up_to(replayed, first, case.base):
        return _of_what_it_is_given(case, replayed, first)
    # Where the program does not ask for the number, Keras does, to divide its loss.
    agreeing = _agreeing_if_told(case, first) if case.lines.made("num_replicas") else None
    if agreeing is None:
        return _of_other_inputs(case, first) or _of_number(case, first)
    return replace(
        agreeing,
        summary=f"The step uses the number of replicas ({case.num_replicas}) for more than dividing the loss. The same "
        "examples and weights get different gradients with more replicas.",
    )


def of_clipped_parts(case: Case) -> Sign | None:
    """Look for gradients of single examples that are clipped, of losses that are divided by the number of replicas."""
    step = min((step for _, step in case.explain_gradients().unexplained), default=None)
    # Where the losses of the replicas add up, each replica may clip its own gradient. Noise has the loss of another example.
    is_whole = any(abs(point.factor - 1) < ROUND for point in case.base.objectives if point.step == step)
    if step is None or not case.clips_out_of_sight or is_whole or not is_possible(case):
        return None
    if (agreeing := _agreeing_if_told(case, step)) is None:
        return None
    return replace(
        agreeing,
        summary=f"The program clips gradients of a loss that is divided by the number of replicas ({case.num_replicas}), so "
        f"its limit is {case.num_replicas}x as large as on one device.",
        fix=_OF_CLIPPED,
        blame=(operations("given", "norm"), between("given")),
    )


def _agreeing_if_told(case: Case, step: int) -> Sign | None:
    """Check whether one device that gets the number of replicas has the same gradients, but for the loss's divisor."""
    again = case.switch("told")
    how = None if again is None else _how(again, step, case.base)
    if again is None or how is None:
        return None

    def rebase() -> None:
        case.rebase(again, "told")
        if case.explain_gradients().scaled:
            case.explain_fits(case.explain_gradients().scaled)

    told = f"one device with the same examples, given {case.num_replicas} as the number of replicas, {how}"
    return Sign(evidence=f"{_first_in_words(case, step)}; {told}", then=rebase)


def of_a_part(case: Case) -> Sign | None:
    """Look for a part of the loss that each replica divides by its own examples, beside others that are right."""
    first = case.find_first_unexplained()
    if first is None or not case.lines.depends_on_examples_alone:
        return None  # a term without examples may be what counts too often
    if (way := _where_grouping(case, first, matters=False)) is None:
        return None
    return Sign(
        "A part of the loss is scaled by the number of replicas: each replica divides it by its own examples, or it is "
        "divided once more than the rest.",
        f"The gradients differ from step {first} on, by no common factor; every term of the loss depends on examples; "
        f"{way.in_words}, {_HOWEVER}",
        then=lambda: _rebase(case, first, way),
    )


def of_each_replica(case: Case) -> Sign | None:
    """Look for a term of any form that is added once for each replica, or is divided by their number."""
    first = case.find_first_unexplained()
    if first is None or (way := _where_grouping(case, first, matters=False)) is None:
        return None
    return Sign(
        "A part of the loss counts once for each replica, or is divided by the number of replicas: a term without examples, a "
        "mean over the replica's own examples, or, where Keras divides the losses, a sum over examples.",
        f"The gradients differ from step {first} on; {way.in_words}, {_HOWEVER}",
        _FIXES,
        then=lambda: _rebase(case, first, way),
    )


def of_meetings(case: Case) -> Sign | None:
    """Look for examples that depend on which others their replica has."""
    first = _open_step(case)
    if first is None or _adds_noise(case, first):
        return None
    if (way := _where_grouping(case, first, matters=True)) is None:
        return None
    is_padded = is_padded_otherwise(case, case.base.exceeding[0].measure.key.optimizer, first)
    evidence, fix = f"{_first_in_words(case, first)}; {way.in_words}", OF_PADDING if is_padded else None
    return Sign(DEPENDENT, evidence, fix, then=lambda: _rebase(case, first, way))


def _adds_noise(case: Case, step: int) -> bool:
    """Return whether the step draws for gradients of a loss that agrees: noise that each replica adds is no other cause."""
    return case.losses_agree([step]) and bool(operations("given", "draw").find(case.lines))


def of_losses_alone(case: Case) -> Sign | None:
    """Check whether the differentiated losses are off by a factor that the gradients' rounding hides."""
    drowned, losses = case.base.drowned_from, [point for point in case.base.objectives if point.exceeds]
    first = min((point.step for point in losses), default=0)
    trained = case.base.first_step("gradient", "weight")
    if drowned is None or not losses or first < drowned or (trained is not None and trained < first):
        return None
    at_first = next(point for point in losses if point.step == first)
    words, _ = factor_in_words(case, at_first.factor)
    m = at_first.measure
    kinds = ("loss", "metric", "gradient", "weight")
    return Sign(
        f"The loss that is minimized is, from step {first} on, {words}.",
        f"The loss of step {first} is {m.in_print[0]}, summed over the replicas, and {m.in_print[1]} on one "
        f"device ({at_first.ratio:.0f}x the noise floor); from step {drowned} on the gradients have too much "
        "rounding error to show it",
        then=lambda: case.explain(lambda point: point.measure.key.kind in kinds and point.step >= first),
    )


def _open_step(case: Case) -> int | None:
    """Return the first step whose gradients differ, if no model explains it but for weights that are parts of no count.

    Not where a cause has explained it.
    """
    first, found = case.base.first_step("gradient"), case.explain_gradients()
    left = {point.step for point in case.left() if point.measure.key.kind == "gradient"}
    without_count = [fit.step for fit in found.weighted if not case.are_counts(fit)]
    return first if first in left & {*(step for _, step in found.unexplained), *without_count} else None


def _first_in_words(case: Case, step: int) -> str:
    first = case.base.exceeding[0]
    key = first.measure.key
    return f"{key.tensor} ({key.kind}) differs from step {step} on, by {first.ratio:.0f}x the noise floor"


def _of_number(case: Case, step: int) -> Sign | None:
    """Check whether one device that reads each replica's number has the same gradients."""
    if not case.facts.numbered or _explaining(case, step) is not None or (way := _explaining(case, step, "-numbered")) is None:
        return None
    return Sign(
        (
            "The result of a replica depends on its id (replica_id_in_sync_group): the same examples have "
            "different gradients on another replica."
        ),
        f"{_first_in_words(case, step)}; {way.in_words} only after it gets the number of each replica",
        _ALIKE,
        blame=(made("loss", "replica number", in_step=True),),
        then=lambda: _rebase(case, step, way),
    )


def _of_what_it_is_given(case: Case, replayed: Comparison, step: int) -> Sign:
    """Report that one device with the same inputs, and no other replica, has the same gradients."""
    return Sign(
        (
            "The program gives the step other inputs for the same examples: for example computed by one replica for "
            "all, or combined in another order than the examples."
        ),
        (
            f"{_first_in_words(case, step)}; one device that gets the same inputs and the same examples has the "
            "same gradients, without any other replica"
        ),
        _SAME_INPUTS,
        then=lambda: case.rebase(replayed, "replay"),
    )


def _of_other_inputs(case: Case, step: int) -> Sign | None:
    """Check whether one device has the same gradients with the numbers that this run's step gets besides its examples."""
    optimizer = next(name for name, k in case.explain_gradients().unexplained if k == step)
    ours, theirs = case.base.runs.pairs(optimizer)[step]
    own = next(iter(theirs.values()))
    others = [place for place in range(len(own.inputs)) if place not in own.row_inputs]
    values = {place: [common_input(list(side.values()), place) for side in (ours, theirs)] for place in others}
    both = [(at, ours, theirs) for at, (ours, theirs) in values.items() if ours is not None and theirs is not None]
    apart = [(at, ours, theirs) for at, ours, theirs in both if not np.array_equal(ours, theirs)]
    replayed = case.switch("inputs") if apart else None
    if replayed is None or not explains_up_to(replayed, step, case.base):
        return None
    place, *values_apart = apart[0]
    is_, was = (numbers([f"{number:.6g}" for number in np.ravel(value)[:_SHOWN]]) for value in values_apart)
    return Sign(
        (
            f"From step {step} on the program gives the step other numbers than on one device: input {place + 1} is {is_} "
            f"instead of {was}."
        ),
        f"{_first_in_words(case, step)}; one device that gets the same inputs has the same gradients",
        _OTHER_NUMBERS,
        blame=(operations("loss", "scale", "mean", "sum"),),
        then=lambda: case.rebase(replayed, "inputs"),
    )


def _how(again: Comparison, step: int, before: Comparison) -> str | None:
    """Return how one device that reads the number has the same gradients: exactly, or except for the loss's divisor."""
    if explains_up_to(again, step, before):
        return "has the same gradients"
    explanation = explain(again)
    fits = [fit for fit in explanation.scaled if fit.step == step and not (fit.decay or fit.shares)]
    if not fits or any(unexplained == step for _, unexplained in explanation.unexplained):
        return None
    return f"has the same gradients except for one factor, {fits[0].scale:.4g}, by which it divides the loss"


def _where_grouping(case: Case, step: int, *, matters: bool) -> _Replay | None:
    """Return how a replay explains a step, where it matters which rows are together on a replica, or where it does not.

    Where it does not, what comes once for each replica depends on no row.
    """
    way = _explaining(case, step)
    return None if way is None or _explains(case, f"{way.switch}-regrouped", step, way.first) == matters else way


_HOWEVER = "however the examples are grouped"


def rebase_on_any_replay(case: Case, step: int) -> None:
    """Judge on a reference that computes as the replicas do, each for itself; only up to a step where none is like them."""
    way = _explaining(case, step)
    if way is None:
        case.cut(step, "what each replica does with its own examples changes them")
    else:
        _rebase(case, step, way)


@dataclass(frozen=True)
class _Replay:
    """Hold how one device on the replicas' examples must sum to explain a step; `first`: for the first update only."""

    switch: str
    first: bool
    comparison: Comparison

    @property
    def agrees_in_training(self) -> bool:
        """Return whether it differs at most in what it reports."""
        return self.comparison.first_step("initial-weight", "gradient", "weight", "variable") is None

    @property
    def in_words(self) -> str:
        """Return what agrees."""
        if self.first:
            return f"{REPLAY} has the same gradients"
        if self.agrees_in_training:
            return (
                f"{REPLAY} {'agrees in everything' if self.comparison.is_equivalent else 'has the same gradients and weights'}"
            )
        left = self.comparison.exceeding[0]
        return f"{REPLAY} agrees up to there ({left.measure.key.tensor} differs from step {left.step} on)"


def _explaining(case: Case, step: int, kind: str = "") -> _Replay | None:
    if not is_possible(case):
        return None
    by_tapes = "tape" in case.topology.optimizers
    sums = (*_SUMS * (not by_tapes), *_SUMS_AT_TAPES * (by_tapes or bool(case.facts.clipped_by)))
    # Where a call makes several updates, from the second on gradients may depend on an update that all replicas make together,
    # and one after the other cannot: with one optimizer they do, another may train something else.
    firsts = [True] if case.facts.repeated else [False, True][: len(case.topology.optimizers)]
    for switch, first in itertools.product(sums, firsts):
        again = _apart(case, f"{switch}{kind}", step, first)
        if again is not None and explains_up_to(again, step, case.base):
            return _Replay(switch, first, again)
    return None


def _explains(case: Case, switch: str, step: int, first: bool) -> bool:
    return explains_up_to(_apart(case, switch, step, first), step, case.base)


def _rebase(case: Case, step: int, way: _Replay) -> None:
    again = way.comparison
    case.unreachable.append(_WITHOUT_EXAMPLES)
    if not again.is_equivalent and way.agrees_in_training:
        again = replace(again, points=tuple(p for p in again.points if p.measure.key.kind not in _REPORTED))
        case.unreachable.append(_OTHER_REPORTS)
    if way.first:
        case.unreachable.append(_REPEATED.format(_first_out(case, step), step))
    views = [view for name in case.base.runs.optimizers if case.base.steps[name] > step for view in case.base.views(name, step)]
    adds_up_itself = bool(views) and all(are_equal(view.locals) for view in views)
    case.clips_the_sum = way.switch in _SUMS_AT_TAPES or adds_up_itself
    case.rebase(again, None, NOTE)


_OTHER_REPORTS = told("replay-reports")("losses and metrics: the sequential replay reports them in a different way")
_REPEATED = told("first-update-only")(
    "everything except the gradients of {} up to step {}: a call of Strategy.run makes several updates, and a sequential "
    "replay can make only the first"
)


def _apart(case: Case, switch: str, step: int, first: bool) -> Comparison | None:
    """Compare with one device on the examples of one replica after the other, for the first update of a call or all."""
    again = case.switch(switch, alone=True)
    if again is None:
        return None
    # What a step assigns itself, such as moving averages, one share after the other changes once for each share.
    trained = (p for p in again.points if not (is_assigned(case, p) or p.measure.key.tensor in case.facts.batchnorm))
    again = replace(again, points=tuple(trained))
    if not first:
        return again
    optimizer = _first_out(case, step)
    kept = tuple(p for p in again.points if p.measure.key.optimizer == optimizer and p.step <= step)
    return replace(again, points=kept, objectives=())


def _first_out(case: Case, step: int) -> str:
    """Return the optimizer whose gradients differ in a step; of several the first unexplained one."""
    unexplained = {name for name, k in case.explain_gradients().unexplained if k == step}
    return next((name for name in case.topology.optimizers if name in unexplained), None) or next(
        p.measure.key.optimizer for p in case.base.exceeding if p.measure.key.kind == "gradient" and p.step == step
    )


_WITHOUT_EXAMPLES = told("code-without-examples")(
    "code that does not depend on the examples (a loss term without examples, a count): the sequential replay runs it "
    "once for each replica, as the replicas do"
)
_FIXES = "If the term has another form"
_ALIKE = "If it depends on the id of a replica"
_OF_CLIPPED = "If gradients of single examples are clipped"
_OTHER_NUMBERS = "If the step gets other numbers"
_SHOWN = 3
"""So many numbers of an input are shown."""
_SAME_INPUTS = "If the inputs of the step are mixed up"
OF_PADDING = "If each host pads its own batches"
DEPENDENT = (
    "The loss of one example depends on the other examples of its batch. Each replica sees only its own examples, so the "
    "program trains a different model."
)
