"""Detect examples that are lost, repeated, or seen in another order."""

from __future__ import annotations

import math

from emulate.verify.arithmetic import are_equal
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.hosts import tables_apart
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll, gradients_of, is_numeric, names_of, state_of
from emulate.verify.ledger import Ledger
from emulate.verify.ledgers import parts_of_rows
from emulate.verify.lines import counted_apart, made, operations, seeded_apart

_FEWEST = 3
"""Steps it takes to believe that replicas compute the same."""

_FOR_EACH = "If the function of a dataset is called for each replica"
_TO_EACH = "If every replica gets all examples"
_BY_NUMBER = "If the step takes its examples itself"


def _apart(case: Case) -> Ledger | None:
    """Return the ledger if examples differ and nothing else says why; None also where hosts number words differently."""
    ledger = case.ledger
    unusable = ledger is None or ledger.grows or ledger.first_apart is None or tables_apart(case)
    return None if unusable or any(map(case.has, _EXPLAIN_EXAMPLES)) else ledger


_EXPLAIN_EXAMPLES = ("framework-limit", "unseeded-randomness", "replicas-missing", "accumulation", "batch-size")
"""Causes that say by themselves which examples a step has."""


def _beside_allowed(case: Case) -> Ledger | None:
    """Return the ledger if causes that explain which examples a step has are allowed: they hide no lost or repeated ones."""
    explained = {code for code in _EXPLAIN_EXAMPLES if case.has(code)}
    ledger = case.ledger if explained and explained <= set(case.allow) else None
    return None if ledger is None or ledger.grows else ledger


