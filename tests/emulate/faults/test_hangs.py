"""Each kind of hang is told apart, with real processes: who waits for what, and where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate import Cluster
from emulate.cluster.threads import DATA, LOCK, OTHER, SLEEP, TENSORFLOW, parse, place_of, waits_for
from emulate.errors import Hung

Make = Callable[..., Cluster]


def train(kind: str) -> None:
    """Steps of a tiny model; something happens to host 1 after the third."""
    import json
    import os
    import queue
    import time

    import tensorflow as tf

    host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    never: Any = queue.Queue()

    def rows() -> Any:
        for number in range(8):
            if kind == "data" and host == 1 and number == 3:
                never.get()
            yield float(number)

    def step(x: Any) -> Any:
        del x
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([2])))

    for number, x in enumerate(tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([]))):
        step(x)
        if number == 3 and host == 1:
            if kind == "lock":
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            if kind == "left":
                return
            if kind == "sleep":
                time.sleep(12)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param(
            "data",
            "waits-for-data: host 0 waits in all_reduce float32[2], its collective number 4; host 1 waits for the next batch",
            marks=pytest.mark.slow,
        ),
        (
            "lock",
            "python-deadlock: host 0 waits in all_reduce float32[2], its collective number 5; host 1 waits for a lock that",
        ),
        ("left", "unequal-steps: host 0 waits in all_reduce float32[2], its collective number 5; host 1 ended its program"),
    ],
)
def test_a_hang_is_named_and_each_host_is_shown(cluster: Make, kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulate.cluster.hang._IDLE_PATIENCE", 5.0)
    with pytest.raises(Hung) as caught:
        cluster("2x1", timeout=200).run(train, kind)
    assert caught.value.reason == "hang"
    assert f"Received: no host can go on ({said}" in str(caught.value)
    assert "host 0 waits in all_reduce float32[2] (last collective all_reduce float32[2], number" in str(caught.value)
    if kind == "data":
        assert "its data is made at test_hangs.py:" in str(caught.value)


@pytest.mark.slow
def test_a_host_that_sleeps_is_no_hang(cluster: Make) -> None:
    assert cluster("2x1", timeout=200).run(train, "sleep") == [None, None]


def dump(*threads: str) -> str:
    return "\n\n".join(f"Thread 0x{number:016x} (most recent call first):\n{text}" for number, text in enumerate(threads))


HOST = '  File "/x/emulate/cluster/host.py", line 9 in run'
QUICK = '  File "/x/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute'
NEXT = '  File "/x/site-packages/tensorflow/python/data/ops/iterator_ops.py", line 7 in __next__'
WAIT = '  File "/usr/lib/python3.11/threading.py", line 327 in wait'
JOIN = '  File "/x/site-packages/tensorflow/python/distribute/coordinator/cluster_coordinator.py", line 1390 in join'
FEEDS = '  File "/x/site-packages/tensorflow/python/data/ops/from_generator_op.py", line 3 in generator_py_func'


def program(tmp_path: Path, line: str) -> str:
    file = tmp_path / "program.py"
    file.write_text(line + "\n")
    return f'  File "{file}", line 1 in work'


@pytest.mark.parametrize(
    ("innermost", "line", "expected"),
    [
        (QUICK, "step(x)", TENSORFLOW),
        (f"{QUICK}\n{NEXT}", "for x in data:", DATA),
        (WAIT, "queue.get()", LOCK),
        (WAIT, "queue.get(timeout=60)", OTHER),
        (f"{WAIT}\n{JOIN}", "coordinator.join()", TENSORFLOW),
        (WAIT, "thread.join(12.5)", OTHER),
        (None, "lock.acquire()", LOCK),
        (None, "with self._lock:", LOCK),
        (None, "time.sleep(5)", SLEEP),
        (None, "socket.recv(5)", OTHER),
    ],
)
def test_what_a_thread_waits_for_is_read_from_its_stack(
    tmp_path: Path, innermost: str | None, line: str, expected: str
) -> None:
    frames = [*([innermost] if innermost else []), program(tmp_path, line), HOST]
    assert waits_for(parse(dump("\n".join(frames)))) == expected


def test_a_generator_that_waits_makes_its_host_wait_for_data_and_one_that_sleeps_does_not(tmp_path: Path) -> None:
    main = "\n".join([QUICK, program(tmp_path, "queue.get()"), HOST])
    feeding = "\n".join([WAIT, program(tmp_path, "queue.get()"), FEEDS])
    threads = parse(dump(main, feeding))
    assert waits_for(threads) == DATA
    assert place_of(threads).endswith("; its data is made at program.py:1 in work)")
    (tmp_path / "other").mkdir()
    sleeping = "\n".join([program(tmp_path / "other", "time.sleep(1)"), FEEDS])
    assert waits_for(parse(dump(main, sleeping))) == OTHER
