"""A hang is said when, and only when, every live host is in a collective that no live peer can complete."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate.cluster import Hang, HangJudge, HostContext, Preload, RunningCluster, system
from emulate.cluster.threads import Thread, parse
from emulate.topology import Topology
from tests.emulate.cluster.helpers import LIMIT


class Case:
    """A judge with a clock and a cluster that the test moves."""

    def __init__(self, topology: str) -> None:
        self.now = 0.0
        self.cpu: dict[int, float] = {}
        self.is_passing = False
        self.judge = HangJudge(Topology.parse(topology), clock=lambda: self.now)

    def cpu_seconds(self, host: int) -> float:
        return self.cpu.get(host, 0.0)

    def feed(self, host: int, event: str, **fields: Any) -> None:
        self.judge.feed(host, {"event": event, **fields})

    def enter(self, host: int, ordinal: int, name: str = "all_reduce float32[2]", replica: int = 0) -> None:
        self.feed(host, "collective", phase="enter", name=name, ordinal=ordinal, replica=replica, step=ordinal)

    def leave(self, host: int, ordinal: int, replica: int = 0) -> None:
        self.feed(
            host, "collective", phase="exit", name="all_reduce float32[2]", ordinal=ordinal, replica=replica, step=ordinal
        )

    def after(self, seconds: float) -> Hang | None:
        """The verdict after so many seconds of being asked."""
        for _ in range(int(seconds / 0.1)):
            verdict = self.judge.verdict(self)
            if verdict is not None:
                return verdict
            self.now += 0.1
        return self.judge.verdict(self)


def test_a_host_that_died_while_another_waits_is_host_exited() -> None:
    case = Case("2x1")
    case.feed(1, "progress", step=4)
    case.enter(0, 5)
    case.feed(1, "exit", status="exited", code=3)
    hang = case.after(4)
    assert hang is not None
    assert hang.code == "host-exited"
    assert hang.description == (
        "host 0 waits in all_reduce float32[2], its collective number 5; host 1 left with exit code 3 after step 4"
    )
    assert case.now < 3


def test_nothing_is_said_while_a_fault_lasts_that_ends_by_itself_nor_right_after_it() -> None:
    case = Case("2x1")
    case.enter(0, 12)
    case.enter(1, 3)
    case.is_passing = True
    assert case.after(60) is None
    case.is_passing = False
    assert case.after(2) is None  # what the host sends that was stopped arrives now
    hang = case.after(4)
    assert hang is not None
    assert hang.code == "collective-mismatch"


def test_a_host_that_ended_its_program_while_another_waits_is_unequal_steps() -> None:
    case = Case("2x1")
    case.feed(1, "exit", status="returned", code=0)
    case.enter(0, 5)
    hang = case.after(4)
    assert hang is not None
    assert (hang.code, hang.where[1]) == ("unequal-steps", "ended its program")


def test_a_host_held_at_its_last_step_while_another_waits_is_unequal_steps() -> None:
    case = Case("2x1")
    case.feed(1, "reached", step=20)
    case.enter(0, 5)
    hang = case.after(4)
    assert hang is not None
    assert (hang.code, hang.where[1]) == ("unequal-steps", "made all its steps after step 20")


@pytest.mark.parametrize("second", [(4, "all_reduce float32[2]"), (5, "all_gather float32[2]")])
def test_live_hosts_in_different_collectives_are_a_mismatch(second: tuple[int, str]) -> None:
    case = Case("2x1")
    case.enter(0, 5)
    case.enter(1, *second)
    hang = case.after(4)
    assert hang is not None
    assert hang.code == "collective-mismatch"


def test_all_hosts_in_the_same_collective_are_about_to_leave_it() -> None:
    case = Case("3x1")
    for host in range(3):
        case.enter(host, 5)
    assert case.after(60) is None


def test_a_host_that_sleeps_or_waits_for_input_is_not_judged() -> None:
    case = Case("2x1")
    case.enter(0, 5)
    case.leave(1, 4)
    assert case.after(60) is None


class Waiting(Case):
    """A case whose host 1 idles at this line of its program, inside Python's `queue` or `threading` or not."""

    def __init__(self, file: Path, line: str, *, inside: bool) -> None:
        super().__init__("2x1")
        file.write_text(f"{line}\n")
        innermost = '  File "/gone/lib/python3.11/threading.py", line 1 in wait\n' * inside
        frames = f'{innermost}  File "{file}", line 1 in work\n  File "/x/emulate/cluster/host.py", line 9 in run'
        self._dump = f"Thread 0x1 (most recent call first):\n{frames}"

    def is_runnable(self, host: int) -> bool:
        del host
        return False

    def threads(self) -> dict[int, list[Thread]]:
        return {1: parse(self._dump)}


@pytest.mark.parametrize(
    ("line", "inside", "said"),
    [
        ("lock.acquire()", False, "waits for a lock that one of its threads holds"),
        ("with lock:", False, "waits for a lock that one of its threads holds"),
        ("never.get()", True, "waits for another of its threads (a lock, a queue, an event)"),
        ("event.wait()", True, "waits for another of its threads (a lock, a queue, an event)"),
        ("simple_queue.get()", False, "waits for another of its threads (a lock, a queue, an event)"),
    ],
)
def test_a_host_is_said_to_wait_for_a_lock_only_where_its_program_takes_one(
    tmp_path: Path, line: str, inside: bool, said: str
) -> None:
    case = Waiting(tmp_path / "program.py", line, inside=inside)
    case.enter(0, 5)
    hang = case.after(12)
    assert hang is not None
    assert (hang.code, hang.where[1]) == ("python-deadlock", f"{said} (program.py:1 in work)")