def _search_batches(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is None:
        return None
    if ledger.times_as_small > 1:
        return _divided(case, ledger)
    if ledger.times_as_large == 1 or ledger.fewer > 0:  # a larger batch may leave more of a remainder
        return None
    size, expected = ledger.sizes(0)
    return Sign(
        f"Every step has {ledger.times_as_large}x as many examples as on one device, in another order.",
        f"Step 0 has {size} examples, {expected} on one device; no example repeats before all others have come. "
        f"One device has {ledger.rows_in_all[1]} examples in {len(ledger.reference)} steps, this run "
        f"{ledger.rows_in_all[0]} in {len(ledger.topology)}",
    )


def _divided(case: Case, ledger: Ledger) -> Sign:
    """Report a batch that the program divides, and the strategy divides again: an epoch has that many times the steps."""
    size, expected = ledger.sizes(0)
    return Sign(
        (
            f"A step has 1/{ledger.times_as_small} of the examples of one device's batch, and an epoch has "
            f"{ledger.times_as_small}x as many steps."
        ),
        (
            f"Step 0 has {size} examples, {expected} on one device; {ledger.times_as_small} steps in a row have the "
            "examples of one step there, in its order"
        ),
        _GLOBAL,
        then=lambda: case.explain_aside(_is_of_an_epoch),
    )


def _is_of_an_epoch(point: Point) -> bool:
    """Return whether a report is Keras's, of an epoch so far: epochs of other rows begin elsewhere."""
    return point.measure.key.tensor.startswith(("batch/", "epoch/"))


_GLOBAL = "If a step has too few examples"


def _search_counted(case: Case) -> Sign | None:
    """Check whether the batches are those of one device, and fewer of them are applied together."""
    ledger = _apart(case)
    if ledger is None or ledger.times_as_small == 1:
        return None
    ours, theirs = case.base.runs.batches(ledger.optimizer)
    if theirs != ours * ledger.times_as_small:
        return None
    divided, step = _divided(case, ledger), complete(case.base.runs.topology, ledger.optimizer)[0]
    assigned = {name: state_of(step, name) for own in step.values() for name in own.state}
    return Sign(
        f"An update is made after {ours} batch{'es' * (ours > 1)} on {case.num_replicas} replicas, and after {theirs} on "
        "one device. Each batch is the same.",
        divided.evidence,
        _COUNTED,
        then=divided.then,
        tensors=[name for name, value in assigned.items() if value is not None and not is_numeric(value)],
    )


_COUNTED = "If an update is made after too few batches"


def _search_repeated(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is None and (allowed := _beside_allowed(case)) is not None:
        return _too_many(allowed, allowed.more) if allowed.is_whole and allowed.more > 0 else None
    if ledger is None:
        return _alike(case) if case.ledger is None else None
    if _moved(ledger) or ledger.left_out or ledger.draws_others:
        return None
    if ledger.shared_by_hosts:
        # Hosts whose orders are one at first make others of what they have learned since, or drawn.
        later = made("examples", "distribute", "dataset function")
        return Sign(
            "In an epoch hosts train on some of the same examples, and on others not at all: several hosts took "
            f"{ledger.shared_by_hosts} examples before all had come once. Each host takes its share of its own order.",
            _four_numbers(ledger)
            + f"; steps differ from step {ledger.first_apart} on and have as many examples as on one device",
            [_ONE_ORDER, *[_OF_RESULTS] * bool(ledger.first_apart)],
            blame=[
                seeded_apart("examples", "shuffle", "generator"),
                made("examples", "shuffle"),
                *[later] * bool(ledger.first_apart),
                made("examples", "generator"),
            ],
        )
    if ledger.repeated_in_step:
        return _shared(case, ledger)
    # In a run that is cut, examples of the next epoch may have come because others are lost.
    is_told_apart = not ledger.lost or (ledger.is_whole and MISSING.code in case.allow)
    repeated = ledger.samples.repeated if is_told_apart and not ledger.counts_by_chance else 0
    return _too_many(ledger, repeated) if repeated else None


def _too_many(ledger: Ledger, repeated: int) -> Sign:
    return Sign(
        f"Examples come more often than on one device: {repeated} too many in {ledger.counted[0]} steps.",
        _four_numbers(ledger) + f"; steps differ from step {ledger.first_apart} on",
    )


_ONE_ORDER = "If each host has its own order"
_OF_RESULTS = "If hosts order the examples by results"


def _alike(case: Case) -> Sign | None:
    """Check for equal examples on all replicas that are no inputs of the step: the results are equal bit by bit."""
    first = case.find_first_unexplained()
    if first is None or case.has("unseeded-randomness"):
        return None
    steps = [step for name in case.untouched.optimizers for step in complete(case.untouched, name)]
    if len(steps) < _FEWEST or not all(_is_alike(step) for step in steps):
        return None
    return Sign(
        "All replicas compute bit for bit the same loss and gradients: they train on the same examples.",
        f"In all {len(steps)} steps the loss and the gradients of the {len(steps[0])} replicas are bit for bit "
        "equal, and the gradients are not those of one device. gpudist could not see the examples, because they "
        "are not arguments of the step",
        _BY_NUMBER,
        then=lambda: case.cut(first, "all replicas compute the same, from examples that gpudist could not see"),
    )


def _is_alike(step: StepOfAll) -> bool:
    """Return whether several replicas have one loss, which is not 0, and the same gradients."""
    losses = {local.objective for local in step.values()}
    if len(step) < 2 or len(losses) != 1 or None in losses or 0 in losses:
        return False
    gradients = [gradients_of(step, tensor) for tensor in names_of(step)]
    return all(
        len(parts) == len(step) and are_equal({replica: array.read() for replica, array in parts.items()})
        for parts in gradients
    )


def _shared(case: Case, ledger: Ledger) -> Sign:
    if ledger.identical_hosts:
        who, steps = "host", ledger.identical_hosts
    elif ledger.identical_replicas:
        who, steps = "replica", ledger.identical_replicas
    else:
        who, steps = "", ()
    summary = (
        f"Every {who} trains on the same examples: the data are not sharded."
        if who
        else "Several replicas train on the same examples in the same step."
    )
    evidence = f"{ledger.repeated_in_step} examples came on more than one replica in the same step"
    alike = f"; in {len(steps)} of {len(ledger.topology)} steps all {who}s had the same examples" if who else ""
    is_of_function = any(event["kind"] == "dataset function" for _, event in case.untouched.of("made"))
    fix = None if who != "replica" else _FOR_EACH if is_of_function else _TO_EACH
    return Sign(summary, f"{evidence}{alike}. {_four_numbers(ledger)}", fix)


def _search_missing(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is None and (allowed := _beside_allowed(case)) is not None and allowed.ended and allowed.more < 0:
        return _lost(case, allowed, _FEWER.format(-allowed.more), None)
    if ledger is None or _moved(ledger) or ledger.draws_others:
        return None
    # Where hosts repeat each other's examples, the repeats took the place of the missing ones: one cause says both.
    is_displaced = bool(ledger.shared_by_hosts or (ledger.repeated_in_step and ledger.is_prefix))
    if is_displaced and not (ledger.ended and REPEATED.code in case.allow):
        return None
    if ledger.left_out:
        return _remainder(case, ledger)
    lost = ledger.samples.missing if is_displaced else ledger.lost
    if lost <= 0:
        return None
    if ledger.only_ends_early:
        return _lost(case, ledger, f"There are fewer steps than on one device: {lost} examples fewer in all.", _TOO_FEW_STEPS)
    return _lost(case, ledger, _FEWER.format(lost), None)


_FEWER = "Examples are lost: {} fewer than on one device."


def _remainder(case: Case, ledger: Ledger) -> Sign:
    steps, rows = sorted(ledger.left_out), sum(ledger.left_out.values())
    what = (
        "The last, smaller batch of an epoch is dropped"
        if all(ledger.left_out[k] == len(ledger.reference[k]) for k in steps)
        else "The remainder of a division of the batch is dropped"
    )
    summary = f"{what}: {rows} examples in {len(steps)} step{'s' * (len(steps) > 1)} of one device."
    return _lost(case, ledger, summary, _REMAINDER)


def _lost(case: Case, ledger: Ledger, rows: str, fix: str | None) -> Sign:
    k = ledger.first_apart or 0
    size, expected = ledger.sizes(k)
    first_left_out = min(ledger.left_out, default=math.inf)

    def follows(point: Point) -> bool:
        """Return whether a report counts over an epoch, which has fewer rows."""
        return _is_of_an_epoch(point) or (point.measure.key.kind == "metric" and point.step >= first_left_out - 1)

    end = f"The run ends after {len(ledger.topology)} steps, one device continues. " if ledger.ends_early else ""
    ours, theirs = (parts_of_rows(trace, ledger.optimizer) for trace in (case.untouched, case.plain))
    columns = [set(column) for column in zip(*theirs, strict=True)]
    new = set(ours) - set(theirs) if len(columns) > 1 else ()
    wrong = sum(all(part in of for part, of in zip(row, columns, strict=True)) for row in new)
    pairs = f". {wrong} examples are paired wrongly: one device has their parts, but not together" if wrong else ""
    return Sign(
        rows,
        f"{end}Step {k}, the first that differs, has {size} examples on {len(ledger.hosts)} replicas and "
        f"{expected} on one device. {_four_numbers(ledger)}{pairs}",
        _JOINED if wrong else fix,
        then=lambda: case.explain_aside(follows),
    )


_JOINED = "If files are joined with other data"
_REMAINDER = "If the last batch is dropped"
_TOO_FEW_STEPS = "If there are fewer steps"


def _search_reordered(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is not None and (moved := _moved(ledger)):
        batches = f"{abs(moved)} batch{'es' * (abs(moved) > 1)} {'later' if moved > 0 else 'earlier'}"
        return Sign(
            f"The batches are those of one device in the same order, but begin {batches}.",
            _seen(ledger),
            [_AHEAD_IN_FIT, _AHEAD] if case.facts.compiled else _AHEAD,
        )
    if ledger is not None and ledger.draws_others:
        return Sign(
            (
                f"From step {ledger.first_apart} on other examples are chosen than on one device. The choice depends on "
                "results of the steps before, or on random numbers."
            ),
            (
                f"Up to step {(ledger.first_apart or 0) - 1} the examples are those of one device, and too many repeat "
                f"before all others have come once. {_seen(ledger)}"
            ),
            _OF_ALL_REPLICAS,
        )
    if ledger is None or ledger.repeated_in_step or ledger.lost > 0:
        return None
    if ledger.shared_by_hosts:
        return None
    if ledger.samples.repeated and not ledger.foreign and not ledger.counts_by_chance:
        return None
    if not ledger.is_reordered and (ledger.foreign > 0.9 * ledger.samples.seen or ledger.is_changed_in_place):
        return None
    return Sign(
        f"The same examples come in other batches than on one device, from step {ledger.first_apart} on.", _seen(ledger)
    )


_OF_ALL_REPLICAS = "If the step chooses its examples"


def _seen(ledger: Ledger) -> str:
    """Return the four numbers, and why they need not add up."""
    beyond = f"; {ledger.foreign} examples come from later steps than one device recorded" if ledger.foreign else ""
    cut = "; the last step is inside an epoch, so some examples came once more than others, on one device too"
    return _four_numbers(ledger) + (cut if ledger.is_cut_within_an_epoch else beyond)


def _moved(ledger: Ledger) -> int:
    """Return by how many steps all batches are early (> 0) or late, up to half of the steps; otherwise 0.

    Not where both begin with the same batch, as one epoch may have the order of the next.
    """
    if ledger.first_apart != 0:
        return 0
    ours = [sorted(row for rows in step.values() for row in rows) for step in ledger.topology]
    theirs = [sorted(rows) for rows in ledger.reference]
    most = 0 if ledger.ends_early or ledger.goes_on else ledger.num_steps - max(_FEWEST, ledger.num_steps // 2)
    for k in range(1, most + 1):
        for by, shifted, other in ((k, theirs, ours), (-k, ours, theirs)):
            if all(early == late for early, late in zip(shifted[k:], other, strict=False)):
                return by
    return 0


_AHEAD_IN_FIT = "With a PyDataset in fit"
_AHEAD = "If the batches begin earlier or later"


def _four_numbers(ledger: Ledger) -> str:
    n, (ours, theirs) = ledger.samples, ledger.counted
    return (
        f"One device has {n.reference} examples in {theirs} steps, this run {n.seen} in {ours}; "
        f"{n.missing} missing, {n.repeated} repeated"
    )


COUNTED = Cause("accumulation", _search_counted, blame=(operations("assigned", "assign"), made("start", "num_replicas")))

BATCH_SIZE = Cause(
    "batch-size",
    _search_batches,
    unless=("accumulation",),
    blame=(made("examples", "batch", "padded_batch", "dataset function", "distribute"),),
)

REPEATED = Cause(
    "samples-repeated",
    _search_repeated,
    blame=(
        made("examples", "auto_shard_policy", value="OFF"),
        made("examples", "dataset function", "repeat", "distribute"),
        made("examples", "run"),
    ),
)

MISSING = Cause(
    "samples-missing",
    _search_missing,
    blame=(
        counted_apart("examples", "take", "skip"),
        made("examples", "shard", "take", "skip", "dataset function", "batch", "distribute"),
    ),
)

REORDERED = Cause(
    "samples-reordered",
    _search_reordered,
    unless=("samples-missing",),
    blame=(made("examples", "shuffle", "shard", "interleave", "dataset function", "distribute"),),
)
