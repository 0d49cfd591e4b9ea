from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.errors import UsageError
from emulate.plan import find_machine, machine_of, parse_between, parse_inside
from emulate.plan.machines import _CATALOGUE, _read


@pytest.mark.parametrize(
    ("text", "gpu", "num_gpus", "expected"),
    [
        ("NVLink 1 hybrid cube mesh", "P100 16GB", 8, 72.0),
        ("NVLink 1 hybrid cube mesh", "P100 16GB", 2, 18.0),
        ("NVLink 2 hybrid cube mesh", "V100 16GB", 8, 120.0),
        ("NVSwitch, NVLink 3", "A100 80GB", 2, 240.0),
        ("NVSwitch", "H100 80GB", 8, 18 * 20.6),
        ("PCIe 3.0 x16", "K80", 8, 12.0),
        ("PCIe 4.0 x8", "A10G", 4, 12.0),
        ("PCIe 4.0 x16, two sockets, no NVLink, no P2P", "RTX 3090 24GB", 2, 6.3),
        ("PCIe 4.0 x16, two sockets, no NVLink, no P2P", "RTX 3090 24GB", 4, 3.15),
        ("PCIe 4.0 x16, two sockets, no NVLink, no P2P", "RTX 3090 24GB", 8, 1.575),
        ("PCIe 4.0 x16, NVLink bridge", "RTX 3090 24GB", 2, 48.0),
    ],
)
def test_links_inside_a_host_have_the_bandwidth_that_nccl_gives_them(
    text: str, gpu: str, num_gpus: int, expected: float
) -> None:
    assert parse_inside(text, gpu, 8).bus_gb_per_s(num_gpus) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "gbit", "spread"),
    [
        ("25 Gb/s Ethernet", 25, 1),
        ("up to 10 Gb/s Ethernet", 10, 1),
        ("10 to 25 Gb/s Ethernet", 250**0.5, 2.5**0.5),
        ("8 x 200 Gb/s InfiniBand", 1600, 1),
        ("100GbE", 100, 1),
        ("EDR InfiniBand", 100, 1),
        ("4 x HDR InfiniBand", 800, 1),
        ("12.5 GB/s", 100, 1),
    ],
)
def test_networks_are_read_with_their_cards_and_their_range(text: str, gbit: float, spread: float) -> None:
    between = parse_between(text)
    assert between.gb_per_s == pytest.approx(gbit / 8 * 0.96)
    assert between.spread == pytest.approx(spread)


@given(st.integers(1, 800), st.integers(1, 32))
def test_more_cards_or_faster_ones_never_make_a_slower_network(speed: int, cards: int) -> None:
    assert parse_between(f"{cards} x {speed} Gb/s").gb_per_s == pytest.approx(cards * parse_between(f"{speed} Gb/s").gb_per_s)


@given(st.integers(2, 16))
def test_a_shared_host_bridge_never_gets_faster_with_more_gpus(num_gpus: int) -> None:
    inside = parse_inside("PCIe 3.0 x16, two sockets, no P2P", "T4", 16)
    assert inside.bus_gb_per_s(num_gpus + 1) <= inside.bus_gb_per_s(num_gpus)


@pytest.mark.parametrize("name", list(_read(_CATALOGUE)["machine"]))
def test_every_machine_of_the_catalogue_can_be_read_and_has_a_source(name: str) -> None:
    machine = find_machine(name)
    assert machine.source
    assert dict(machine.tflops)["float32"] > 1


def test_the_guide_lists_the_catalogue() -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "plan.md").read_text()
    assert [name for name in _read(_CATALOGUE)["machine"] if f"`{name}`" not in guide] == []


def test_a_file_of_ones_own_describes_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text('gpu = "RTX 4090"\ngpus_per_host = 2\nlink_inside = "PCIe 4.0 x16"\ndollars_per_hour = 1.5\n')
    machine = find_machine(str(file))
    assert (machine.name, machine.gpus_per_host, machine.dollars_per_hour) == ("lab", 2, 1.5)
    assert machine.inside is not None
    assert not machine.inside.peer_to_peer


ENTRY = {"gpu": "V100", "gpus_per_host": 8, "link_inside": "NVLink 2 hybrid cube mesh"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": None}, "gpu must be a text. Received: machine='m', gpu=None."),
        ({"gpus_per_host": 0}, "gpus_per_host must be a whole number >= 1. Received: machine='m', gpus_per_host=0."),
        ({"link_between": 25}, "link_between must be a text. Received: machine='m', link_between=25."),
        ({"tflops": 20}, "tflops must be a table of numbers > 0 by dtype. Received: machine='m', tflops=20."),
        ({"tflops": {"float32": "fast"}}, "tflops must be a table of numbers > 0 by dtype."),
        (
            {"link_inside": ""},
            "link_inside must be given for a host with several GPUs. Received: machine='m', gpus_per_host=8",
        ),
        ({"link_inside": "wires"}, "link_inside must name NVLink, NVSwitch or PCIe. Received: link_inside='wires'."),
        ({"link_inside": "NVLink 9"}, "NVLink must have a generation of 1 to 5. Received: link_inside='NVLink 9', gpu='V100'."),
        ({"link_between": "fast"}, "link_between must give a bandwidth. Received: link_between='fast'."),
        ({"dollars_per_hour": -1}, "dollars_per_hour must be a number >= 0. Received: machine='m', dollars_per_hour=-1."),
        ({"cost": 3}, "A machine's keys must be known. Received: machine='m', key='cost'. Possible keys: gpu, "),
        ({"all_reduce_tables": ["x"]}, "all_reduce_tables must name tables of gpudist. Received: all_reduce_tables='x'."),
    ],
)
def test_what_is_wrong_with_a_machine_is_said(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        machine_of("m", ENTRY | changes)
    assert message in str(error.value)


def test_an_unknown_machine_is_told_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"Received: --on 'dgx-a10'. Did you mean 'dgx-a100'\? Machines: dgx1-p100, "):
        find_machine("dgx-a10")


def test_a_file_that_is_not_there_or_not_toml_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--on must name a machine or an existing file"):
        find_machine("nowhere.toml")
    (tmp_path / "bad.toml").write_text("gpu = ")
    with pytest.raises(UsageError, match=r"A machine's file must be valid TOML. Received: "):
        find_machine(str(tmp_path / "bad.toml"))


def test_several_hosts_need_a_network() -> None:
    with pytest.raises(UsageError, match=r"Several hosts need a network. Received: machine='rtx3090x8', gpus=16"):
        find_machine("rtx3090x8").ring(16)
