"""The trace's files: what is written is read back, also by half."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from emulate.trace import Trace, TraceWriter, digest, row_positions

FLOATS = arrays.arrays(np.float32, arrays.array_shapes(max_dims=3, max_side=5), elements=st.floats(-1e6, 1e6, width=32))


def _stored(tmp: Path, event: dict[str, object]) -> Trace:
    Trace.describe(tmp, {"topology": "1x1"})
    step = {"event": "step", "optimizer": "o", "step": 0, "replica": 0, **event}
    writer = TraceWriter(tmp / "host-0", budget=1 << 20)
    writer.write(step)
    writer.close()
    return Trace(tmp)


@given(FLOATS)
def test_an_array_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> None:
    tmp = tmp_path_factory.mktemp("trace")
    Trace.describe(tmp, {"topology": "1x1"})
    writer = TraceWriter(tmp / "host-0", budget=1 << 20)
    entry = writer.array(array)
    writer.write({"event": "step", "optimizer": "o", "step": 0, "replica": 0, "gradients": {"w": entry}})
    writer.close()
    stored = Trace(tmp).steps("o")[0][0].gradients["w"]
    np.testing.assert_array_equal(stored.read(), array)
    assert stored.is_finite == bool(np.isfinite(array).all())


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize(("size", "at"), [(3, 1), (5000, 1), (5000, 4999)])
def test_it_is_known_of_an_array_whether_all_of_its_elements_are_finite(tmp_path: Path, dtype: str, size: int, at: int) -> None:
    writer = TraceWriter(tmp_path / "host-0", budget=0)
    array = np.full(size, np.finfo(dtype).max)
    assert "finite" not in writer.array(array)  # although the sum of their squares is not
    for value in (np.nan, np.inf, -np.inf):
        array[at] = value
        assert writer.array(array)["finite"] is False
    writer.close()


def test_a_line_without_its_end_is_not_read(tmp_path: Path) -> None:
    trace = _stored(tmp_path, {})
    path = tmp_path / "host-0" / "events.jsonl"
    path.write_text(path.read_text() + '{"event": "step", "optim')
    assert Trace(tmp_path).num_steps == trace.num_steps == 1


def test_another_format_is_refused_with_its_name(tmp_path: Path) -> None:
    Trace.describe(tmp_path, {"topology": "1x1", "format": "other/9"})
    with pytest.raises(ValueError, match=r"A trace has the format gpudist\.trace/1\. Received: .* with 'other/9'\."):
        Trace(tmp_path)


def test_arrays_that_end_too_early_are_refused(tmp_path: Path) -> None:
    entry = {"at": 0, "dtype": "<f4", "shape": [4], "norm": 0.0}
    trace = _stored(tmp_path, {"gradients": {"w": entry}})
    with pytest.raises(ValueError, match=r"A trace's arrays must be complete\. Received: .*arrays\.bin"):
        trace.steps("o")[0][0].gradients["w"].read()


def test_a_loop_without_optimizer_is_named_tape_only_where_there_is_no_optimizer(tmp_path: Path) -> None:
    assert _stored(tmp_path / "a", {"optimizer": "tape"}).optimizers == ["tape"]
    writer = TraceWriter(tmp_path / "b" / "host-0", budget=0)
    Trace.describe(tmp_path / "b", {"topology": "1x1"})
    for name in ("tape", "adam"):
        writer.write({"event": "step", "optimizer": name, "step": 0, "replica": 0})
    writer.close()
    assert Trace(tmp_path / "b").optimizers == ["adam"]


@given(FLOATS)
def test_a_digest_tells_arrays_apart_by_bits_shape_and_type(array: np.ndarray) -> None:
    assert digest(array) == digest(array.copy())
    assert digest(array) != digest(array.reshape(-1, 1, 1, 1))
    assert digest(array) != digest(array.astype(np.float64))
    changed = array.copy()
    changed.reshape(-1)[0] = np.nextafter(changed.reshape(-1)[0], np.float32(np.inf))
    assert digest(array) != digest(changed)


@given(st.integers(1, 64), st.lists(st.integers(65, 99), max_size=1))
def test_the_batch_is_what_shares_the_most_frequent_leading_dimension(rows: int, static: list[int]) -> None:
    dims = dict(enumerate([*static, rows, rows]))
    assert row_positions(dims) == [k for k, number in dims.items() if number == rows]


def test_arrays_keep_their_place_while_another_thread_writes_events(tmp_path: Path) -> None:
    Trace.describe(tmp_path, {"topology": "1x1"})
    writer = TraceWriter(tmp_path / "host-0", budget=1 << 30)
    over = threading.Event()

    def write_events() -> None:
        while not over.is_set():
            writer.write({"event": "note"})

    others = [threading.Thread(target=write_events) for _ in range(2)]
    for other in others:
        other.start()
    entries = []
    for number in range(3000):
        entries.append(writer.array(np.full(10, number, np.float32)))
        if number % 4 == 0:
            writer.write({"event": "note"})
    over.set()
    for other in others:
        other.join()
    writer.close()
    assert [entry["at"] for entry in entries] == [40 * number for number in range(3000)]
