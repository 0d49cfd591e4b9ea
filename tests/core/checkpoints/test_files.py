"""What lies in the folder: names, locks, checksums, agreement; no TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudist_core.checkpoints import files, items
from gpudist_core.checkpoints.checkpoints import check_arguments
from gpudist_core.checkpoints.folder import Folder, Lock
from gpudist_core.checkpoints.hosts import HostAgreement, Notice, TextExchange
from gpudist_core.errors import Damaged, FolderInUse, HostMissing, UsageError


class Store:
    """What TensorFlow's coordination service does, in one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: str) -> bool:
        with self._changed:
            free = key not in self._values
            self._values.setdefault(key, value)
            self._changed.notify_all()
            return free

    def get(self, key: str, seconds: float | None) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            del self._values[key]


def test_names_do_not_depend_on_how_many_models_came_before() -> None:
    numbered = items.Numbered()
    assert [numbered(p) for p in ("sequential_3/dense_7/kernel", "sequential_3/dense_9/kernel")] == [
        "sequential/dense/kernel",
        "sequential/dense_1/kernel",
    ]
    assert items.unique(["a", "b", "a"]) == ["a", "b", "a#2"]


def test_a_slot_is_named_for_its_variable() -> None:
    class Slot:
        path = "adam_2/sequential_1_dense_4_kernel_momentum"

    model = {"sequential_1/dense_4/kernel": "sequential/dense/kernel"}
    assert items.unique_names_of_slots([Slot()], model) == ["adam/sequential/dense/kernel/momentum"]


@given(st.binary(min_size=1, max_size=300), st.integers(0, 10_000))
def test_a_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    folder = tmp_path_factory.mktemp("piece")
    file = files.DataFile(folder / "host-000.bin")
    file.add(np.zeros(3))
    values = np.frombuffer(data, np.uint8)
    piece = file.add(values)
    file.close()
    files.check_blocks(folder, "a", piece)
    np.testing.assert_array_equal(files.load_piece(folder, piece, "uint8", values.shape), values)
    raw = bytearray((folder / "host-000.bin").read_bytes())
    raw[piece.offset + at % len(data)] ^= 1 << at % 8
    (folder / "host-000.bin").write_bytes(raw)
    with pytest.raises(Damaged, match="was changed after it was written, in a"):
        files.check_blocks(folder, "a", piece)


def test_what_a_killed_run_left_is_cleaned_and_what_it_was_replacing_comes_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin(3)
    folder.commit(3)
    folder.of(3).rename(tmp_path / ".replaced-00000003")
    folder.begin(3)
    folder.begin(5)
    folder.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_what_is_not_ours_stays_in_the_folder(tmp_path: Path) -> None:
    for name in (".replaced-x", ".writing-notes"):
        (tmp_path / name).mkdir()
    Folder(tmp_path).clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".replaced-x", ".writing-notes"]


def test_arrays_of_a_state_whose_keys_have_slashes_are_kept_apart() -> None:
    kept: dict[str, Any] = {}
    state = {"a/b": np.array([1]), "a": {"b": np.array([2]), "b~1c": np.array([3]), "b/c": np.array([4])}}
    found = files.decode_state(json.loads(json.dumps(files.encode_state(state, "state", kept.__setitem__))), kept.__getitem__)
    assert found == state


