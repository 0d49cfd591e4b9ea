"""`--device`: GPUs where they are asked for and there, the CPU where it is; never the one for the other in silence."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from emulate.devices import DeviceChoice, GpuLease, Inventory, choose_device
from emulate.devices.machine import decide
from emulate.errors import Unavailable, UsageError
from emulate.topology import Topology
from tests.emulate.devices.made_gpus import gpu, gpus, inventory

NONE = Inventory(why="no NVIDIA driver answers: not found")
ONE, FOUR, MANY = Topology(1, 1), Topology(2, 2), Topology(8, 8)


def sees(number: int) -> Any:
    return lambda: {"tensorflow": "2.21.0", "with_cuda": True, "gpus": [{"name": "H100"}] * number}


def test_the_cpu_is_taken_without_asking_for_gpus() -> None:
    assert choose_device("cpu", [FOUR]) == DeviceChoice("cpu")


def test_another_word_is_wrong_use() -> None:
    with pytest.raises(UsageError, match=r"one of cpu, gpu, auto\. Received: device='tpu'\. Choose one of them\."):
        choose_device("tpu", [ONE])


def test_gpus_on_a_machine_without_any_are_unavailable_with_the_numbers() -> None:
    with pytest.raises(Unavailable) as caught:
        decide("gpu", [FOUR, ONE], NONE, sees(0))
    assert str(caught.value) == (
        "--device gpu needs GPUs that TensorFlow can use. Received: device='gpu' for 2x2 (4 devices), 1x1 (1 device), and no "
        "NVIDIA driver answers: not found. Use --device cpu, or a machine with GPUs: `gpudist devices` says what this one has."
    )


def test_gpus_that_tensorflow_does_not_see_are_unavailable() -> None:
    with pytest.raises(
        Unavailable, match=r"the driver has 4 GPUs and TensorFlow sees 0 of them \(install tensorflow\[and-cuda"
    ):
        decide("gpu", [FOUR], gpus(4), sees(0))


def test_a_library_that_tensorflow_looked_for_in_vain_is_named() -> None:
    with pytest.raises(Unavailable) as caught:
        decide("gpu", [FOUR], gpus(4), lambda: {**sees(0)(), "missing": ["libcusolver.so.11"]})
    assert (
        "TensorFlow sees 0 of them (it cannot load libcusolver.so.11: install tensorflow[and-cuda], or name in LD_LIBRARY_PATH "
        "the folders where these are)"
    ) in str(caught.value)


def test_a_tensorflow_without_cuda_is_named() -> None:
    with pytest.raises(Unavailable, match="this TensorFlow was built without CUDA"):
        decide("gpu", [FOUR], gpus(4), lambda: {**sees(0)(), "with_cuda": False})


def test_a_tensorflow_that_cannot_be_asked_is_named() -> None:
    answer = {"tensorflow": None, "tensorflow_error": "ImportError: none", "gpus": []}
    with pytest.raises(Unavailable, match=r"TensorFlow cannot be asked \(ImportError: none\)"):
        decide("gpu", [FOUR], gpus(4), lambda: answer)


def test_enough_gpus_are_taken() -> None:
    assert decide("gpu", [FOUR], gpus(4), sees(4)) == DeviceChoice("gpu")
    assert decide("auto", [FOUR, ONE], gpus(4), sees(4)) == DeviceChoice(
        "gpu", "--device auto chose this machine's GPUs: it has 4."
    )


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """A machine with four GPUs of which somebody has taken almost all memory, long ago."""
    monkeypatch.setattr("emulate.devices.lease.PATIENCE", 0)
    # Of this process alone: a lease holds on the whole machine, and another test may have one of GPUs with the usual names.
    found = inventory(*(replace(gpu(k, free=600), uuid=f"GPU-{os.getpid()}-{k}") for k in range(4)))
    monkeypatch.setattr("emulate.devices.machine.find_gpus", lambda: found)
    monkeypatch.setattr("emulate.devices.machine.what_tensorflow_says", sees(4))
    return found


def test_gpus_that_other_programs_fill_are_not_taken(filled: Inventory) -> None:
    assert choose_device("auto", [FOUR]) == DeviceChoice(
        "cpu",
        "--device auto chose the CPU, because 2x2 has 4 devices, and there are 0 GPUs of 4 with 80% of the memory free.",
    )
    with pytest.raises(Unavailable, match="H100 with 600 MiB free"):
        choose_device("gpu", [FOUR])


def test_gpus_that_another_cluster_fills_are_waited_for(filled: Inventory) -> None:
    with GpuLease([one.uuid for one in filled.gpus], patience=20):
        assert choose_device("auto", [FOUR]).kind == "gpu"
        assert choose_device("gpu", [FOUR]).kind == "gpu"
    assert choose_device("auto", [FOUR]).kind == "cpu"


def test_too_few_gpus_are_sliced_only_when_they_are_asked_for() -> None:
    assert decide("gpu", [FOUR], gpus(1), sees(1)) == DeviceChoice("gpu")
    assert decide("auto", [ONE, FOUR], gpus(1), sees(1)) == DeviceChoice(
        "cpu",
        "--device auto chose the CPU, because 2x2 has 4 devices, and there is 1 GPU (--device gpu takes and splits what "
        "there is).",
    )


def test_auto_leaves_gpus_to_others_who_have_more_than_a_fifth_of_the_memory() -> None:
    total = 81_920
    assert decide("auto", [Topology(1, 2)], gpus(2, free=total * 8 // 10), sees(2)).kind == "gpu"
    assert decide("auto", [Topology(1, 2)], gpus(2, free=total * 8 // 10 - 1), sees(2)) == DeviceChoice(
        "cpu",
        "--device auto chose the CPU, because 1x2 has 2 devices, and there are 0 GPUs of 2 with 80% of the memory free "
        "(--device gpu takes and splits what there is).",
    )


def test_auto_says_why_mig_instances_do_not_suffice() -> None:
    parts = inventory(gpu(0, is_part=True), gpu(1, is_part=True))
    assert "and there are 2 GPUs, 2 of them MIG instances, of which a host has one" in (
        decide("auto", [Topology(1, 2)], parts, sees(1)).why
    )


def test_gpus_that_are_left_out_are_named_whatever_computes() -> None:
    machine = replace(gpus(1), left_out=("GPU 3 (lost)",))
    assert decide("auto", [ONE], machine, sees(1)).why == (
        "--device auto chose this machine's GPUs: it has 1; left out: GPU 3 (lost)."
    )
    assert decide("auto", [FOUR], machine, sees(1)).why.endswith("; left out: GPU 3 (lost).")
    with pytest.raises(Unavailable, match=r"TensorFlow sees 0 of them \(install .*\); left out: GPU 3 \(lost\)\. Use"):
        decide("gpu", [ONE], machine, sees(0))
    none = Inventory((), "570.1", "no GPU can be used: GPU 3 (lost)", ("GPU 3 (lost)",))
    assert decide("auto", [ONE], none, sees(0)).why == (
        "--device auto chose the CPU, because no GPU can be used: GPU 3 (lost)."
    )


def test_a_driver_that_cannot_compile_the_kernels_is_refused_before_anything_runs() -> None:
    def old() -> dict[str, Any]:
        return {**sees(1)(), "built_for": ["sm_70", "compute_80"], "cuda": "12.5.1", "driver_cuda": "12.4"}

    with pytest.raises(
        Unavailable, match=r"Received: device='gpu' for 1x1 \(1 device\), and TensorFlow has no kernels for H100"
    ):
        decide("gpu", [ONE], gpus(1), old)
    choice = decide("auto", [ONE], gpus(1), old)
    assert choice.kind == "cpu"
    assert "cannot compile them: that takes a driver of CUDA 12.5 or newer" in choice.why


def test_memory_that_a_cluster_gives_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([gpus(4, free=600), gpus(4, free=600), gpus(4)])
    monkeypatch.setattr("emulate.devices.machine.find_gpus", lambda: next(answers))
    monkeypatch.setattr("emulate.devices.machine.what_tensorflow_says", sees(4))
    monkeypatch.setattr("emulate.devices.lease._PAUSE", 0)
    monkeypatch.setattr("emulate.devices.lease.PATIENCE", 600)
    GpuLease(["made-up-late"]).close()
    assert choose_device("auto", [FOUR]).kind == "gpu"


def test_auto_without_gpus_asks_nobody() -> None:
    def never() -> dict[str, Any]:
        raise AssertionError("it takes seconds")

    assert decide("auto", [FOUR], NONE, never) == DeviceChoice("cpu")


def test_auto_passes_over_gpus_that_tensorflow_does_not_see_and_says_so() -> None:
    choice = decide("auto", [ONE], gpus(1), sees(0))
    assert choice.kind == "cpu"
    assert "TensorFlow sees 0 of them" in choice.why


def test_a_topology_that_does_not_fit_does_not_take_the_others_along() -> None:
    choice = decide("gpu", [ONE, MANY], gpus(1, free=8_000), sees(1))
    assert choice.kind == "gpu"
    assert list(choice.lacking) == [MANY]
    assert "topology='8x8' with 64 devices" in choice.lacking[MANY]
    with pytest.raises(Unavailable, match="topology='8x8' with 64 devices"):
        decide("gpu", [MANY], gpus(1, free=8_000), sees(1))


def test_of_mig_instances_tensorflow_sees_one() -> None:
    parts = inventory(gpu(0, is_part=True), gpu(1, is_part=True))
    assert decide("gpu", [Topology(2, 1)], parts, sees(1)).kind == "gpu"
