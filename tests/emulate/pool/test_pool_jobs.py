"""Jobs on warm clusters: what comes back, what happens when a host fails, and that the next lease is healthy."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from emulate.cluster import HostContext, HostResult, Lease, Pool
from emulate.errors import UsageError

LIMIT = 60.0


def statuses(results: list[HostResult]) -> list[str]:
    return [result.status for result in results]


def values(results: list[HostResult]) -> list[Any]:
    assert statuses(results) == ["returned"] * len(results), results
    return [result.value for result in results]


def pid(context: HostContext) -> int:
    return os.getpid()


def total(context: HostContext) -> float:
    """A sum over all replicas of all hosts."""
    import tensorflow as tf

    several = context.topology.num_hosts > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.MirroredStrategy()
    function = tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.ones([])), axis=None))
    return float(function())


def test_jobs_run_on_the_same_processes_one_after_the_other(pool: Pool) -> None:
    seen = []
    for _ in range(3):
        with pool.lease("2x1") as lease:
            seen.append((values(lease.run(total)), values(lease.run(pid))))
    assert [sums for sums, _ in seen] == [[2.0, 2.0]] * 3
    assert len({tuple(pids) for _, pids in seen}) == 1
    assert (pool.statistics.started, pool.statistics.reused, pool.statistics.replaced) == (1, 2, 0)


def variable(context: HostContext, is_late: bool) -> float:
    """The value that the leader gives all, which it may come to last."""
    import tensorflow as tf

    if is_late and context.host == 0:
        time.sleep(1)
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        return float(tf.Variable(3.0).numpy())


def test_hosts_of_a_warm_cluster_meet_however_late_the_leader_is(pool: Pool) -> None:
    with pool.lease("2x1") as lease:
        for is_late in (False, True):
            assert values(lease.run(variable, is_late, timeout=LIMIT)) == [3.0, 3.0]
    assert (pool.statistics.started, pool.statistics.replaced) == (1, 0)


def make_strategies(context: HostContext) -> None:
    """More on the first host than on the others."""
    import gpudist_core

    for _ in range(2 - context.host):
        gpudist_core.make_strategy()


def test_hosts_that_have_made_different_numbers_of_strategies_count_alike_in_the_next_job(pool: Pool) -> None:
    with pool.lease("2x1") as lease:
        values(lease.run(make_strategies))
        assert values(lease.run(total, timeout=LIMIT)) == [2.0, 2.0]
        values(lease.run(make_strategies))
        assert values(lease.run(variable, False, timeout=LIMIT)) == [3.0, 3.0]
    assert (pool.statistics.started, pool.statistics.replaced) == (1, 0)


def test_strategies_of_one_host_follow_each_other(pool: Pool) -> None:
    with pool.lease("1x4") as lease:
        assert [values(lease.run(total)) for _ in range(3)] == [[4.0]] * 3
    assert pool.statistics.started == 1


def test_a_fresh_lease_gets_a_cluster_that_has_run_nothing(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        first = values(lease.run(pid))
    with pool.lease("1x1", fresh=True) as lease:
        assert values(lease.run(pid)) != first


def test_arguments_events_and_output_arrive(pool: Pool) -> None:
    def job(context: HostContext, word: str) -> str:
        print(word, "out")
        os.write(2, b"err\n")
        context.send({"event": "said", "step": 7})
        return word * 2

    events: list[Any] = []
    with pool.lease("2x1") as lease:
        results = lease.run(job, "so", on_event=lambda host, event: events.append((host, event["event"])))
        assert lease.names == ["host 0", "host 1"]
    assert values(results) == ["soso", "soso"]
    assert [result.output for result in results] == ["so out\nerr\n"] * 2
    assert [result.step for result in results] == [7, 7]
    assert sorted(events) == [(0, "said"), (1, "said")]


def test_the_output_is_that_of_the_job_alone(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        lease.run(lambda context: print("first"))
        [result] = lease.run(lambda context: print("second"))
    assert result.output == "second\n"


def raise_on_first(context: HostContext) -> None:
    if context.host == 0:
        raise ValueError("as asked")
    time.sleep(LIMIT)


def leave_on_first(context: HostContext) -> None:
    if context.host == 0:
        sys.exit(3)
    time.sleep(LIMIT)


def vanish_on_first(context: HostContext) -> None:
    if context.host == 0:
        os._exit(4)
    time.sleep(LIMIT)


def kill_first(context: HostContext) -> None:
    context.send({"event": "progress", "step": 5})
    if context.host == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT)


def abort_first(context: HostContext) -> None:
    if context.host == 0:
        os.abort()
    time.sleep(LIMIT)


@pytest.mark.parametrize(
    ("job", "status", "code"),
    [
        (raise_on_first, "raised", None),
        (leave_on_first, "exited", 3),
        (vanish_on_first, "exited", 4),
        (kill_first, "killed", -signal.SIGKILL),
        (abort_first, "killed", -signal.SIGABRT),
    ],
)
def test_when_a_host_fails_its_peers_are_ended_with_their_stacks_and_the_next_cluster_is_healthy(
    pool: Pool, job: Any, status: str, code: int | None
) -> None:
    with pool.lease("2x1") as lease:
        first, second = lease.run(job, grace=0.2)
    assert (first.status, first.code, second.status) == (status, code, "ended")
    assert job.__name__ in second.stack
    assert ("in abort_first" in first.stack) == (job is abort_first)
    with pool.lease("2x1") as lease:
        assert values(lease.run(total)) == [2.0, 2.0]
    assert pool.statistics.replaced == 1
    assert "host 0" in pool.statistics.reasons[0]


def test_a_lease_that_broke_goes_on_with_another_cluster(pool: Pool) -> None:
    with pool.lease("2x1") as lease:
        lease.run(raise_on_first, grace=0.1)
        assert lease.is_broken
        assert values(lease.run(total)) == [2.0, 2.0]


def test_an_error_arrives_with_the_traceback_of_the_job(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        [result] = lease.run(raise_on_first)
    assert result.error is not None
    assert (result.error.kind, result.error.message) == ("ValueError", "as asked")
    assert "in raise_on_first" in result.error.traceback_text
    assert "pool/loop.py" not in result.error.traceback_text


def test_one_host_that_raised_is_used_again(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        before = values(lease.run(pid))
        lease.run(raise_on_first)
        assert values(lease.run(pid)) == before


def test_a_job_that_takes_too_long_is_ended_with_all_stacks(pool: Pool) -> None:
    with pool.lease("2x1") as lease:
        results = lease.run(lambda context: time.sleep(LIMIT), timeout=0.3)
    assert statuses(results) == ["timeout"] * 2
    assert all("time.sleep(LIMIT)" in result.stack for result in results)


def test_a_host_that_was_stopped_is_said_to_be(pool: Pool) -> None:
    with pool.lease("2x1") as lease:
        results = lease.run(lambda context: os.kill(os.getpid(), signal.SIGSTOP), timeout=0.3)
    assert [(result.status, result.stack) for result in results] == [("timeout", "(its process is stopped)")] * 2


def test_hurry_gives_the_others_only_their_grace(pool: Pool) -> None:
    def job(context: HostContext) -> str:
        context.send({"event": "failed"})
        if context.host == 1:
            time.sleep(LIMIT)
        return "done"

    with pool.lease("2x1") as lease:
        results = lease.run(job, grace=0.3, on_event=lambda host, event: lease.hurry())
    assert statuses(results) == ["returned", "ended"]


def late(context: HostContext, number: int) -> int:
    time.sleep(0.2)
    return number


def test_jobs_that_threads_give_one_lease_wait_for_each_other_and_each_gets_its_own_result(pool: Pool) -> None:
    with pool.lease("2x1") as lease, ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda number: values(lease.run(late, number, timeout=LIMIT)), range(3)))
    assert results == [[number] * 2 for number in range(3)]
    assert (pool.statistics.started, pool.statistics.replaced) == (1, 0)


def test_a_lease_that_is_left_while_a_thread_runs_a_job_is_given_back_when_that_is_done(pool: Pool) -> None:
    with ThreadPoolExecutor(1) as threads:
        with pool.lease("1x1") as lease:
            has_begun = threading.Event()
            job = threads.submit(lease.run, begin_late, timeout=LIMIT, on_event=lambda host, event: has_begun.set())
            assert has_begun.wait(LIMIT)
        assert values(job.result()) == [1]
    assert (len(pool._idle), len(pool._leased)) == (1, 0)


def begin_late(context: HostContext) -> int:
    context.send({"event": "begun"})
    return late(context, 1)


def test_a_job_from_the_events_of_another_is_refused(pool: Pool) -> None:
    said = r"^A lease runs one job at a time\. Received: topology='1x1', a job from the `on_event` of another\."
    with pool.lease("1x1") as lease, pytest.raises(UsageError, match=said):
        lease.run(begin_late, on_event=lambda host, event: lease.run(pid))


@pytest.mark.parametrize("timeout", ["a", -1])
def test_a_job_and_its_time_limit_must_be_such(pool: Pool, timeout: Any) -> None:
    with pool.lease("1x1") as lease:
        with pytest.raises(
            UsageError, match=rf"A time limit must be a positive number\. Received: timeout={timeout!r}\. Use None"
        ):
            lease.run(pid, timeout=timeout)
        with pytest.raises(UsageError, match=r"What hosts run must be callable\. Received: function=None\. Give a function;"):
            lease.run(None)  # type: ignore[arg-type]


class Once:
    """What pickle takes and cannot make again."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Once, ()


