"""A host is said to wait for ever only where none of its threads goes on by itself, as one does whose wait has an end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from emulate.cluster.threads import LOCK, OTHER, parse, waits_for
from tests.emulate.cluster.helpers import LIMIT

_HOST = '  File "/x/emulate/cluster/host.py", line 9 in run'
_BEGIN = """
import concurrent.futures, faulthandler, queue, threading

lock, event, condition = threading.Lock(), threading.Event(), threading.Condition()
never, simple = queue.Queue(), queue.SimpleQueue()
lock.acquire()
seconds = 60

def beside(work, *args):
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread

def acquire():
    lock.acquire()

def poll():
    while not event.wait(seconds):
        never.put("news")

def look():
    try:
        never.get(True, seconds)
    except queue.Empty:
        event.set()

class Beat(threading.Thread):
    interval = 60

    def run(self):
        while not event.wait(self.interval):
            never.put("beat")

faulthandler.dump_traceback_later(0.7, exit=True)
"""


def waits_of(program: str, folder: Path) -> str:
    """What a real process that runs this waits for, by what faulthandler writes of it; its main thread comes last."""
    file = folder / "program.py"
    file.write_text(_BEGIN + program)
    ended = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=LIMIT, check=False)
    head, _, dump = ended.stderr.partition("\n")
    assert head.startswith("Timeout"), ended.stderr
    return waits_for(parse(f"{dump.rstrip()}\n{_HOST}"))


@pytest.mark.parametrize(
    "program",
    [
        "threading.Timer(60, event.set).start()\nevent.wait()",
        "beside(poll)\nnever.get()",
        "beside(look)\nwith condition:\n    condition.wait()",
        "beat = Beat(daemon=True)\nbeat.start()\nbeat.join()",
        "beside(acquire).join(seconds)",
        "beside(lambda: lock.acquire(True, seconds))\nevent.wait()",
        "event.wait(seconds)",
        "lock.acquire(timeout=seconds)",
        "lock.acquire(\n    True,\n    seconds,\n)",
        "lock.acquire(*(True, seconds))",
        "simple.get(True, seconds)",
        "with condition:\n    condition.wait_for(event.is_set, seconds)",
        "concurrent.futures.ThreadPoolExecutor().submit(acquire).result(seconds)",
    ],
)
def test_a_host_goes_on_by_itself_when_any_of_its_threads_waits_for_a_time_only(tmp_path: Path, program: str) -> None:
    assert waits_of(program, tmp_path) == OTHER


@pytest.mark.parametrize(
    "program",
    [
        "never.get()",
        "never.get(True)",
        "event.wait()",
        "lock.acquire()",
        "with lock:\n    pass",
        "beside(acquire).join()",
        "beside(never.get)\nbeside(event.wait)\nsimple.get()",
        "with condition:\n    condition.wait_for(event.is_set)",
        "future = concurrent.futures.ThreadPoolExecutor().submit(acquire)\nconcurrent.futures.wait([future])",
    ],
)
def test_a_host_whose_threads_all_wait_without_an_end_waits_for_a_lock(tmp_path: Path, program: str) -> None:
    assert waits_of(program, tmp_path) == LOCK


def test_a_thread_of_a_library_that_only_looks_around_now_and_then_wakes_nobody(tmp_path: Path) -> None:
    monitor = tmp_path / "tqdm" / "_monitor.py"
    monitor.parent.mkdir()
    monitor.write_text("def run(event):\n    event.wait(10)\n")
    program = (
        f"import sys\nsys.path.insert(0, {str(monitor.parent)!r})\nimport _monitor\nbeside(_monitor.run, event)\nnever.get()"
    )
    assert waits_of(program, tmp_path) == LOCK


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("event.wait(seconds)", OTHER),
        ("never.get(True, seconds)", OTHER),
        ("thread.join(limit)", OTHER),
        ("event.wait()", LOCK),
        ("never.get(True)", LOCK),
        ("thread.join()", LOCK),
    ],
)
def test_where_pythons_own_sources_are_missing_the_programs_line_says_whether_a_wait_has_an_end(
    tmp_path: Path, line: str, expected: str
) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"{line}\n")
    wait = '  File "/gone/lib/python3.11/threading.py", line 331 in wait'
    dump = f'Thread 0x1 (most recent call first):\n{wait}\n  File "{file}", line 1 in work\n{_HOST}'
    assert waits_for(parse(dump)) == expected
