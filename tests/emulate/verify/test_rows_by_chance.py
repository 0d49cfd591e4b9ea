"""Rows that hosts order or draw by themselves, and remainders: each is told from rows that are not shared out."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import Judgement, judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.test_ledger import ledger

ALL = string.ascii_letters[:32]
EIGHT = [ALL[8 * k : 8 * k + 8] for k in range(4)]
"""An epoch: steps of 8 rows, each row a letter."""


def run(folder: Folder, steps: Sequence[Sequence[str]], *, hosts: int = 1, ended: bool = False) -> Trace:
    """Steps as words, one a replica; as many replicas on each host."""
    replicas = len(steps[0])
    made = folder.made(f"{hosts}x{replicas // hosts}")

    def step(made: Made, k: int) -> None:
        for r, rows in enumerate(steps[k]):
            host = r * hosts // replicas
            weights = {"w": np.full(128, float(k))}
            made.step(k, {"w": np.full(128, 1 / replicas)}, weights, replica=r, host=host, rows=list(rows), objective=1.0)

    for host in range(hosts if ended else 0):
        made.event({"event": "end", "reason": "returned"}, host)
    return loop(made, step, steps=len(steps), replicas=replicas)


def judged(
    folder: Folder, one: Sequence[str], several: Sequence[Sequence[str]], *, hosts: int = 1, ended: bool = False
) -> Judgement:
    return judge(case_of(run(folder, [[rows] for rows in one]), run(folder, several, hosts=hosts, ended=ended)))


def halves(steps: Sequence[str]) -> list[list[str]]:
    return [[rows[: len(rows) // 2], rows[len(rows) // 2 :]] for rows in steps]


def own_orders(hosts: int, seeds: Sequence[int], epochs: int = 1) -> list[list[str]]:
    """Each host permutes all rows by a seed of its own and takes its share."""
    shares = []
    for host, seed in zip(range(hosts), seeds, strict=True):
        rng = np.random.default_rng(seed)
        rows = "".join(ALL[j] for _ in range(epochs) for j in rng.permutation(32)[host::hosts])
        shares.append([rows[k : k + 8 // hosts] for k in range(0, len(rows), 8 // hosts)])
    return [list(step) for step in zip(*shares, strict=True)]


@pytest.mark.parametrize(("hosts", "epochs"), [(2, 1), (2, 2), (4, 1)])
def test_hosts_with_an_order_of_their_own_are_told_to_have_one_seed(folder: Folder, hosts: int, epochs: int) -> None:
    found = judged(folder, EIGHT * epochs, own_orders(hosts, range(1, hosts + 1), epochs), hosts=hosts)
    assert codes(found) == ["samples-repeated"]
    assert found.samples.missing == found.samples.repeated > 0
    assert found.causes[0].fix.startswith("Use the same seed on every host for everything that orders")
    assert found.causes[0].fix.index("seed=SEED") < found.causes[0].fix.index("let the strategy shard")


def test_hosts_with_an_order_of_their_own_from_a_later_epoch_on_are_told_the_same(folder: Folder) -> None:
    together = halves(EIGHT)
    found = judged(folder, EIGHT * 3, [*together, *own_orders(2, [1, 2], epochs=2)], hosts=2)
    assert codes(found) == ["samples-repeated"]
    assert "steps differ from step 4 on" in found.causes[0].evidence
    assert found.causes[0].fix.startswith("Use the same seed on every host for everything that orders")
    assert "gather the numbers of the examples with them" in found.causes[0].fix  # what orders them may be results


def test_hosts_with_one_order_and_shares_of_it_share_no_rows() -> None:
    assert ledger(EIGHT, own_orders(2, [1, 1]), hosts=[0, 1]).shared_by_hosts == 0
    assert ledger(EIGHT, own_orders(2, [1, 2]), hosts=[0, 1]).shared_by_hosts > 0
    assert ledger(EIGHT, own_orders(2, [1, 2]), hosts=[0, 0]).shared_by_hosts == 0


def test_hosts_with_the_same_rows_are_told_to_shard(folder: Folder) -> None:
    found = judged(folder, EIGHT, [[rows[:4], rows[:4]] for rows in [*EIGHT[1:], EIGHT[0]]], hosts=2)
    assert codes(found)[0] == "samples-repeated"
    assert found.causes[0].fix.startswith("Let the strategy shard")
    assert (
        "Do not set AutoShardPolicy.OFF in the options" in found.causes[0].fix
    )  # with it, to distribute the dataset is no cure


def test_shares_that_are_sharded_again_are_missing_and_not_of_another_order(folder: Folder) -> None:
    again = [[ALL[j : j + 8 : 4], ALL[j + 2 : j + 10 : 4]] for j in range(0, 32, 8)]
    found = judged(folder, EIGHT, again, hosts=2)
    assert codes(found) == ["samples-missing"]
    assert found.causes[0].fix.startswith("Shard once")


EPOCH = [*EIGHT[:2], ALL[16:21]]
"""Its last batch has 5 rows."""


@pytest.mark.parametrize(
    ("one", "several", "ended"),
    [
        (EPOCH, EPOCH[:2], True),  # it is over
        (EPOCH * 2, EPOCH[:2] * 2, True),
        ((EPOCH * 2)[:4], EPOCH[:2] * 2, False),  # held after so many steps
        ([*EPOCH, *EIGHT[1:3], ALL[2:7]], [*EPOCH[:2], *EIGHT[1:3]], True),  # shuffled anew
    ],
)
def test_the_last_smaller_batch_that_several_replicas_drop_is_told_to_be_kept(
    folder: Folder, one: list[str], several: list[str], *, ended: bool
) -> None:
    found = judged(folder, one, halves(several), ended=ended)
    assert codes(found) == ["samples-missing"]
    assert found.causes[0].summary.startswith("The last, smaller batch of an epoch is dropped: ")
    assert found.causes[0].fix.startswith("Keep the remainder")
    assert "there are fewer steps" not in found.causes[0].fix


@pytest.mark.parametrize("one", [EPOCH, [ALL[:5], ALL[5:10]]])
def test_rows_that_a_division_by_the_replicas_leaves_are_told_to_be_kept(folder: Folder, one: list[str]) -> None:
    found = judged(folder, one, halves([rows[: len(rows) // 2 * 2] for rows in one]))
    assert codes(found) == ["samples-missing"]
    assert found.causes[0].summary.startswith("The remainder of a division of the batch is dropped: ")
    assert found.causes[0].fix.startswith("Keep the remainder")


def test_what_is_more_than_a_remainder_is_none() -> None:
    assert ledger(EPOCH, halves(EPOCH)).left_out == {}
    assert ledger(EIGHT, halves([rows[:6] for rows in EIGHT])).left_out == {}
    assert ledger([*EPOCH, *EPOCH], halves([*EPOCH[:2], *EPOCH[1::-1]])).left_out == {}
    assert ledger(EIGHT, halves(EIGHT[:2] + EIGHT[3:])).left_out == {}


def test_a_metric_of_an_epoch_without_its_last_batch_is_no_cause_of_its_own(folder: Folder) -> None:
    def reporting(steps: list[list[str]], at: int, value: float) -> Trace:
        made = folder.made(f"1x{len(steps[0])}")

        def step(made: Made, k: int) -> None:
            for r, rows in enumerate(steps[k]):
                share = 1 / len(steps[k])
                weights = {"w": np.full(128, float(k))}
                made.step(k, {"w": np.full(128, share)}, weights, replica=r, rows=list(rows), objective=1.0)
            if k == at:
                made.report("metric", "metric/mean", 0, value, made=k + 1)

        return loop(made, step, steps=len(steps))

    one = reporting([[rows] for rows in (EPOCH * 2)[:4]], 2, 0.5)
    found = judge(case_of(one, reporting(halves(EPOCH[:2] * 2), 1, 0.7)))
    assert codes(found) == ["samples-missing"]
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.step) == ("data", 2)


def drawn(seed: int, steps: int = 12, replace: bool = True) -> list[str]:
    """Rows by chance; the first step is the same whatever the seed."""
    first, others = np.random.default_rng(0), np.random.default_rng(seed)
    return ["".join(ALL[j] for j in (others if k else first).choice(32, 8, replace=replace)) for k in range(steps)]


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("replicas", [2, 4])
def test_rows_that_are_drawn_by_what_steps_returned_are_told_so(folder: Folder, replicas: int, *, replace: bool) -> None:
    each = 8 // replicas
    there = [[rows[j : j + each] for j in range(0, 8, each)] for rows in drawn(2, replace=replace)]
    found = judged(folder, drawn(1, replace=replace), there)
    assert codes(found) == ["samples-reordered"]
    assert found.causes[0].summary.startswith("From step 1 on other examples are chosen than on one device")
    assert "strategy.experimental_local_results(per_replica), axis=0" in found.causes[0].fix


def test_rows_that_come_twice_by_chance_on_one_device_too_are_no_repeats() -> None:
    others = [rows[::-1] for rows in drawn(3)[1:]]
    assert ledger(drawn(1)[1:], halves(others)).repeated_in_step == 0


def test_replicas_that_share_what_is_drawn_repeat_rows(folder: Folder) -> None:
    one = drawn(1)
    found = judged(folder, one, [[rows, rows] for rows in one])
    assert codes(found)[0] == "samples-repeated"
    assert "Every replica" in found.causes[0].summary
    assert ledger(one, [[rows[:4], rows[:4]] for rows in drawn(4)]).repeated_in_step > 0


def test_rows_of_another_epoch_are_not_called_drawn(folder: Folder) -> None:
    rng = np.random.default_rng(5)
    order = "".join(ALL[j] for j in rng.permutation(32))
    anew = [order[k : k + 8] for k in range(0, 32, 8)]
    found = judged(folder, EIGHT * 2, halves([*EIGHT, *anew]))
    assert codes(found) == ["samples-reordered"]
    assert found.causes[0].summary.startswith("The same examples come in other batches")


def test_rows_that_both_runs_draw_from_repeated_shuffles_are_other_batches_and_none_too_many(folder: Folder) -> None:
    def sampled(seed: int) -> list[str]:
        """Two parts of the rows, each shuffled and repeated without end, are sampled from at random."""
        rng = np.random.default_rng(seed)
        streams = [
            itertools.chain.from_iterable(rng.permutation(list(part)) for _ in iter(int, 1)) for part in (ALL[:8], ALL[8:])
        ]
        return ["".join(next(streams[rng.integers(2)]) for _ in range(8)) for _ in range(12)]

    found = judged(folder, sampled(1), halves(sampled(2)))
    assert codes(found) == ["samples-reordered"]
