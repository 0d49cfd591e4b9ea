"""Rows that are lost, seen too often, or seen in another order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emulate.probe.trace import Array
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.host_values import tables_apart
from emulate.verify.gradients import StepOfAll, gradients_of, names_of
from emulate.verify.ledger import Ledger
from emulate.verify.measure import complete

_FEWEST = 3
"""Steps it takes to believe that replicas compute the same."""

_TO_EACH = (
    "Hand the elements of a distributed dataset to the step: a plain tensor or NumPy array goes to every replica whole.\n"
    "    for x, y in strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH_SIZE)):\n"
    "        strategy.run(step, args=(x, y))\n"
    "Keras's model.train_on_batch(x, y) hands all of them to every replica too: take fit, or such a loop.\n"
    "Where the step takes its rows by itself, let each replica take its own, by its number:\n"
    "    replica = tf.distribute.get_replica_context().replica_id_in_sync_group"
)
_BY_NUMBER = (
    "Let each replica take rows of its own, by its number:\n"
    "    replica = tf.distribute.get_replica_context().replica_id_in_sync_group\n"
    "    start = step * GLOBAL_BATCH_SIZE + replica * ROWS_OF_A_REPLICA\n"
    "or hand the rows to the step as arguments, from strategy.experimental_distribute_dataset."
)


def _apart(case: Case) -> Ledger | None:
    """The ledger where rows differ; not where the program's data do not even repeat, nor where hosts number words otherwise."""
    ledger = case.ledger
    unusable = ledger is None or ledger.grows or ledger.first_apart is None or tables_apart(case)
    return None if unusable or case.has("unseeded-randomness") or case.has("replicas-missing") else ledger


