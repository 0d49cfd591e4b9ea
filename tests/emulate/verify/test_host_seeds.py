"""Hosts with a seed of their own and hosts that hash in their own ways: what follows from that is found, the rest is not."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from emulate.instrument import draws
from emulate.recorder import HostTrace
from emulate.recorder.rng_streams import Streams
from emulate.topology import Topology
from emulate.trace import Trace
from emulate.verify.host import Seeding, seed_of_host
from emulate.verify.judge import Judgement, judge
from emulate.verify.result import RunResult
from tests.emulate.verify.cases import Folder, case_of, codes

HOSTS, STEPS, EACH = 2, 12, 4
ROWS = [f"row-{k}" for k in range(200)]
Shares = Callable[[int], Sequence[str]]
"""Of a host the rows of its steps, one after the other."""


def fixed(host: int) -> Sequence[str]:
    return ROWS[host::HOSTS]


def shuffled(seed: int, rows: Sequence[str]) -> Sequence[str]:
    return [rows[k] for k in np.random.default_rng(seed).permutation(len(rows))]


def trained(
    folder: Folder,
    shares: Shares | None,
    weight_of: Callable[[int], float] = lambda _: 1.0,
    told: Callable[[int], Sequence[dict[str, Any]]] = lambda _: (),
    inputs: Callable[[int], Sequence[Any]] = lambda _: (),
) -> Trace:
    """Two hosts that train on their shares; one device that trains on the fixed ones where none are given."""
    made = folder.made("1x1" if shares is None else "2x1")
    hosts = range(1 if shares is None else HOSTS)
    for host in hosts:
        made.event({"event": "strategy", "name": "MultiWorkerMirroredStrategy", "replicas": len(hosts), "local": 1}, host)
        made.initial({"w": np.ones(8, "f4")}, replica=host, host=host)
        for event in told(host):
            made.event(event, host)
        for k in range(STEPS):
            at = slice(EACH * k, EACH * k + EACH)
            rows = [row for one in range(HOSTS) for row in fixed(one)[at]] if shares is None else shares(host)[at]
            local = np.full(8, weight_of(k) / len(hosts), "f4")
            after = np.full(8, 1 - 0.1 * sum(map(weight_of, range(k + 1))), "f4")
            about: dict[str, Any] = {"rows": rows, "inputs": inputs(k), "objective": 1.0 / len(hosts)}
            made.step(k, {"w": local}, {"w": after}, replica=host, host=host, **about)
    return made.trace()


def judged(folder: Folder, own: Trace | None, status: str = "ok", failure: str | None = None) -> Judgement:
    run = RunResult("2x1 own seeds", Topology(2, 1), own, status=status, failure=failure)
    return judge(case_of(trained(folder, None), trained(folder, fixed), own_seeds=lambda: run))


def test_shares_that_follow_the_seed_of_each_host_are_unseeded_hosts(folder: Folder) -> None:
    found = judged(folder, trained(folder, lambda host: fixed(0) if host == 0 else shuffled(7, ROWS)[host::HOSTS]))
    assert (found.verdict, codes(found)) == ("divergent", ["unseeded-hosts"])
    assert found.causes[0].evidence.startswith("With one seed on all hosts the run agrees with one device. ")
    assert " examples of host 1 are on another host than with one seed. So " in found.causes[0].evidence
    assert "different examples instead of 96" in found.causes[0].evidence


def test_shares_that_are_fixed_and_shuffled_by_each_host_are_no_fault_and_a_note_says_so(folder: Folder) -> None:
    found = judged(folder, trained(folder, lambda host: shuffled(host, fixed(host))))
    assert (found.verdict, codes(found)) == ("equivalent", [])
    assert any("Every example stays on its host" in note for note in found.notes)


def test_rows_that_the_seed_makes_anew_are_not_judged_and_a_note_says_so(folder: Folder) -> None:
    found = judged(folder, trained(folder, lambda host: fixed(0) if host == 0 else [f"{row} turned" for row in fixed(1)]))
    assert (found.verdict, codes(found)) == ("equivalent", [])
    assert any("gpudist did not see whether hosts then train on the same examples" in note for note in found.notes)


def test_other_numbers_from_the_same_rows_are_unseeded_hosts(folder: Folder) -> None:
    found = judged(folder, trained(folder, fixed, weight_of=lambda _: 1.01))
    assert codes(found) == ["unseeded-hosts"]
    assert "from the same examples, the gradients differ (first w in step 0" in found.causes[0].evidence


def test_other_numbers_that_come_late_and_are_small_are_no_kinks_where_no_run_of_one_device_shows_them(folder: Folder) -> None:
    own = trained(folder, fixed, weight_of=lambda k: 1.005 if k == 3 else 1.0)
    assert codes(judged(folder, own)) == ["unseeded-hosts"]


def test_the_same_rows_and_numbers_are_equivalent(folder: Folder) -> None:
    assert judged(folder, trained(folder, fixed)).verdict == "equivalent"


@pytest.mark.parametrize(("status", "words"), [("failed", "raises"), ("hung", "does not end")])
def test_a_program_that_fails_with_seeds_of_its_own_is_told_with_its_error(folder: Folder, status: str, words: str) -> None:
    found = judged(folder, None, status, "Traceback\nValueError: shapes differ\n")
    assert codes(found) == ["unseeded-hosts"]
    assert f"The program {words} where each host has its own seed." in found.causes[0].summary
    assert "ValueError: shapes differ" in found.causes[0].evidence


def test_the_first_host_keeps_the_seed_and_the_others_have_another_each() -> None:
    seeds = [seed_of_host(2**32 - 1, host) for host in range(8)]
    assert seeds[0] == 2**32 - 1
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)


def ended(host: int) -> Sequence[dict[str, Any]]:
    return [{"event": "end", "reason": "returned"}]


def hashed(
    folder: Folder,
    own: Trace | None,
    status: str = "ok",
    failure: str | None = None,
    *,
    whole: bool = False,
    allow: Sequence[str] = (),
) -> Judgement:
    run = RunResult("2x1 own hashes", Topology(2, 1), own, status=status, failure=failure)
    topology = trained(folder, fixed, told=ended if whole else lambda _: ())
    return judge(case_of(trained(folder, None), topology, own_hashes=lambda: run, hash_places=["train.py, line 9"]), allow)


def test_shares_that_follow_the_order_of_a_set_are_hash_order(folder: Folder) -> None:
    found = hashed(folder, trained(folder, lambda host: fixed(0) if host == 0 else shuffled(7, ROWS)[host::HOSTS]))
    assert (found.verdict, codes(found)) == ("divergent", ["hash-order"])
    assert "each host hashes in its own way (train.py, line 9)." in found.causes[0].summary
    assert "of the 48 examples of host 1 " in found.causes[0].evidence
    assert found.causes[0].evidence.endswith(" come from another host's share")


def test_rows_that_the_hashes_make_anew_are_hash_order(folder: Folder) -> None:
    found = hashed(folder, trained(folder, renumbered, told=ended), whole=True)
    assert codes(found) == ["hash-order"]
    assert (
        "48 of the 48 examples of host 1 are on no host with the same hashes on all hosts, until the end of"
        in found.causes[0].evidence
    )
    held = hashed(folder, trained(folder, renumbered))
    assert (held.verdict, codes(held)) == ("unverified", [])
    assert any("Run with --steps all to find out" in text for text in held.not_compared)
    allowed = hashed(folder, trained(folder, renumbered), allow=["hash-order"])
    assert (allowed.verdict, allowed.not_compared) == ("equivalent", held.not_compared)


def renumbered(host: int) -> Sequence[str]:
    return fixed(0) if host == 0 else [f"{row} renumbered" for row in fixed(1)]


def numbered(folder: Folder, labels: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Judgement:
    """Hosts whose words have other numbers under other hashes, and whose labels are these and then those."""

    def of(first: int, made: Sequence[Sequence[int]]) -> Callable[[int], Sequence[Any]]:
        return lambda k: (np.arange(first + EACH * k, first + EACH * (k + 1)), np.array(made[k]))

    own = RunResult("2x1 own hashes", Topology(2, 1), trained(folder, renumbered, inputs=of(1000, others)))
    topology = trained(folder, fixed, inputs=of(0, labels))
    return judge(case_of(trained(folder, None), topology, own_hashes=lambda: own, hash_places=["train.py, line 9"]))


def test_labels_that_stay_where_the_numbers_of_words_do_not_are_hash_order_though_some_steps_have_one_label_only(
    folder: Folder,
) -> None:
    labels = [[0, 1, 0, 0] if k % 3 else [0] * EACH for k in range(STEPS)]
    found = numbered(folder, labels, labels)
    assert codes(found) == ["hash-order"]
    assert found.causes[0].evidence.endswith("; input 2 of their steps is the same bit for bit, other inputs are not")


@pytest.mark.parametrize("telling", [0, 3])
def test_labels_that_differ_in_a_step_or_tell_too_little_leave_it_open(folder: Folder, telling: int) -> None:
    labels = [[0, 1, 0, 0]] * STEPS
    assert numbered(folder, labels, [*labels[1:], [1, 0, 0, 0]]).verdict == "unverified"
    few = [*labels[:telling], *([[0] * EACH] * (STEPS - telling))]
    assert numbered(folder, few, few).verdict == "unverified"


def test_an_order_within_each_hosts_own_share_is_no_fault_and_a_note_says_so(folder: Folder) -> None:
    short = {host: fixed(host)[: STEPS * EACH] for host in range(HOSTS)}
    found = hashed(folder, trained(folder, lambda host: shuffled(host, short[host])))
    assert (found.verdict, codes(found)) == ("equivalent", [])
    assert any("Every example stays on its host" in note for note in found.notes)


def test_other_numbers_under_other_hashes_are_hash_order(folder: Folder) -> None:
    found = hashed(folder, trained(folder, fixed, weight_of=lambda _: 1.01))
    assert codes(found) == ["hash-order"]
    assert "from the same examples, the gradients differ (first w in step 0" in found.causes[0].evidence


@pytest.mark.parametrize(("status", "words"), [("failed", "raises"), ("hung", "does not end")])
def test_a_program_that_fails_under_other_hashes_is_told_with_its_error(folder: Folder, status: str, words: str) -> None:
    found = hashed(folder, None, status, "Traceback\nKeyError: 'word-3'\n")
    assert codes(found) == ["hash-order"]
    assert f"The program {words} where each host hashes strings in its own way" in found.causes[0].summary
    assert "KeyError: 'word-3'" in found.causes[0].evidence


def listed(folder: Folder, own: Trace | None, status: str = "ok", failure: str | None = None) -> Judgement:
    run = RunResult("2x1 own listing", Topology(2, 1), own, status=status, failure=failure)
    topology = trained(folder, fixed)
    return judge(case_of(trained(folder, None), topology, own_listing=lambda: run, listing_places=["train.py, line 9"]))


def test_shares_that_follow_the_order_of_a_folder_are_file_order(folder: Folder) -> None:
    found = listed(folder, trained(folder, lambda host: fixed(0) if host == 0 else shuffled(7, ROWS)[host::HOSTS]))
    assert (found.verdict, codes(found)) == ("divergent", ["file-order"])
    assert (
        "depends on the order in which a folder is listed, and each disk has its own order (train.py" in found.causes[0].summary
    )
    assert "With folders listed in another order on all hosts but the first, " in found.causes[0].evidence
    assert " of the 48 examples of host 1 come from" in found.causes[0].evidence


def test_an_order_of_files_within_each_hosts_own_share_is_no_fault_and_a_note_says_so(folder: Folder) -> None:
    short = {host: fixed(host)[: STEPS * EACH] for host in range(HOSTS)}
    found = listed(folder, trained(folder, lambda host: shuffled(host, short[host])))
    assert (found.verdict, codes(found)) == ("equivalent", [])
    assert any("The order in which a folder is listed decides" in note for note in found.notes)
    held = listed(folder, trained(folder, lambda host: fixed(0) if host == 0 else [f"{row} anew" for row in fixed(1)]))
    assert (held.verdict, codes(held)) == ("unverified", [])
    assert any("Use sorted(...) on the list to be sure" in text for text in held.not_compared)


def test_a_program_that_fails_where_hosts_list_otherwise_is_told_with_its_error(folder: Folder) -> None:
    found = listed(folder, None, "failed", "Traceback\nFileNotFoundError: part-3\n")
    assert codes(found) == ["file-order"]
    assert "The program raises where each host lists folders in its own order" in found.causes[0].summary
    assert found.causes[0].evidence == "With the same order on all hosts it ends: FileNotFoundError: part-3"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is told of a program that runs in this process; the generators are put back afterwards."""
    before = random.getstate(), np.random.get_state()
    for module, name in ((random, "seed"), (np.random, "seed")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr("emulate.verify.host.when_imported", lambda name, action: None)
    heard: list[str] = []
    Seeding(3, told=heard.append).install()
    yield heard
    random.setstate(before[0])
    np.random.set_state(before[1])


def test_a_generator_that_the_program_seeds_is_told_once(told: list[str]) -> None:
    for _ in range(2):
        random.seed(5)
        np.random.seed(5)
    assert told == ["python", "numpy"]
    assert np.random.randint(1 << 30) == np.random.RandomState(5).randint(1 << 30)


def test_a_seed_from_the_operating_system_is_none(told: list[str]) -> None:
    random.seed()
    np.random.seed(None)
    assert told == []


def test_a_generator_that_was_drawn_from_before_it_was_seeded_is_not_told(told: list[str]) -> None:
    np.random.permutation(4)
    np.random.seed(5)
    assert told == []


def streams(
    host: int, *, seed: str = "5", moved: int = 11, other: str | None = None, builds: bool = False
) -> list[dict[str, Any]]:
    one = {"seed": (other or seed) if host else seed, "moved": moved, "looks": 11, "builds": builds}
    return [{"event": "streams", "streams": {"numpy.random.default_rng, train.py:7": one}}]


def drawing(host: int, *, other: int = 3, seeded: bool = True) -> list[dict[str, Any]]:
    stage = {"stage": "map(noise)", "seeds": [[other if host else 3, 8]], "function": ""}
    told = [{"event": "seeded", "generator": "tensorflow"}] if seeded else []
    return [{"event": "program", "drawing": [stage]}, *told]


def disturbed(host: int) -> Sequence[str]:
    return [f"{row} with noise" for row in fixed(host)]


def codes_of(folder: Folder, shares: Shares, told: Callable[[int], Sequence[dict[str, Any]]]) -> list[str]:
    return codes(judge(case_of(trained(folder, None), trained(folder, shares, told=told))))


def test_hosts_that_draw_the_same_numbers_for_different_rows_augment_alike(folder: Folder) -> None:
    found = judge(case_of(trained(folder, None), trained(folder, disturbed, told=streams)))
    assert (found.verdict, codes(found)) == ("divergent", ["identical-augmentation"])
    assert found.causes[0].evidence == (
        "numpy.random.default_rng, train.py:7 has the same seed on all 2 hosts and advanced in 11 of 11 steps; the hosts take "
        "different examples, and 96 of 96 have contents that one device never had"
    )
    building = partial(streams, moved=0, builds=True)
    found = judge(case_of(trained(folder, None), trained(folder, disturbed, told=building)))
    assert codes(found) == ["identical-augmentation"]
    assert "has the same seed on all 2 hosts and draws while each of them makes its dataset" in found.causes[0].evidence
    found = judge(case_of(trained(folder, None), trained(folder, disturbed, told=drawing)))
    assert codes(found) == ["identical-augmentation"]
    assert found.causes[0].evidence.startswith("map(noise) draws with the seeds (3, 8) on all 2 hosts; ")


def test_hosts_that_draw_by_the_place_in_their_share_augment_alike(folder: Folder) -> None:
    def pure(host: int, other: str = "f") -> list[dict[str, Any]]:
        stage = {"stage": "map(noise)", "seeds": [], "function": other if host else "f"}
        return [{"event": "program", "drawing": [stage]}]

    found = judge(case_of(trained(folder, None), trained(folder, disturbed, told=pure)))
    assert codes(found) == ["identical-augmentation"]
    assert "map(noise) draws by the position in the host's share" in found.causes[0].evidence
    assert codes_of(folder, disturbed, lambda host: pure(host, "another")) == ["unexplained"]


@pytest.mark.parametrize(
    "told",
    [
        lambda host: streams(host, other="6"),
        lambda host: streams(host, moved=1),
        lambda host: streams(host)[:host],
        lambda host: drawing(host, other=4),
        lambda host: drawing(host, seeded=False),
    ],
    ids=["another seed", "once an epoch", "one host", "other operations", "seeded by gpudist"],
)
def test_hosts_that_draw_otherwise_do_not_augment_alike(
    folder: Folder, told: Callable[[int], Sequence[dict[str, Any]]]
) -> None:
    assert codes_of(folder, disturbed, told) == ["unexplained"]


def test_hosts_that_draw_alike_and_keep_their_rows_as_they_are_do_not_augment(folder: Folder) -> None:
    assert codes_of(folder, fixed, streams) == []
    assert "identical-augmentation" not in codes_of(folder, lambda host: disturbed(0), streams)


def test_streams_tell_what_they_were_seeded_with_and_how_often_they_moved_on(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np.random, "default_rng", np.random.default_rng)
    made = folder.made()
    recording = HostTrace(made.writer(), steps=None, send=lambda event: None)
    followed = Streams(recording)
    draws.see_generators(followed)
    moving = np.random.default_rng(5)
    still = np.random.default_rng((5, 1))
    np.random.default_rng()
    random.seed(3)
    followed.seeded("python")
    followed.look()
    for _ in range(3):
        moving.normal()
        followed.look()
    random.random()
    followed.look()
    told = {name.split(",")[0]: one for name, one in followed.found.items()}
    lines = [one for name, one in followed.found.items() if "default_rng" in name]
    assert [(one["seed"], one["moved"], one["looks"]) for one in lines] == [("5", 3, 4), ("(5, 1)", 0, 4)]
    assert (told["random"]["moved"], told["random"]["looks"]) == (1, 4)
    assert not any(one["builds"] for one in lines)
    with followed.building():
        built = np.random.default_rng(6)
        np.random.default_rng(7)
        built.normal()
    assert [one["builds"] for one in followed.found.values() if one["seed"] in "67"] == [True, False]
    made.trace()
    assert still.normal() == np.random.Generator(np.random.PCG64(np.random.SeedSequence((5, 1)))).normal()


@pytest.mark.slow
def test_an_operation_with_a_seed_of_its_own_draws_alike_on_hosts_whose_global_seed_is_ours() -> None:
    code = """
import sys
from emulate.verify.host import Seeding
Seeding(5, host=int(sys.argv[1]) if sys.argv[1] else None).install()
import tensorflow as tf
if sys.argv[2]:
    tf.random.set_seed(int(sys.argv[2]))
rows = tf.data.Dataset.range(9)
print([[int(row) for row in rows.shuffle(9, seed=seed)] for seed in (1, None)])
"""
    runs = [("", ""), ("0", ""), ("1", ""), ("0", "7"), ("1", "7")]
    processes = [subprocess.Popen([sys.executable, "-c", code, *run], stdout=subprocess.PIPE, text=True) for run in runs]
    alike, first, second, told, told_too = (ast.literal_eval(process.communicate()[0]) for process in processes)
    assert alike == first
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert told == told_too
