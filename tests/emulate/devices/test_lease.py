"""A GPU serves one cluster at a time, on the whole machine, and is free again whatever ended its holder."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from emulate.devices import GpuLease
from emulate.devices.lease import is_leased
from emulate.errors import Unavailable

HOLD = "import sys; from emulate.devices import GpuLease; lease = GpuLease(['made-up-1']); print('held', flush=True); input()"


def test_another_process_waits_and_says_what_it_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Unavailable) as caught:
            GpuLease(["made-up-0", "made-up-1"], patience=0.1)
        assert str(caught.value) == (
            "A GPU serves one cluster at a time. Received: GPU made-up-1, which others held for 0.1 s. "
            "Run one after the other, or give each its own GPUs by CUDA_VISIBLE_DEVICES."
        )
        with GpuLease(["made-up-0"], patience=0):  # what was had of several is given back
            pass
        holder.kill()
        holder.wait()
        with GpuLease(["made-up-1"], patience=20):
            pass


def test_a_second_cluster_of_the_same_thread_would_wait_for_ever_and_is_refused() -> None:
    with GpuLease(["made-up-2"]), pytest.raises(Unavailable, match=r"made-up-2 beside a running one of the same thread\. End"):
        GpuLease(["made-up-2"])


def test_another_thread_gets_it_next() -> None:
    got = threading.Event()

    def take() -> None:
        with GpuLease(["made-up-3"], patience=20):
            got.set()

    with GpuLease(["made-up-3"]):
        thread = threading.Thread(target=take)
        thread.start()
        assert not got.wait(0.1)
    thread.join()
    assert got.is_set()


def test_gpus_that_others_do_not_hold_are_had_at_once() -> None:
    with GpuLease(["made-up-4"]), GpuLease(["made-up-5"], patience=0), GpuLease([]):
        pass


def test_whoever_asks_is_told_whether_a_gpu_is_held_and_takes_nothing() -> None:
    assert not is_leased("made-up-6")
    with GpuLease(["made-up-6"], patience=0):
        assert is_leased("made-up-6")
        assert is_leased("made-up-6")
    assert not is_leased("made-up-6")
