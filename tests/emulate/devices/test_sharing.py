"""What each host of a topology gets of a machine's GPUs: whole ones, disjoint, or slices that fit into their memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.devices import Allotment, Gpu, Inventory, share_out
from emulate.devices.inventory import MIB
from emulate.devices.plan import GPU_RESERVE, LEAST_SLICE, is_short, process_reserve, usable
from emulate.errors import Unavailable
from emulate.topology import Topology
from tests.emulate.devices.made_gpus import gpu, gpus, inventory

TOPOLOGIES = st.builds(Topology, st.integers(1, 6), st.integers(1, 6), st.integers(0, 2))
ANY_GPU = st.builds(
    gpu, st.integers(0, 99), free=st.integers(0, 90_000), name=st.sampled_from(["H100", "L4"]), is_exclusive=st.booleans()
)
MACHINES = st.lists(ANY_GPU, max_size=8, unique_by=lambda one: one.uuid).map(lambda found: inventory(*found))
MIG_MACHINES = st.lists(
    st.builds(gpu, st.integers(0, 99), free=st.integers(0, 40_000), is_part=st.just(True)),
    max_size=7,
    unique_by=lambda one: one.uuid,
).map(lambda found: inventory(*found))


def given_out(machine: Inventory, topology: Topology) -> list[Allotment]:
    """What is given out; empty where it is refused."""
    try:
        return [share_out(machine, topology)]
    except Unavailable:
        return []


def by_uuid(machine: Inventory) -> dict[str, Gpu]:
    return {one.uuid: one for one in machine.gpus}


@given(st.one_of(MACHINES, MIG_MACHINES), TOPOLOGIES)
def test_every_host_that_trains_gets_the_devices_of_its_topology(machine: Inventory, topology: Topology) -> None:
    for allotment in given_out(machine, topology):
        assert [len(share.owners) for share in allotment.hosts] == [topology.num_devices] * topology.num_hosts
    for share in (share for allotment in given_out(machine, topology) for share in allotment.hosts):
        assert set(share.visible) <= by_uuid(machine).keys()
        assert len(set(share.visible)) == len(share.visible)
        assert len(share.owners) == topology.num_devices
        assert set(share.owners) == set(range(len(share.visible)))  # no host sees a GPU that it does not use


@given(MACHINES, TOPOLOGIES)
def test_whole_gpus_belong_to_one_host_each(machine: Inventory, topology: Topology) -> None:
    for allotment in given_out(machine, topology):
        counted = Counter(uuid for share in allotment.hosts for uuid in share.visible)
        assert allotment.is_sliced or len(counted) == topology.num_replicas
        assert allotment.is_sliced or set(counted.values()) == {1}


@given(st.one_of(MACHINES, MIG_MACHINES), TOPOLOGIES)
def test_slices_and_reserves_never_exceed_the_free_memory(machine: Inventory, topology: Topology) -> None:
    used: dict[str, int] = defaultdict(lambda: GPU_RESERVE)
    for share in (share for allotment in given_out(machine, topology) for share in allotment.hosts if share.is_sliced):
        for uuid, slices in zip(share.visible, share.slices, strict=True):
            used[uuid] += process_reserve(by_uuid(machine)[uuid]) + sum(slices) * MIB
            assert all(size * MIB >= LEAST_SLICE for size in slices)
    assert all(size <= by_uuid(machine)[uuid].free for uuid, size in used.items())


@given(MACHINES, TOPOLOGIES)
def test_slices_are_of_one_size_on_gpus_of_one_model(machine: Inventory, topology: Topology) -> None:
    for hosts in (allotment.hosts for allotment in given_out(machine, topology) if allotment.is_sliced):
        assert len({size for share in hosts for slices in share.slices for size in slices}) == 1
        assert len({by_uuid(machine)[uuid].name for share in hosts for uuid in share.visible}) == 1


@given(MACHINES, TOPOLOGIES)
def test_slices_are_made_only_where_whole_gpus_do_not_suffice(machine: Inventory, topology: Topology) -> None:
    enough = usable(machine.gpus)
    assert all(one.is_sliced == (len(enough) < topology.num_replicas) for one in given_out(machine, topology))


@given(MIG_MACHINES, TOPOLOGIES)
def test_a_host_sees_one_mig_instance_because_cuda_shows_no_more(machine: Inventory, topology: Topology) -> None:
    for allotment in given_out(machine, topology):
        assert all(len(share.visible) == 1 for share in allotment.hosts)


@given(MACHINES, TOPOLOGIES)
def test_a_gpu_more_never_makes_a_topology_impossible(machine: Inventory, topology: Topology) -> None:
    more = inventory(*machine.gpus, gpu(1000))
    assert len(given_out(machine, topology)) <= len(given_out(more, topology))


def test_four_whole_gpus_make_two_hosts_with_two_each() -> None:
    allotment = share_out(gpus(4), Topology(2, 2))
    assert [share.visible for share in allotment.hosts] == [("GPU-0000", "GPU-0001"), ("GPU-0002", "GPU-0003")]
    assert allotment.text == "2x2 ran on 4 GPUs (H100), one for each device."


def test_one_gpu_is_sliced_for_two_hosts_and_nccl_is_said_not_to_run() -> None:
    allotment = share_out(gpus(1, free=80_000), Topology(2, 2))
    size = (80_000 - 256 - 2 * 2048) // 4
    assert [share.slices for share in allotment.hosts] == [((size, size),), ((size, size),)]
    assert allotment.text == (
        "2x2 ran on 1 GPU (H100) in 4 slices of 18.5 GiB, one for each device: NCCL, which refuses two ranks on one GPU, "
        "is not what ran, and times say nothing."
    )


def test_two_gpus_give_each_of_two_hosts_one_to_slice() -> None:
    first, second = share_out(gpus(2), Topology(2, 2)).hosts
    assert (first.visible, second.visible) == (("GPU-0000",), ("GPU-0001",))
    assert first.owners == second.owners == (0, 0)


def test_a_host_may_have_slices_of_two_gpus() -> None:
    [share] = share_out(gpus(2), Topology(1, 3)).hosts
    assert share.visible == ("GPU-0000", "GPU-0001")
    assert share.owners == (0, 0, 1)


def test_busy_gpus_are_left_alone_where_others_suffice() -> None:
    machine = inventory(gpu(0, free=100), gpu(1, free=70_000), gpu(2))
    assert share_out(machine, Topology(1, 2)).hosts[0].visible == ("GPU-0001", "GPU-0002")


def test_gpus_of_one_model_are_preferred_and_a_mixture_is_said() -> None:
    machine = inventory(gpu(0, name="L4", free=20_000), gpu(1), gpu(2))
    assert share_out(machine, Topology(1, 2)).hosts[0].visible == ("GPU-0001", "GPU-0002")
    mixed = share_out(machine, Topology(1, 3))
    assert not mixed.is_sliced
    assert (
        mixed.text == "1x3 ran on 3 GPUs (L4, H100), one for each device. They are of several models, which round differently."
    )


def test_mig_instances_are_left_out_where_a_host_has_several_devices() -> None:
    machine = inventory(*(gpu(index) for index in range(4)), gpu(8, is_part=True), gpu(9, is_part=True))
    for topology in (Topology(1, 2), Topology(1, 4), Topology(2, 2)):
        allotment = share_out(machine, topology)
        assert not allotment.is_sliced
        assert not {"GPU-0008", "GPU-0009"} & {uuid for share in allotment.hosts for uuid in share.visible}
        assert not any(share.may_share_gpus for share in allotment.hosts)


def test_hosts_on_mig_instances_have_one_each_and_nccl_is_said_not_to_run() -> None:
    parts = inventory(gpu(0, name="H100 (MIG)", is_part=True), gpu(1, name="H100 (MIG)", is_part=True))
    allotment = share_out(parts, Topology(2, 1))
    assert not allotment.is_sliced
    assert all(share.may_share_gpus for share in allotment.hosts)
    assert allotment.text == (
        "2x1 ran on 2 GPUs (H100 (MIG)), one for each device: NCCL, which refuses two ranks on one GPU, is not what ran."
    )
    assert "NCCL" not in share_out(parts, Topology(1, 1)).text


def test_a_host_on_a_whole_gpu_does_without_nccl_where_another_has_a_mig_instance() -> None:
    mixed = share_out(inventory(gpu(0), gpu(1, name="H100 (MIG)", is_part=True)), Topology(2, 1))
    assert [share.may_share_gpus for share in mixed.hosts] == [True, True]


def test_gpus_that_others_fill_are_left_alone_though_there_are_more_of_them() -> None:
    machine = inventory(*(gpu(index, name="L4", free=40_000) for index in range(4)), gpu(8), gpu(9))
    assert share_out(machine, Topology(1, 2)).hosts[0].visible == ("GPU-0008", "GPU-0009")
    assert share_out(machine, Topology(1, 4)).hosts[0].visible == ("GPU-0000", "GPU-0001", "GPU-0002", "GPU-0003")


@given(st.one_of(MACHINES, MIG_MACHINES), TOPOLOGIES)
def test_a_topology_is_short_where_memory_in_use_keeps_it_from_what_it_would_have(
    machine: Inventory, topology: Topology
) -> None:
    now, idle = given_out(machine, topology), given_out(machine.idle(), topology)
    would_be_better = bool(idle) and (not now or (now[0].is_sliced and not idle[0].is_sliced))
    assert is_short(machine, topology) == would_be_better


def test_a_chief_and_parameter_servers_need_no_gpu() -> None:
    assert len(share_out(gpus(2), Topology(2, 1, 2)).hosts) == 2


def test_a_gpu_that_takes_one_process_is_sliced_within_a_host_and_not_between_hosts() -> None:
    one = inventory(gpu(0, is_exclusive=True))
    assert share_out(one, Topology(1, 4)).is_sliced
    with pytest.raises(Unavailable, match=r"this machine has 1 GPU \(H100 with 80000 MiB free, for one process at a time\)"):
        share_out(one, Topology(2, 1))
    two = inventory(gpu(0, is_exclusive=True), gpu(1, is_exclusive=True))
    assert [share.visible for share in share_out(two, Topology(2, 2)).hosts] == [("GPU-0000",), ("GPU-0001",)]


@pytest.mark.parametrize(("total", "reserved"), [(6_000, 768), (24_000, 1_200), (81_559, 2_048), (143_771, 2_048)])
def test_cudas_libraries_have_their_own_beside_every_slice(total: int, reserved: int) -> None:
    one = replace(gpu(), total=total * MIB, free=total * MIB)
    assert process_reserve(one) == reserved * MIB
    [share] = share_out(inventory(one), Topology(1, 2)).hosts
    assert total - sum(share.slices[0]) >= reserved + 256


def test_too_little_memory_is_unavailable_with_the_numbers() -> None:
    with pytest.raises(Unavailable) as caught:
        share_out(inventory(gpu(0, free=1_500)), Topology(1, 8))
    assert str(caught.value) == (
        "Each device is a GPU, or a slice of one with at least 256 MiB beside 256 MiB and, by the GPU's size, 768 to 2048 MiB "
        "for each process. Received: device='gpu', topology='1x8' with 8 devices, where this machine has 1 GPU (H100 with 1500 "
        "MiB free). "
        "Ask for fewer devices, free the GPUs, or use --device cpu."
    )


def test_a_gpu_that_is_left_out_is_named_where_the_others_do_not_suffice() -> None:
    machine = replace(inventory(gpu(0, free=1_500)), left_out=("GPU 3 (lost)",))
    with pytest.raises(Unavailable, match=r"this machine has 1 GPU \(H100 with 1500 MiB free; left out: GPU 3 \(lost\)\)\."):
        share_out(machine, Topology(1, 8))


def test_no_gpu_is_unavailable_with_the_reason() -> None:
    with pytest.raises(Unavailable, match=r"this machine has no GPU \(no NVIDIA driver answers: not found\)"):
        share_out(Inventory(why="no NVIDIA driver answers: not found"), Topology(1, 1))
