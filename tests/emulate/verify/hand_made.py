"""Three steps by hand, on one device and on four replicas: right, and whatever a test makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulate.verify.case import Case
from tests.emulate.verify.cases import Folder, case_of, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Array

ROWS = [f"row-{k}" for k in range(64)]
LOCALS = np.random.default_rng(0).normal(size=(3, 4, 128)).astype("f4")
"""Local gradients: step, replica, element."""


def weights_after(k: int, gradients: Array = LOCALS) -> Array:
    return np.float32(1) - np.float32(0.1) * gradients[: k + 1].sum(axis=(0, 1), dtype="f4")


def right_reference(made: Made, k: int) -> None:
    made.step(k, {"w": LOCALS[k].sum(axis=0)}, {"w": weights_after(k)}, rows=ROWS[8 * k : 8 * k + 8], objective=1.0)


def right_topology(made: Made, k: int, **changes: Any) -> None:
    for r in range(4):
        rows = ROWS[8 * k + 2 * r : 8 * k + 2 * r + 2]
        made.step(k, {"w": LOCALS[k, r]}, {"w": weights_after(k)}, replica=r, rows=rows, objective=0.25, **changes)


def hand_made(folder: Folder, topology: Any, **options: Any) -> Case:
    return case_of(loop(folder.made(), right_reference), loop(folder.made("1x4"), topology), **options)
