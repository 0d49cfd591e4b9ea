from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.plan import (
    LOCAL_SERVERS,
    SERVERS,
    BandwidthTable,
    Ring,
    StepModel,
    Work,
    all_reduce_seconds,
    find_machine,
    parse_between,
    parse_inside,
)
from emulate.plan.model import draws, expected_largest

RESNET = Work(step_seconds=0.3, batch=128, gradient_bytes=102.4e6)
CUBE = parse_inside("NVLink 2 hybrid cube mesh", "V100", 8)
sizes = st.floats(1e3, 1e10)


@given(sizes, sizes)
def test_interpolation_stays_between_the_points_and_rises_with_them(first: float, second: float) -> None:
    table = BandwidthTable(8, ((1e5, 5.0), (1e6, 40.0), (1e8, 400.0)))
    low, high = sorted((first, second))
    assert table.bus_gb_per_s(low) <= table.bus_gb_per_s(high) * (1 + 1e-12)
    assert table.bus_gb_per_s(high) <= 400


def test_interpolation_meets_the_points_and_is_straight_between_logarithms() -> None:
    table = BandwidthTable(8, ((1e5, 4.0), (1e7, 400.0)))
    assert [table.bus_gb_per_s(size) for size in (1e5, 1e6, 1e7, 1e9)] == pytest.approx([4, 40, 400, 400])
    assert 1e4 / table.bus_gb_per_s(1e4) == pytest.approx(1e5 / table.bus_gb_per_s(1e5)), "the time stays below the smallest"


def test_a_large_all_reduce_takes_what_the_ring_formula_says() -> None:
    latency, transfer = all_reduce_seconds(Ring(8, 1, CUBE, None), 1e9)
    assert transfer == pytest.approx(2 * 7 / 8 * 1e9 / 120e9)
    assert latency == pytest.approx((8.4 + 14 * 3.4) / 1e6)


@given(st.floats(1e3, 1e9), st.sampled_from([2, 4, 8]))
def test_a_longer_message_never_takes_less_time(size: float, num_gpus: int) -> None:
    ring = Ring(num_gpus, 1, CUBE, None)
    assert sum(all_reduce_seconds(ring, size)) <= sum(all_reduce_seconds(ring, 2 * size))


def test_many_hosts_use_a_tree_whose_latency_grows_with_the_logarithm() -> None:
    network = parse_between("8 x 200 Gb/s InfiniBand")
    times = [sum(all_reduce_seconds(Ring(8 * hosts, hosts, CUBE, network), 1e4)) for hosts in (16, 256, 4096)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-6)


def test_a_measured_table_is_preferred_to_the_formula() -> None:
    h200 = find_machine("dgx-h200")
    size = 134217728.0
    assert sum(all_reduce_seconds(h200.ring(8), size)) == pytest.approx(2 * 7 / 8 * size / 401.93e9)


def test_one_gpu_takes_what_was_measured() -> None:
    estimate = StepModel(find_machine("dgx1-v100"), RESNET).step_seconds(1)
    assert estimate.middle == pytest.approx(0.3, rel=1e-3)
    assert estimate.low > 0.27


@given(st.sampled_from([1, 2, 4, 8, 16, 64, 1024, 100_000]))
def test_more_gpus_never_make_a_faster_step_and_the_interval_has_its_middle_inside(count: int) -> None:
    model = StepModel(find_machine("dgx-a100"), RESNET)
    estimate = model.step_seconds(count)
    assert estimate.low < estimate.middle < estimate.high
    assert estimate.middle >= model.step_seconds(1).middle


@pytest.mark.parametrize("exchange", [LOCAL_SERVERS, SERVERS])
def test_servers_are_predicted_too(exchange: str) -> None:
    work = Work(0.3, 64, 102.4e6, exchange)
    model = StepModel(find_machine("p2.8xlarge"), work)
    assert 0.3 < model.step_seconds(8).middle < 0.6


@pytest.mark.parametrize(("machine", "seconds"), [("dgx1-v100", 0.45), ("rtx3090x8", 0.38)])
def test_a_second_measurement_narrows_the_interval_and_moves_it_there(machine: str, seconds: float) -> None:
    model = StepModel(find_machine(machine), RESNET)
    learned = model.learn(4, seconds)
    before, after = model.step_seconds(8), learned.step_seconds(8)
    assert after.high / after.low < before.high / before.low
    assert after.middle > before.middle
    assert learned.step_seconds(4).middle == pytest.approx(seconds, rel=0.08)


def test_a_slow_surprise_on_one_socket_leaves_two_sockets_uncertain() -> None:
    model = StepModel(find_machine("rtx3090x8"), RESNET)
    before, after = model.step_seconds(8), model.learn(4, 0.45).step_seconds(8)
    assert after.high / after.low > before.high / before.low
    assert after.middle > before.middle
    assert model.learn(4, 0.45).step_seconds(4).middle == pytest.approx(0.45, rel=0.08)


def test_a_measurement_that_fits_nothing_leaves_numbers() -> None:
    estimate = StepModel(find_machine("dgx1-v100"), RESNET).learn(8, 300.0).step_seconds(8)
    assert np.isfinite([estimate.low, estimate.middle, estimate.high]).all()


def test_an_unmeasured_gpu_gives_a_wide_interval() -> None:
    measured = StepModel(find_machine("dgx1-v100"), RESNET).step_seconds(8)
    guessed = StepModel(find_machine("dgx1-v100"), Work(0.3, 128, 102.4e6, is_measured=False)).step_seconds(8)
    assert guessed.high / guessed.low > 3 > measured.high / measured.low


def test_input_that_is_too_slow_decides() -> None:
    model = StepModel(find_machine("dgx1-v100"), Work(0.3, 128, 102.4e6, input_per_second=1000.0))
    assert model.step_seconds(8).middle == pytest.approx(128 * 8 / 1000, rel=0.01)


def test_larger_batches_hide_the_communication() -> None:
    model = StepModel(find_machine("rtx3090x8"), RESNET)

    def efficiency(batch: float) -> float:
        return batch / 128 * 0.3 / model.at_batch(batch).step_seconds(8).middle

    assert efficiency(512) > efficiency(128) > efficiency(32)


def test_gradients_that_are_sent_early_hide_behind_the_backward_pass() -> None:
    late = StepModel(find_machine("p3.16xlarge"), RESNET)
    early = StepModel(find_machine("p3.16xlarge"), replace(RESNET, sends_early=True))
    assert early.exposed_seconds(64).middle < 0.7 * late.exposed_seconds(64).middle


def test_the_draws_are_even_and_the_same_each_time() -> None:
    assert np.median(draws().straggling) == pytest.approx(0.02, rel=0.01)
    assert abs(np.corrcoef(draws().bandwidth, draws().latency)[0, 1]) < 0.02
    assert expected_largest(1) == 0
    assert expected_largest(2) == pytest.approx(0.5642, abs=0.03)  # 1/sqrt(pi)