def test_what_could_not_be_removed_of_a_checkpoint_that_failed_goes_before_the_next(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (folder.begin(3) / "host-000.bin").write_bytes(b"half")
    assert folder.begin(6).is_dir()
    assert [entry.name for entry in tmp_path.iterdir()] == [".writing-00000006"]


def test_of_a_checkpoint_that_is_a_link_the_link_alone_is_removed(tmp_path: Path) -> None:
    folder, elsewhere = Folder(tmp_path / "run"), tmp_path / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    folder.begin(5)
    folder.commit(5)
    folder.of(3).symlink_to(elsewhere)
    folder.of(7).symlink_to(tmp_path / "nowhere")
    folder.begin(7)
    folder.commit(7)
    folder.prune(1)
    assert [entry.name for entry in folder.path.iterdir()] == ["step-00000007"]
    assert (elsewhere / "kept").is_dir()


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (1, 200_000_000, 30):
        folder.begin(step)
        folder.commit(step)
    folder.prune(2)
    assert folder.steps() == [200_000_000, 30]


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gpudist_core.checkpoints.folder import Lock;"
        "Lock(Path(sys.argv[1])).acquire(); print('has it', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"has it\n"
    with pytest.raises(
        FolderInUse, match=rf"Only one run may write .* in use by process {other.pid} on {socket.gethostname()}"
    ):
        Lock(tmp_path).acquire()
    other.kill()
    other.communicate()
    lock = Lock(tmp_path)  # that of a process that is gone is taken over
    lock.acquire()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_of_another_host_holds_while_it_shows_life(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot": "", "namespace": "", "started": "1"}))
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.05):
            os.utime(tmp_path / ".lock")

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(FolderInUse, match="in use by process 1 on elsewhere"):
        Lock(tmp_path, patience=10).acquire()
    beating.set()
    thread.join()
    Lock(tmp_path, patience=0.3).acquire()


def on_each(num: int, act: Callable[[int], Any]) -> list[Any]:
    """Call a function as each of several hosts, at the same time."""
    results: list[Any] = [None] * num

    def one(host: int) -> None:
        results[host] = act(host)

    threads = [threading.Thread(target=one, args=(host,)) for host in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_hosts_hear_each_other_and_a_missing_one_is_named() -> None:
    store = Store()
    exchanges = [TextExchange(store, "x", host, 3, 10) for host in range(3)]
    rounds = on_each(3, lambda host: [exchanges[host].all_gather("testing", [host, i]) for i in range(4)])
    assert rounds == [[[[host, i] for host in range(3)] for i in range(4)]] * 3
    with pytest.raises(HostMissing, match=r"take part in saving\. Received: missing hosts=\[1, 2\] after 0\.1 s, hosts=3"):
        TextExchange(store, "y", 0, 3, 0.1).all_gather("saving", None)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=4), st.data())
def test_all_hosts_stop_at_the_same_step_wherever_each_is_when_one_is_told(ahead: list[int], data: Any) -> None:
    """Between two calls nothing keeps the hosts together here: each runs as it likes."""
    store, told = Store(), data.draw(st.sets(st.integers(0, len(ahead) - 1), min_size=1))

    def run(host: int) -> int | None:
        agreement = HostAgreement(store, "stop", host, len(ahead), 20)
        for call in range(1, 2000):
            if call == ahead[host] + 1 and host in told:
                agreement.ask()
            if agreement.is_time(call):
                agreement.close()
                return call
        agreement.close()
        return None

    stops = on_each(len(ahead), run)
    assert len(set(stops)) == 1


def test_a_host_that_has_ended_lets_the_others_end() -> None:
    store = Store()
    agreements = [HostAgreement(store, "stop", host, 2, 20) for host in range(2)]
    agreements[1].is_time(1)
    agreements[1].close()
    agreements[0].ask()
    assert not any(agreements[0].is_time(call) for call in range(1, 50))
    agreements[0].close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_that_watch_for_a_signal_the_one_that_is_left_hears_it(order: tuple[int, int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        notices = [Notice(["SIGUSR1"], None), Notice(["SIGUSR1"], None)]
        first, second = order
        notices[first].close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (notices[second].is_time(1), notices[first].is_time(1)) == (True, False)
        notices[second].close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"folder": ""}, "folder must be a path. Received: folder=''. All hosts must see it."),
        (
            {"signals": ("SIGTERM", "SIGKILL")},
            (
                "A signal must be one that Python can catch. Received: signals=['SIGKILL']. Use another signal, for example "
                "SIGTERM."
            ),
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_training(changed: dict[str, Any], text: str) -> None:
    given = {"folder": "runs", "keep": 1, "every": 1, "signals": (), "timeout": 1.0, "extra": None, **changed}
    with pytest.raises(UsageError) as raised:
        check_arguments(**given)
    assert str(raised.value) == text
