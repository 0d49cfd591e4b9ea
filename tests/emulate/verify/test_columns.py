"""Examples that each host has scaled or shifted by numbers of its own are told from examples that differ otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulate.trace import Trace
from emulate.verify.ledgers import shifted_columns
from tests.emulate.verify.cases import Folder
from tests.emulate.verify.simulation import Array

STEPS, BATCH, HOSTS = 2, 8, 2
WHOLE = np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)).astype("f4")
Change = Callable[[int, Array], Array]


def trained(folder: Folder, shares: list[list[Array]]) -> Trace:
    """A run in which host `h` has the rows `shares[step][h]`."""
    made = folder.made(f"{len(shares[0])}x1")
    for k, of_step in enumerate(shares):
        for host, rows in enumerate(of_step):
            made.step(k, {"w": np.ones(2)}, {"w": np.ones(2)}, replica=host, host=host, rows=["r"] * len(rows), inputs=[rows])
    return made.trace()


def told(folder: Folder, change: Change, *, dealt: bool = True) -> str | None:
    parts = [[step[h::HOSTS] if dealt else np.split(step, HOSTS)[h] for h in range(HOSTS)] for step in WHOLE]
    ours = [[change(host, rows).astype("f4") for host, rows in enumerate(of_step)] for of_step in parts]
    return shifted_columns(trained(folder, [[step] for step in WHOLE]), trained(folder, ours))


@pytest.mark.parametrize("dealt", [True, False], ids=["every second row", "neighbors"])
def test_what_each_host_subtracts_and_divides_by_is_told(folder: Folder, dealt: bool) -> None:
    found = told(folder, lambda host, rows: (rows - 0.5 * host) / (1 + host), dealt=dealt)
    assert found is not None
    assert found.startswith("Flattened argument 0 of the step: column ")
    assert "of host 0 is that of one device times 1 plus" in found
    assert found.endswith("of host 1 times 0.5 plus -0.25")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda host, rows: rows, id="nothing"),
        pytest.param(lambda host, rows: 2 * rows - 1, id="the same on all hosts"),
        pytest.param(lambda host, rows: rows**2 + host, id="no line"),
        pytest.param(lambda host, rows: rows + np.random.default_rng(7).normal(0, 0.1, rows.shape), id="noise"),
        pytest.param(lambda host, rows: rows[::-1] - host, id="another order"),
    ],
)
def test_other_differences_are_none_of_columns(folder: Folder, change: Change) -> None:
    assert told(folder, change) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)  # each example has traces of its own
@given(st.tuples(*[st.floats(0.1, 10)] * HOSTS), st.tuples(*[st.floats(-5, 5)] * HOSTS))
def test_any_factors_and_sums_are_told_where_they_differ(
    folder: Folder, factors: tuple[float, ...], sums: tuple[float, ...]
) -> None:
    found = told(folder, lambda host, rows: rows * factors[host] + sums[host])
    if abs(factors[0] - factors[1]) + abs(sums[0] - sums[1]) > 1e-2:
        assert found is not None
    if factors[0] == factors[1] and sums[0] == sums[1]:
        assert found is None
