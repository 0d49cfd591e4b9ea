"""A plan that cannot be meant is refused in words."""

from __future__ import annotations

import pytest

from emulate.devices import ALL_REDUCE, DevicePlan
from emulate.errors import UsageError


@pytest.mark.parametrize("all_reduce", ALL_REDUCE)
def test_every_all_reduce_makes_a_plan(all_reduce: str) -> None:
    assert DevicePlan(2, all_reduce=all_reduce).all_reduce == all_reduce


def test_a_host_without_devices_is_refused() -> None:
    with pytest.raises(UsageError, match=r"A host has at least one device. Received: num_devices=0. Ask for 1 or more."):
        DevicePlan(0)


def test_an_unknown_all_reduce_is_refused() -> None:
    text = r"The all-reduce is one of auto, ring, hierarchical, one-device. Received: all_reduce='tree'. Choose one of them."
    with pytest.raises(UsageError, match=text):
        DevicePlan(1, all_reduce="tree")
