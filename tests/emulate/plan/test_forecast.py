from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan_accuracy import DATA, model_of, read
from emulate.errors import UsageError
from emulate.plan import (
    Forecast,
    Gradient,
    InputRate,
    Measured,
    Recorded,
    StepMemory,
    find_machine,
    make_forecast,
    parse_measured,
    parse_rate,
    read_recorded,
)
from emulate.plan.forecast import USUAL_UTILISATION
from emulate.report import show_plan
from emulate.trace import Trace, TraceWriter

RESNET = Recorded("train.py", 25_600_000, 64, tuple(Gradient(f"g{i}", 160_000, 640_000) for i in range(160)), flops=64 * 24.6e9)
ONE = "1: 300 examples/s at batch 64"


def forecast(*points: str, machine: str = "p3.16xlarge", recorded: Recorded = RESNET, rate: float | None = None) -> Forecast:
    return make_forecast(recorded, find_machine(machine), parse_measured(points), input_per_second=rate)


@given(st.integers(1, 100_000), st.integers(1, 10**7), st.none() | st.integers(1, 4096))
def test_a_measurement_is_read_as_it_is_written(num_gpus: int, rate: int, batch: int | None) -> None:
    point = Measured(num_gpus, rate / 8, batch)
    at_batch = "" if batch is None else f" at batch {batch}"
    assert parse_measured([f"{num_gpus}: {rate / 8:f} examples/s{at_batch}"]) == (point,)


def test_measurements_come_by_number_of_gpus() -> None:
    texts = ["8: 1485 examples/s at batch 32", "1:195 examples/s"]
    assert parse_measured(texts) == (Measured(1, 195.0), Measured(8, 1485.0, 32))


@pytest.mark.parametrize(
    "text", ["195", "1: examples/s", "0: 195 examples/s", "1: 0 examples/s", "1: 195 examples/s at batch 00", ""]
)
def test_a_measurement_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_measured([text])
    assert f"Received: --measured {text!r}. N is the number of GPUs" in str(error.value)


def test_two_measurements_of_one_number_of_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match=r"once for each number of GPUs. Received: '1: 195 examples/s' and '1: 200"):
        parse_measured(["1: 195 examples/s", "1: 200 examples/s"])


def test_a_rate_of_another_form_is_refused() -> None:
    assert parse_rate("5000 examples/s") == 5000
    with pytest.raises(UsageError, match=r"Received: --input-rate 'fast'\. Example: "):
        parse_rate("fast")


def test_a_measured_gpu_is_predicted_as_it_was_measured_and_the_rest_follows() -> None:
    rows = forecast(ONE).rows
    assert rows[0].examples_per_second.middle == pytest.approx(300, rel=0.01)
    assert [row.num_gpus for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 100_000]
    assert rows[3].num_hosts == 1
    assert rows[4].num_hosts == 2
    assert all(row.examples_per_second.low < row.examples_per_second.middle < row.examples_per_second.high for row in rows)
    assert rows[3].efficiency.middle > 0.9 > rows[4].efficiency.middle
    assert (rows[3].limit, rows[4].limit) == ("compute", "communication")


def test_the_batch_for_90_percent_reaches_it_and_one_less_does_not() -> None:
    machine = find_machine("p3.16xlarge")
    row = next(row for row in forecast(ONE).rows if row.num_gpus == 64)
    assert row.batch_for_efficiency is not None

    def efficiency(batch: int) -> float:
        scaled = replace(RESNET, batch=batch)
        return make_forecast(scaled, machine, parse_measured(["1: 300 examples/s"]), counts=[64]).rows[0].efficiency.middle

    assert efficiency(row.batch_for_efficiency) >= 0.9 > efficiency(row.batch_for_efficiency - 1)


def test_a_step_of_a_small_model_takes_as_long_as_its_launches() -> None:
    found = forecast(recorded=replace(RESNET, flops=1e6, kernels=500))
    assert found.rows[0].examples_per_second.middle == pytest.approx(64 / 5e-3, rel=0.02)
    assert any("500 kernels of 10 microseconds" in text for text in found.basis)
    assert found.rows[3].batch_for_efficiency is not None


def test_time_and_price_follow_from_speed() -> None:
    row = forecast(ONE).rows[3]
    assert row.dollars is not None
    assert row.hours.middle == pytest.approx(1_000_000 / row.examples_per_second.middle / 3600)
    assert row.dollars.middle == pytest.approx(row.hours.middle * 24.48)
    assert forecast(ONE, machine="dgx1-v100").rows[0].dollars is None


def test_without_a_measurement_the_interval_is_wide_and_says_so() -> None:
    guessed, measured = forecast(), forecast(ONE)
    at_eight = guessed.rows[3].examples_per_second
    assert at_eight.high / at_eight.low > 4
    assert any("NOT measured" in text and "30% of the float32 peak of V100" in text for text in guessed.basis)
    assert any("add --measured" in text for text in measured.basis)


