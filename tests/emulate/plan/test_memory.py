from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.errors import UsageError
from emulate.plan import MemoryUse, StepMemory, memory_use, parse_memory

STEP = StepMemory(
    weights=100e6,
    other_variables=200e6,
    static=10e6,
    inputs=(0.0, 0.6e6),
    peaks=((120e6, 2e6, 2e6), (50e6, 40e6, 40e6)),
    reduced_peaks=((120e6, 1e3, 0.0),),
)


def use(
    step: StepMemory = STEP, *, batch: int = 64, room: float | None = 24e9, gpus: int = 1, short: bool = False
) -> MemoryUse:
    return memory_use(step, batch=batch, gradient_bytes=100e6, num_gpus=gpus, room=room, in_16_bits=short)


@pytest.mark.parametrize(("text", "size"), [("24GB", 24e9), ("16 GiB", 2**34), ("0.5tb", 5e11), ("900MB", 9e8)])
def test_a_size_is_read_with_its_unit(text: str, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["24", "GB", "0GB", "-1GB", "24 kilo", ""])
def test_a_size_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--memory must be a positive number with a unit.* Example: --memory 24GB\.") as error:
        parse_memory(text)
    assert f"Received: --memory {text!r}." in str(error.value)


def test_the_parts_add_up_to_the_total() -> None:
    found = use()
    assert sum(found.parts.values()) == found.total == 310e6 + 2 * 64 * 0.6e6 + 50e6 + 64 * 40e6
    assert found.parts["activations"] == 64 * 40e6


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e8)), min_size=1, max_size=5), st.floats(1e8, 1e11))
def test_the_largest_batch_fits_and_one_more_does_not(peaks: list[tuple[float, float]], room: float) -> None:
    step = replace(STEP, peaks=tuple((fixed, each, 0.0) for fixed, each in peaks))
    largest = use(step, room=room).largest_batch
    assert largest is not None
    if largest:
        assert use(step, batch=largest, room=room * (1 + 1e-9)).fits
    assert not use(step, batch=largest + 1, room=room * (1 - 1e-9)).fits


def test_a_step_that_is_too_large_is_told_what_makes_it_fit() -> None:
    found = use(room=2e9)
    assert found.fits is False
    assert found.largest_batch == 39
    assert "no. It would with batch 39, or bfloat16 (keras.mixed_precision, 1.77 GB)" in found.sentences()[1]
    assert found.accumulation == (2, pytest.approx(410e6 + 32 * 1.2e6 + 50e6 + 32 * 40e6))
    assert "or gradient accumulation over 2 batches of 32 (1.78 GB)." in found.sentences()[1]
    assert use(room=1.7e9).in_16_bits == pytest.approx(1.7668e9)
    assert "bfloat16" not in use(room=1.7e9).sentences()[1]


def test_a_step_that_fits_says_how_far_the_batch_can_grow() -> None:
    assert use().sentences()[1] == "Fits in 24 GB: yes. The largest batch that fits is 573."


def test_variables_that_are_too_large_fit_with_no_batch() -> None:
    assert use(room=0.3e9).sentences()[1] == "Fits in 300 MB: no. It would with no batch."


def test_layers_in_16_bits_are_not_offered_twice() -> None:
    assert use(short=True).in_16_bits is None


def test_several_gpus_pack_their_gradients() -> None:
    assert use().parts["gradients and temporary tensors"] == 50e6
    assert use(gpus=8).parts["gradients and packing buffer"] == 200e6


def test_a_graph_of_one_batch_gives_no_other() -> None:
    found = use(replace(STEP, scales=False), room=1e9)
    assert (found.largest_batch, found.in_16_bits, found.accumulation) == (None, None, None)
    assert found.sentences()[1] == "Fits in 1 GB: no."
    assert "Other batches were not computed: the graph of the step is made for this batch" in found.sentences()[2]


def test_what_is_not_counted_is_said() -> None:
    found = use(replace(STEP, uncounted=("While",)), room=None)
    assert found.fits is None
    assert "the memory of the GPU is not known. Give it: --memory 24GB." in found.sentences()[1]
    assert "Not counted: tensors of While" in found.sentences()[2]
    assert "cuDNN" in found.sentences()[-1]
    assert "No GPU was measured." in found.sentences()[-1]
