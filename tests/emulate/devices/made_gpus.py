"""Inventories that were made up."""

from __future__ import annotations

from typing import Any

from emulate.devices import Gpu, Inventory
from emulate.devices.inventory import MIB


def gpu(index: int = 0, *, free: int = 80_000, name: str = "H100", **options: Any) -> Gpu:
    """One with so many MiB free."""
    return Gpu(index, f"GPU-{index:04x}", name, 81_920 * MIB, free * MIB, (9, 0), **options)


def inventory(*gpus: Gpu) -> Inventory:
    return Inventory(gpus, "570.1")


def gpus(number: int, **options: Any) -> Inventory:
    return inventory(*(gpu(index, **options) for index in range(number)))