def test_a_second_point_narrows_the_interval_and_says_what_it_bought() -> None:
    found = forecast(ONE, "8: 2200 examples/s at batch 64")
    was, now = forecast(ONE).rows[3].examples_per_second, found.rows[3].examples_per_second
    assert now.high / now.low < was.high / was.low
    assert any("At 8 GPUs this narrowed the interval from a factor of 1.4" in text for text in found.basis)


def test_a_point_at_another_batch_counts_too() -> None:
    slow = forecast(ONE, "8: 1500 examples/s at batch 16").rows[3].examples_per_second.middle
    fast = forecast(ONE, "8: 2300 examples/s at batch 16").rows[3].examples_per_second.middle
    assert slow < fast


def test_input_that_is_too_slow_is_told() -> None:
    found = forecast(ONE, rate=1000.0)
    assert [row.limit for row in found.rows[:4]] == ["compute", "compute", "input", "input"]
    stream = io.StringIO()
    show_plan(found, stream)
    assert "Input limits: more GPUs do not help." in stream.getvalue()


def test_the_measured_input_limits_unless_a_rate_is_given() -> None:
    slow = replace(RESNET, input_rate=InputRate(1000.0, cores=2))
    measured, given = forecast(ONE, recorded=slow), forecast(ONE, recorded=slow, rate=1e6)
    assert [row.limit for row in measured.rows[:4]] == ["compute", "compute", "input", "input"]
    assert any(
        "Input: 1,000 examples/s for each host, measured on this machine with 2 CPU cores." in text for text in measured.basis
    )
    assert "input" not in {row.limit for row in given.rows}
    assert any("Input: 1,000,000 examples/s for each host (--input-rate)." in text for text in given.basis)
    assert (measured.to_json()["input_per_second"], given.to_json()["input_per_second"]) == (1000.0, 1e6)


def test_an_input_that_was_not_measured_is_said() -> None:
    found = forecast(ONE, recorded=replace(RESNET, input_rate="it has one batch"))
    assert any("Input: NOT measured: it has one batch. The forecast has no limit by input." in text for text in found.basis)
    assert found.to_json()["input_per_second"] is None


def test_the_memory_is_that_of_the_machine_unless_another_is_given() -> None:
    step = StepMemory(100e6, 200e6, 0.0, (0.0, 1e6), ((0.0, 200e6, 200e6),), ((0.0, 200e6, 200e6),))
    recorded = replace(RESNET, memory=step)
    small = make_forecast(recorded, find_machine("p3.16xlarge"), parse_measured([ONE]), memory=8e9)
    stream = io.StringIO()
    show_plan(forecast(ONE, recorded=recorded), stream)
    show_plan(small, stream)
    text = " ".join(stream.getvalue().split())
    assert "Fits in 16 GB: yes. The largest batch that fits is 77." in text
    assert "Fits in 8 GB: no. It would with batch 38, or bfloat16 (keras.mixed_precision, 6.88 GB)" in text
    assert small.to_json()["memory"]["fits"] is False
    assert json.loads(json.dumps(small.to_json(), allow_nan=False))["memory"]["largest_batch"] == 38


def test_memory_that_is_not_known_is_said() -> None:
    stream = io.StringIO()
    show_plan(forecast(ONE), stream)
    assert "Memory: not known, because the graph of the step is not known." in stream.getvalue()


@pytest.mark.parametrize(
    ("recorded", "machine", "why"),
    [
        (replace(RESNET, flops=None), "dgx1-v100", "the graph of its step is not known"),
        (RESNET, "unknown", "the speed of 'Odd 9' is not known"),
    ],
)
def test_where_the_speed_of_one_gpu_is_unknown_a_measurement_is_asked_for(
    recorded: Recorded, machine: str, why: str, tmp_path: Path
) -> None:
    odd = tmp_path / "odd.toml"
    odd.write_text('gpu = "Odd 9"\ngpus_per_host = 1\n')
    with pytest.raises(UsageError) as error:
        forecast(recorded=recorded, machine=str(odd) if machine == "unknown" else machine)
    assert f"{why}. Measure one GPU and give it: --measured '1: X examples/s at batch B'." in str(error.value)


def test_the_json_is_strict_and_has_the_collectives() -> None:
    content = json.loads(json.dumps(forecast(ONE).to_json(), allow_nan=False))
    assert content["schema"] == "gpudist.plan/1"
    assert content["collectives"] == [{"kind": "all-reduce", "bytes": 102_400_000, "gradients": 160}]
    assert content["rows"][3]["num_gpus"] == 8


