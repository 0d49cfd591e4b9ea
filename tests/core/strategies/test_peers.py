"""Tasks wait for each other, say for whom, and name who never came."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from gpudist_core.errors import Unavailable
from gpudist_core.strategies import waiting
from tests.emulate.devices.hosts import free_ports


@pytest.fixture
def addresses() -> list[str]:
    return [f"localhost:{port}" for port in free_ports(3)]


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("localhost", 0)) as listening:
        yield f"localhost:{listening.getsockname()[1]}"


def test_tasks_that_start_apart_all_find_each_other(addresses: list[str]) -> None:
    def wait(number: int) -> None:
        others = {f"worker {i}": address for i, address in enumerate(addresses) if i != number}
        waiting.wait_for(others, addresses[number], None, 60)
        done.append(number)

    done: list[int] = []
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.3)
    assert not done
    # The last one leaves at once, and its port is silent until its server starts: the others must have seen it, or see that.
    threads[2].start()
    threads[2].join()
    with socket.create_server(("", int(addresses[2].rpartition(":")[2]))):
        for thread in threads:
            thread.join()
    assert sorted(done) == [0, 1, 2]


def test_who_never_answers_is_named(addresses: list[str], server: str) -> None:
    others = {"worker 1": addresses[1], "worker 2": server, "ps 0": "no-such-host.invalid:1"}
    with pytest.raises(Unavailable) as raised:
        waiting.wait_for(others, addresses[0], None, 0.2)
    text = str(raised.value)
    assert text.startswith(
        "Every task of a cluster must start within timeout_seconds. Received: timeout_seconds=0.2, and 2 of 3 other tasks"
    )
    assert f"worker 1 at {addresses[1]} (Connection refused), ps 0 at no-such-host.invalid:1 (" in text
    assert "worker 2" not in text
    assert text.endswith("or allow more time: make_strategy(timeout_seconds=...).")


def test_one_says_for_whom_one_waits(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "_FIRST_WORD_SECONDS", 0.0)
    with pytest.raises(Unavailable):
        waiting.wait_for({"worker 1": addresses[1]}, None, None, 0.1)
    assert f"gpudist_core: waiting 0 s for worker 1 at {addresses[1]} (Connection refused)\n" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(server: str) -> None:
    with pytest.raises(Unavailable) as raised:
        waiting.wait_for({}, server, None, 0.1)
    assert str(raised.value) == (
        f"This task's port must be free. Received: address='{server}', Address already in use. Stop the program that uses it "
        "(perhaps left over from an earlier run), or give this task another port."
    )