def _search_batches(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is None:
        return None
    if ledger.times_as_small > 1:
        return _divided(case, ledger)
    if ledger.times_as_large == 1 or ledger.lost > 0:
        return None
    seen, expected = ledger.sizes(0)
    return Sign(
        f"Every step has {ledger.times_as_large} times as many rows as on one device, and they come in another order.",
        f"Step 0 has {seen} rows, {expected} on one device; no row comes a second time before all others have come. Ledger: "
        f"one device {ledger.rows_in_all[1]} rows in {len(ledger.reference)} steps, this run {ledger.rows_in_all[0]} in "
        f"{len(ledger.topology)}",
    )


def _divided(case: Case, ledger: Ledger) -> Sign:
    """A batch that is divided by the program, and again by the strategy: an epoch has that many times the steps."""
    case.explain_aside(lambda point: point.measure.key.tensor.startswith(("batch/", "epoch/")))
    seen, expected = ledger.sizes(0)
    return Sign(
        f"A step has the rows of 1/{ledger.times_as_small} of one device's batch, and an epoch that many times the steps.",
        f"Step 0 has {seen} rows, {expected} on one device; {ledger.times_as_small} steps in a row have the rows of one step "
        "there, in its order",
        _GLOBAL,
    )


_GLOBAL = (
    "Make the batches that one device would have: experimental_distribute_dataset and Keras's fit divide them among the "
    "replicas themselves,\n"
    "    strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH_SIZE))\n"
    "    model.fit(x, y, batch_size=GLOBAL_BATCH_SIZE)\n"
    "whatever num_replicas_in_sync is. Batches of one replica are made in distribute_datasets_from_function alone, by\n"
    "    dataset.batch(context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE))"
)


def _search_repeated(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is None:
        return _alike(case) if case.ledger is None and not case.has(BATCH_SIZE.code) else None
    if case.has(BATCH_SIZE.code) or _moved(ledger) or ledger.left_out or ledger.draws_others:
        return None
    if ledger.shared_by_hosts:
        return Sign(
            f"Hosts train on the same rows in part, and on others not at all: {ledger.shared_by_hosts} rows are taken by "
            "several of them before all have come once, as each takes its share of an order of its own.",
            _four_numbers(ledger) + f"; steps differ from step {ledger.first_apart} on, and have as many rows as on one device",
            _ONE_ORDER,
        )
    if ledger.repeated_in_step:
        return _shared(ledger)
    if ledger.samples.repeated and not ledger.lost and not ledger.is_cut_within_an_epoch:
        return Sign(
            f"Rows are consumed more often than on one device: {ledger.samples.repeated} too many in {ledger.num_steps} steps.",
            _four_numbers(ledger) + f"; steps differ from step {ledger.first_apart} on",
        )
    return None


_ONE_ORDER = (
    "Give what orders the rows before the hosts take their shares one seed, the same on every host and not one by its number:\n"
    "    dataset.shuffle(n, seed=SEED)\n"
    "    numpy.random.default_rng(SEED).permutation(n)\n"
    "and tf.random.set_seed, which TensorFlow mixes into such a seed, the same number on every host until the data are made; "
    "let the shares not overlap. Or share the rows out first, dataset.shard(num_hosts, host) before the shuffle, and "
    "accept the other batches that this makes. Or let the strategy shard, with one seed as well: "
    "strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH_SIZE))."
)


def _alike(case: Case) -> Sign | None:
    """Rows that are no input of the step are not seen; replicas that compute bit for bit the same have the same."""
    first = case.base.first_step("gradient")
    if first is None or case.has("unseeded-randomness") or not any(k == first for _, k in case.explanation.unexplained):
        return None
    steps = [step for name in case.untouched.optimizers for step in complete(case.untouched, name)]
    if len(steps) < _FEWEST or not all(_is_alike(step) for step in steps):
        return None
    case.cut(first, "all replicas compute the same, on rows that were not seen")
    return Sign(
        "All replicas compute bit for bit the same loss and gradients: they train on the same rows.",
        f"In all {len(steps)} steps the loss and each local gradient of the {len(steps[0])} replicas are the same bit for bit, "
        "and the gradients are not one device's. Which rows they are was not seen: they are no arguments of the step",
        _BY_NUMBER,
    )


def _is_alike(step: StepOfAll) -> bool:
    """Whether all of several replicas have one loss, which is not 0, and the same gradients."""
    losses = {one.objective for one in step.values()}
    if len(step) < 2 or len(losses) != 1 or None in losses or 0 in losses:
        return False
    found = [gradients_of(step, tensor) for tensor in names_of(step)]
    return all(len(one) == len(step) and _are_same([array.read() for array in one.values()]) for one in found)


def _are_same(arrays: Sequence[Array]) -> bool:
    return all(np.array_equal(array, arrays[0]) for array in arrays[1:])


def _shared(ledger: Ledger) -> Sign:
    if ledger.identical_hosts:
        who, steps = "host", ledger.identical_hosts
    elif ledger.identical_replicas:
        who, steps = "replica", ledger.identical_replicas
    else:
        who, steps = "", ()
    summary = (
        f"Every {who} trains on the same rows: the data is not sharded."
        if who
        else "Several replicas train on the same rows in the same step."
    )
    evidence = f"{ledger.repeated_in_step} rows were consumed by more than one replica in the same step"
    alike = f", in {len(steps)} of {len(ledger.topology)} steps all {who}s had the same rows" if who else ""
    return Sign(summary, f"{evidence}{alike}. {_four_numbers(ledger)}", _TO_EACH if who == "replica" else None)


def _search_missing(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is None or case.has(BATCH_SIZE.code):
        return None
    if (ledger.repeated_in_step and ledger.is_prefix) or _moved(ledger):
        return None  # where hosts repeat each other's rows, the repeats took the place of the missing ones
    if ledger.shared_by_hosts or ledger.draws_others:
        return None
    if ledger.left_out:
        return _remainder(case, ledger)
    if ledger.lost <= 0 and not ledger.only_ends_early:
        return None
    rows = (
        f"Rows are lost: {ledger.lost} different rows fewer than on one device are seen."
        if ledger.lost > 0
        else f"Rows are seen less often than on one device, as there are fewer steps: {ledger.samples.missing} fewer in all."
    )
    return _lost(case, ledger, rows, _TOO_FEW_STEPS if ledger.only_ends_early else None)


def _remainder(case: Case, ledger: Ledger) -> Sign:
    steps, rows = sorted(ledger.left_out), sum(ledger.left_out.values())
    # What a program counts over an epoch, it counts over fewer rows.
    case.explain_aside(lambda point: point.measure.key.kind == "metric" and point.step >= steps[0] - 1)
    what = (
        "The last, smaller batch of an epoch is left out"
        if all(ledger.left_out[k] == len(ledger.reference[k]) for k in steps)
        else "Rows that are left over when a batch is divided are left out"
    )
    summary = f"{what}: {rows} rows of {len(steps)} step{'s' * (len(steps) > 1)} of one device."
    return _lost(case, ledger, summary, _REMAINDER)


def _lost(case: Case, ledger: Ledger, rows: str, fix: str | None) -> Sign:
    k = ledger.first_apart or 0
    seen, expected = ledger.sizes(k)
    # Keras's logs are of an epoch so far, and epochs of fewer rows begin elsewhere.
    case.explain_aside(lambda point: point.measure.key.tensor.startswith(("batch/", "epoch/")))
    end = f"The run is over after {len(ledger.topology)} steps, one device goes on. " if ledger.ended else ""
    return Sign(
        rows,
        f"{end}Step {k}, the first that differs, has {seen} rows on {len(ledger.hosts)} replicas and {expected} on one device. "
        + _four_numbers(ledger),
        fix,
    )


_REMAINDER = (
    "Keep the remainder, whatever the number of replicas: no drop_remainder where there are several, and no division that "
    "leaves rows over.\n"
    "    dataset.batch(GLOBAL_BATCH_SIZE)  # without drop_remainder\n"
    "    steps_per_epoch = -(-NUMBER_OF_ROWS // GLOBAL_BATCH_SIZE)\n"
    "    numpy.array_split(rows, num_replicas)  # by hand, not len(rows) // num_replicas each\n"
    "and divide the loss by the rows of the global batch as it comes. Or drop it on one device too: drop_remainder=True "
    "whatever the number of replicas."
)
_TOO_FEW_STEPS = (
    "Every step has the rows of one device's, there are only fewer steps. Whatever the number of replicas, take all rows (no "
    "take(), range or number of steps that is divided by the replicas or the workers), and count steps in global batches:\n"
    "    steps_per_epoch = NUMBER_OF_ROWS // GLOBAL_BATCH_SIZE\n"
    "and give no host a shard of data that the strategy shards too. A program that decides by itself to stop needs a number "
    "for that which is summed over all replicas and hosts."
)


def _search_reordered(case: Case) -> Sign | None:
    ledger = _apart(case)
    if ledger is not None and (moved := _moved(ledger)):
        batches = f"{abs(moved)} batch{'es' * (abs(moved) > 1)} {'later' if moved > 0 else 'earlier'}"
        return Sign(
            f"The batches are those of one device in its order, but begin {batches}.",
            _seen(ledger),
            _AHEAD_IN_FIT + _AHEAD if case.facts.compiled else _AHEAD,
        )
    if ledger is not None and ledger.draws_others and not case.has(BATCH_SIZE.code):
        return Sign(
            f"From step {ledger.first_apart} on other rows are drawn than on one device: which ones depends on what the steps "
            "before it returned, or on the numbers drawn for them.",
            f"Up to step {(ledger.first_apart or 0) - 1} the rows are those of one device, where too many come again before "
            f"all others have come once. {_seen(ledger)}",
            _OF_ALL_REPLICAS,
        )
    if ledger is None or ledger.repeated_in_step or case.has(MISSING.code) or ledger.lost > 0 or case.has(BATCH_SIZE.code):
        return None
    if ledger.shared_by_hosts:
        return None
    if ledger.samples.repeated and not ledger.foreign and not ledger.is_cut_within_an_epoch:
        return None
    if not ledger.is_reordered and (ledger.foreign > 0.9 * ledger.samples.seen or ledger.is_changed_in_place):
        return None
    return Sign(f"The same rows come in other batches than on one device, from step {ledger.first_apart} on.", _seen(ledger))


_OF_ALL_REPLICAS = (
    "Choose the rows of a step by the results of all replicas, in the order of their rows; those of one replica "
    "(strategy.experimental_local_results(per_replica)[0]) belong to its own rows alone. Priorities, errors or losses are:\n"
    "    values = tf.concat(strategy.experimental_local_results(per_replica), axis=0)\n"
    "or, of several hosts, strategy.gather(per_replica, axis=0). And let what draws rows have one seed, and draw as often "
    "whatever the number of replicas."
)


def _seen(ledger: Ledger) -> str:
    """The four numbers, and why they need not add up."""
    beyond = f"; {ledger.foreign} rows come from beyond the steps that one device recorded" if ledger.foreign else ""
    cut = "; the last step lies within an epoch, so some rows came once more than others, on one device too"
    return _four_numbers(ledger) + (cut if ledger.is_cut_within_an_epoch else beyond)


def _moved(ledger: Ledger) -> int:
    """By how many steps all batches come too early (more than 0) or too late, of half of the steps at most; else 0.

    Not where both begin with the same batch, as one epoch may have the order of the next.
    """
    if ledger.first_apart != 0:
        return 0
    ours = [sorted(row for rows in step.values() for row in rows) for step in ledger.topology]
    theirs = [sorted(rows) for rows in ledger.reference]
    most = 0 if ledger.ended else ledger.num_steps - max(_FEWEST, ledger.num_steps // 2)
    for k in range(1, most + 1):
        for by, one, other in ((k, theirs, ours), (-k, ours, theirs)):
            if all(early == late for early, late in zip(one[k:], other, strict=False)):
                return by
    return 0


_AHEAD_IN_FIT = (
    "Of fit with a keras.utils.PyDataset that has workers > 1 (or use_multiprocessing) it is Keras's own doing: they work "
    "before the first epoch begins, and the more replicas there are, the more batches are gone when it does. With one worker "
    "each epoch has its own batches, from the first one on:\n"
    "    super().__init__(workers=1, use_multiprocessing=False)\n"
)
_AHEAD = (
    "Of an iterator take no batch before the training, or as many whatever the number of replicas. Or accept it with "
    "--allow samples-reordered."
)


def _four_numbers(ledger: Ledger) -> str:
    n = ledger.samples
    steps = len(ledger.reference) if ledger.ended else ledger.num_steps
    return (
        f"Ledger: one device {n.reference} rows in {steps} steps, this run {n.seen} in {ledger.num_steps}; "
        f"{n.missing} missing, {n.repeated} seen too often"
    )


BATCH_SIZE = Cause(
    code="batch-size",
    title="batches of another size",
    meaning="Every host, or every replica, makes batches of as many rows as the global batch has: a step has as many times the "
    "rows as there are hosts, an epoch that much fewer steps. Or the program divides the batch by the replicas, and the "
    "strategy does so again: a step has 1/N of the rows.",
    evidence="The rows of every step: as many times those of one device, in another order, while each row comes once an epoch; "
    "or those of a part of one device's batch, step after step. "
    "(Where they are those of one device's next steps, the batch grows by intent: that is compared with one device on as large "
    "a batch, and a note says so.)",
    fix="A function for distribute_datasets_from_function makes the batches of one host: give each replica its part,\n"
    "    dataset.shard(context.num_input_pipelines, context.input_pipeline_id)\n"
    "    .batch(context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE))\n"
    "while experimental_distribute_dataset takes dataset.batch(GLOBAL_BATCH_SIZE). Where a batch that grows with the replicas "
    "is meant, shuffle the rows before they are shared out, with one seed on all hosts.",
    search=_search_batches,
)

REPEATED = Cause(
    code="samples-repeated",
    title="rows seen too often",
    meaning="Replicas or hosts train on the same rows: the input was not sharded, so an epoch counts the same rows "
    "several times "
    "and the step is no larger than one replica's.",
    evidence="The identity of every row in every step: the same row on several replicas in one step, or more often "
    "than on one device.",
    fix="Let the strategy shard: strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH_SIZE)), or Keras's fit, "
    "and no AutoShardPolicy.OFF in the options of the dataset, which gives every host all rows:\n"
    "    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA\n"
    "In distribute_datasets_from_function, which does not shard, per host:\n"
    "    dataset.shard(context.num_input_pipelines, context.input_pipeline_id)\n"
    "    .batch(context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE))\n"
    "Hosts that permute the rows before they take their share need one seed for all.",
    search=_search_repeated,
)

MISSING = Cause(
    code="samples-missing",
    title="rows never seen",
    meaning="Rows that one device trains on reach no replica: sharded twice, a shard index that skips, take() or an "
    "integer "
    "division per replica, a dropped remainder.",
    evidence="The identity of every row: rows of the reference's steps that no replica consumed.",
    fix="Shard once: either strategy.experimental_distribute_dataset, or Keras's fit, on the whole dataset (they shard by "
    "themselves), or distribute_datasets_from_function with dataset.shard(num_input_pipelines, input_pipeline_id), not both; "
    "and keep the remainder when dividing by the number of replicas.",
    search=_search_missing,
)

REORDERED = Cause(
    code="samples-reordered",
    title="rows in other batches",
    meaning="Every row is seen, but the batches are composed differently than on one device: sharded by file, shuffled "
    "after "
    "sharding, interleaved. Or they are those of one device, and begin later: some were fetched before the training. Or "
    "which rows are drawn depends on what the steps before returned, of one replica alone. Each step then has another "
    "gradient.",
    evidence="The identity of every row: the same rows over the recorded steps, in other steps.",
    fix="Shuffle and batch before sharding, with one seed on all hosts; shard by data, not by file:\n"
    "    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA\n"
    "(in distribute_datasets_from_function: dataset.shard(...) of the shuffled rows, by row and not by file), or accept it "
    "with --allow samples-reordered.",
    search=_search_reordered,
)