def test_sparse_gradients_are_gathered_and_cost_more_with_each_gpu() -> None:
    table = Gradient("table", 10**6, 4 * 10**6, is_sparse=True)
    found = forecast(ONE, recorded=replace(RESNET, gradients=(*RESNET.gradients, table)))
    assert found.to_json()["collectives"][1] == {"kind": "all-gather", "bytes": 4 * 10**6, "gradients": 1}
    dense = forecast(ONE)
    more = [
        one.communication_seconds.middle - other.communication_seconds.middle
        for one, other in zip(found.rows, dense.rows, strict=True)
    ]
    assert more[-1] > 50 * more[7] > 50 * more[4] > 0


def test_the_usual_utilisation_is_that_of_the_public_measurements() -> None:
    names = {"fp32": "float32", "tf32": "tf32", "amp": "float16", "fp16": "float16"}
    shares = []
    for group in read(DATA):
        row = group[0]
        if row["model"] == "resnet50" and int(row["batch_per_gpu"]) >= 64:
            tflops = dict(model_of(row).machine.tflops)[names[row["dtype"]]]
            shares.append(24.6e9 * float(row["examples_per_second"]) / tflops / 1e12)
    assert 0.1 < min(shares) < max(shares) < 0.7
    assert np.exp(np.mean(np.log(shares))) == pytest.approx(USUAL_UTILISATION, abs=0.06)


def test_the_table_has_a_line_for_each_number_of_gpus() -> None:
    stream = io.StringIO()
    show_plan(forecast(ONE), stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train.py on p3.16xlarge  V100, 8 a host"
    assert lines[1] == "batch 64 on each GPU, 25,600,000 parameters"
    assert lines[3].startswith("   GPUs   hosts")
    assert lines[3].endswith("batch for 90 %")
    assert lines[4].split()[:3] == ["1", "1", "300"]
    assert lines[18].split()[0] == "100,000"
    assert max(map(len, lines)) <= 120


def write_trace(folder: Path, *, rows: list[str] | None, event: dict[str, object] | None = None) -> Trace:
    Trace.describe(folder, {"topology": "1x1", "program": "train.py"})
    writer = TraceWriter(folder / "host-0", budget=1 << 20)
    gradients = {
        "kernel": writer.array(np.ones((3, 4), np.float32)),
        "bias": writer.array(np.ones(4, np.float16)),
        "table": writer.array(np.ones((2, 3), np.float32), rows=np.array([1, 7])),
    }
    step = {"event": "step", "optimizer": "adam", "step": 0, "replica": 0, "rows": rows, "gradients": gradients}
    writer.write({**step, "inputs": [], "weights": {}})
    shapes = {"kernel": (3, 4), "bias": (4,), "table": (7, 8), "moving_mean": (9,)}
    arrays = {name: writer.array(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
    variables = {name: {"digest": "d", "array": array} for name, array in arrays.items()}
    writer.write({"event": "initial", "replica": 0, "variables": variables})
    writer.write({"event": "program", "float16": ["kernel"]})
    writer.write(event or {"event": "input", "failure": "it has one batch"})
    writer.close()
    return Trace(folder)


def test_a_recorded_run_gives_batch_gradients_and_operations(tmp_path: Path) -> None:
    operations = tmp_path / "operations.json"
    operations.write_text('{"flops": 96.0, "kernels": 9, "uncounted": ["While"]}')
    found = read_recorded(write_trace(tmp_path / "trace", rows=["a", "b"]), operations)
    assert found.batch == 2
    assert found.gradients == (Gradient("kernel", 12, 48), Gradient("bias", 4, 8), Gradient("table", 6, 40, is_sparse=True))
    assert (found.parameters, found.gradient_bytes, found.gathered_bytes) == (72, 56, 40)
    assert (found.flops, found.kernels, found.uncounted) == (96.0, 9, ("While",))
    assert found.in_16_bits
    assert found.input_rate == "it has one batch"


@pytest.mark.parametrize(
    ("first", "rate"),
    [(2, 30 / 0.5), (1, 20 * 2 / 0.5)],  # an element that is one example alone: the program makes batches of them
)
def test_the_time_of_the_input_gives_a_rate(tmp_path: Path, first: int, rate: float) -> None:
    event = {"event": "input", "first": first, "elements": 20, "examples": 30, "seconds": 0.5, "cores": 2}
    trace = write_trace(tmp_path / "trace", rows=["a", "b"], event=event)
    assert read_recorded(trace, tmp_path / "none.json").input_rate == InputRate(rate, 2)


def test_an_unknown_batch_is_asked_for(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", rows=None)
    with pytest.raises(UsageError, match=r"The batch must be known. Received: program='train.py', .* Give --batch"):
        read_recorded(trace, tmp_path / "none.json")
    assert read_recorded(trace, tmp_path / "none.json", batch=7).batch == 7


def test_a_program_that_does_not_train_is_refused(tmp_path: Path) -> None:
    Trace.describe(tmp_path / "trace", {"topology": "1x1", "program": "train.py"})
    with pytest.raises(UsageError, match=r"A program to plan must train. Received: program='train.py', without a step"):
        read_recorded(Trace(tmp_path / "trace"), tmp_path / "none.json")