@pytest.mark.parametrize("line", ["event.wait(seconds)", "never.get(timeout=60)", "thread.join(limit)"])
def test_a_host_whose_wait_has_an_end_is_not_judged(tmp_path: Path, line: str) -> None:
    case = Waiting(tmp_path / "program.py", line, inside=True)
    case.enter(0, 5)
    assert case.after(60) is None


class AtLines(Case):
    """A case whose two hosts are at these lines of their program, and know the same two collectives."""

    def __init__(self, *lines: int) -> None:
        super().__init__("2x1")
        self._lines = lines
        for host, ordinals in enumerate(((0, 1), (1, 0))):
            for ordinal in ordinals:
                self.feed(host, "site", name=f"all_reduce float32[{ordinal}]")
            self.enter(host, 5, f"all_reduce float32[{host}]")

    def threads(self) -> dict[int, list[Thread]]:
        frames = '  File "/gone/program.py", line {} in <module>\n  File "/x/emulate/cluster/host.py", line 9 in run'
        return {host: parse(f"Thread 0x1 (most recent call first):\n{frames.format(k)}") for host, k in enumerate(self._lines)}


@pytest.mark.parametrize(("lines", "code"), [((7, 7), "collective-order"), ((9, 7), "collective-mismatch")])
def test_hosts_have_another_order_only_where_one_line_starts_their_collectives(lines: tuple[int, int], code: str) -> None:
    hang = AtLines(*lines).after(4)
    assert hang is not None
    assert hang.code == code


def test_a_collective_of_one_replica_a_host_is_judged_like_any_other() -> None:
    case = Case("2x2")
    case.feed(1, "exit", status="returned", code=0)
    case.enter(0, 5, replica=0)
    assert case.after(4) is not None


def test_hosts_in_collectives_of_different_replicas_are_in_different_collectives() -> None:
    case = Case("2x2")
    for replica in (0, 1):
        case.enter(0, 5, replica=replica)
    case.enter(1, 6, replica=0)
    hang = case.after(4)
    assert hang is not None
    assert hang.code == "collective-mismatch"


def test_a_host_that_computes_is_not_judged() -> None:
    case = Case("2x1")
    case.feed(1, "exit", status="returned", code=0)
    case.enter(0, 5)
    for _ in range(10):
        assert case.after(1) is None
        case.cpu[0] = case.cpu_seconds(0) + 0.9
    case.cpu[0] += 1e-3
    assert case.after(6) is not None


def test_whatever_happens_starts_the_patience_anew() -> None:
    case = Case("2x1")
    case.feed(1, "exit", status="returned", code=0)
    for ordinal in range(10):
        case.enter(0, ordinal)
        assert case.after(2) is None
    assert case.after(1) is not None


def test_nothing_is_said_when_all_are_gone_or_before_anything_happened() -> None:
    case = Case("2x1")
    assert case.after(60) is None
    for host in range(2):
        case.feed(host, "exit", status="returned", code=0)
    assert case.after(60) is None


def all_reduce(context: HostContext, number: int) -> None:
    """As the probe tells it."""
    import tensorflow as tf

    event = {"event": "collective", "name": "all_reduce", "ordinal": number, "replica": 0, "step": number}
    context.send({**event, "phase": "enter"})
    strategy = tf.distribute.get_strategy()
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([2])))
    context.send({**event, "phase": "exit"})


def train(context: HostContext, steps: int, pause: float = 0.0) -> None:
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        for number in range(steps):
            time.sleep(pause)
            all_reduce(context, number)


def follow(cluster: RunningCluster, judge: HangJudge) -> tuple[Hang | None, float]:
    """The verdict, and how long the last event was ago then."""
    deadline, last = time.monotonic() + LIMIT, time.monotonic()
    while not cluster.is_over:
        assert time.monotonic() < deadline
        for host, event in cluster.events(0.05):
            judge.feed(host, event)
            last = time.monotonic()
        if (hang := judge.verdict(cluster)) is not None:
            return hang, time.monotonic() - last
    return None, 0.0


def test_a_real_cluster_with_unequal_steps_is_judged_and_ended(launch: Callable[..., RunningCluster], preload: Preload) -> None:
    def entry(context: HostContext) -> None:
        train(context, 3 + context.host)

    with launch("2x1", entry, preload=preload) as cluster:
        hang, _ = follow(cluster, HangJudge(cluster.plan.topology))
        assert hang is not None
        assert hang.code == "unequal-steps"
        assert hang.where == {0: "ended its program", 1: "waits in all_reduce, its collective number 3"}
        assert "in all_reduce" in cluster.stacks()[1]


def test_a_real_cluster_with_slow_input_is_left_alone(launch: Callable[..., RunningCluster], preload: Preload) -> None:
    def entry(context: HostContext) -> None:
        train(context, 2, pause=3.0 * context.host)

    with launch("2x1", entry, preload=preload) as cluster:
        assert follow(cluster, HangJudge(cluster.plan.topology))[0] is None
        assert [outcome.status for outcome in cluster.outcomes] == ["returned", "returned"]


def test_a_host_whose_child_process_is_there_is_not_said_to_wait_for_ever() -> None:
    def works(*command: str) -> bool:
        with subprocess.Popen(command) as child:
            try:
                return system.has_working_child(os.getpid())
            finally:
                child.kill()

    def helps(module: str) -> bool:
        return works(sys.executable, "-c", "import time; time.sleep(60)", f"from multiprocessing.{module} import main")

    before = set(system.children_of(os.getpid()))
    assert works("sleep", "60")
    assert before or not (helps("resource_tracker") or helps("forkserver"))
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert before or not system.has_working_child(os.getpid())  # nobody has asked for its end yet
    ended.wait()