def test_arguments_that_cannot_be_made_again_on_a_host_are_said_to_be(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        [result] = lease.run(lambda context, one: None, Once(1))
    assert result.error is not None
    assert result.error.message.startswith("A host must be able to unpickle a job and its arguments, as it can numbers, NumPy")


def test_an_event_that_does_not_say_what_it_is_is_refused(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        [result] = lease.run(lambda context: context.send({"x": 1}))
    assert result.error is not None
    assert result.error.message == (
        "What a host sends must say what it is, under 'event'. Received: event={'x': 1}. "
        "Send {'event': 'progress', 'step': 3}, say."
    )


def test_what_cannot_be_sent_is_said(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        with pytest.raises(UsageError, match=r"must be sendable to another process\. Received: function='pid'"):
            lease.run(pid, sys._getframe())
        [result] = lease.run(lambda context: sys._getframe())
    assert result.error is not None
    assert "What a job returns must be sendable to another process. Received: a frame" in result.error.message


def test_a_lease_and_a_pool_that_were_left_say_so(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        pass
    with pytest.raises(UsageError, match=r"inside its `with` only. Received: topology='1x1', left\."):
        lease.run(pid)
    pool.close()
    with pytest.raises(UsageError, match=r"until it is closed\. Received: a closed pool\."):
        pool.lease("1x1")


def test_idle_clusters_beyond_the_limit_are_ended(preload: Any) -> None:
    with Pool(preload=preload, max_hosts=2) as pool:
        leases: list[Lease] = []
        for topology in ("1x1", "1x2", "1x3"):
            with pool.lease(topology) as lease:
                lease.run(pid)
                leases.append(lease)
        assert [str(cluster.topology) for cluster in pool._idle] == ["1x2", "1x3"]
