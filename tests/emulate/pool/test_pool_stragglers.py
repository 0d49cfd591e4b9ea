"""Hosts that wait for one that is done are found, and those that still work or sleep are left in peace."""

from __future__ import annotations

import pytest

from emulate.cluster.hang import Stragglers
from emulate.cluster.threads import Thread, parse

PATIENCE = 10.0

IN_A_COLLECTIVE = """Current thread 0x01 (most recent call first):
  File "/x/tensorflow/python/eager/execute.py", line 53 in quick_execute
  File "/home/me/test_it.py", line 4 in test_it
  File "/x/emulate/cluster/host.py", line 1 in run
"""
ASLEEP = """Current thread 0x01 (most recent call first):
  File "/home/me/other.py", line 4 in wait
  File "/x/emulate/cluster/host.py", line 1 in run
"""
EAGER = """Thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 930 in wait
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 502 in _wait_for_updates
Thread 0x03 (most recent call first):
  File "/x/tensorflow/python/ops/gen_collective_ops.py", line 1267 in collective_reduce_v2
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 125 in worker
Current thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 765 in wait
  File "/home/me/test_it.py", line 4 in test_it
  File "/x/emulate/cluster/host.py", line 1 in run
"""
WITH_PROCESSES = """Thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 930 in wait
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 502 in _wait_for_updates
Current thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 765 in wait
  File "/home/me/test_it.py", line 4 in test_it
  File "/x/emulate/cluster/host.py", line 1 in run
"""
WITH_A_LIMIT = """Current thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/test_it.py", line 4 in test_it
  File "/x/emulate/cluster/host.py", line 1 in run
"""


class Fake:
    """Two hosts, of which the second is not done, and a clock."""

    def __init__(self, dump: str = IN_A_COLLECTIVE) -> None:
        self.now, self.used, self.runnable, self.dump = 0.0, 0.0, False, dump
        self.stragglers = Stragglers(self, PATIENCE, clock=lambda: self.now)

    def cpu_seconds(self, host: int) -> float:
        return self.used

    def is_runnable(self, host: int) -> bool:
        return self.runnable

    def threads(self) -> dict[int, list[Thread]]:
        return {1: parse(self.dump)}

    def after(self, seconds: float, pending: tuple[int, ...] = (1,)) -> bool:
        self.now += seconds
        return self.stragglers.are_lost(list(pending), 2)


@pytest.mark.parametrize("dump", [IN_A_COLLECTIVE, EAGER])
def test_a_host_that_waits_in_tensorflow_for_one_that_is_done_is_lost_after_some_seconds(dump: str) -> None:
    fake = Fake(dump)
    assert not fake.after(0.0)
    assert not fake.after(PATIENCE - 0.1)
    assert fake.after(0.2)


def test_a_host_that_computes_is_not_lost() -> None:
    fake = Fake()
    for _ in range(10):
        fake.used += PATIENCE / 2
        assert not fake.after(PATIENCE)


def test_a_host_whose_threads_could_run_is_not_lost() -> None:
    fake = Fake()
    fake.after(0.0)
    fake.runnable = True
    assert not fake.after(PATIENCE)


@pytest.mark.parametrize("dump", [ASLEEP, WITH_PROCESSES, WITH_A_LIMIT])
def test_a_host_that_waits_otherwise_is_not_lost(dump: str) -> None:
    fake = Fake(dump)
    fake.after(0.0)
    assert not fake.after(PATIENCE)


def test_nobody_is_lost_while_nobody_is_done_or_when_all_are() -> None:
    fake = Fake()
    for pending in ((0, 1), ()):
        fake.after(0.0, pending)
        assert not fake.after(2 * PATIENCE, pending)


def test_the_time_counts_anew_when_another_host_is_done() -> None:
    fake = Fake()
    fake.after(0.0)
    fake.after(PATIENCE - 1, (0,))
    assert not fake.after(2.0)
