"""First values of variables: those of what comes once others were trained are as far off as rounding makes them."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.judge import judge
from tests.emulate.verify.cases import Folder, case_of, codes, loop
from tests.emulate.verify.hand_made import right_reference, right_topology
from tests.emulate.verify.made_traces import Made


def _trained(folder: Folder, topology: str, first: float, *, late: bool = True) -> Trace:
    """Three steps, and a variable of another model whose first value is seen before them or after."""
    made = folder.made(topology)
    replicas = 1 if topology == "1x1" else 4

    def begin(made: Made) -> None:
        for replica in range(replicas):
            made.initial({"restored": np.full(4, first, "f4")}, replica=replica)

    def step(made: Made, k: int) -> None:
        if k == 0 and not late:
            begin(made)
        (right_reference if replicas == 1 else right_topology)(made, k)
        if k == 2 and late:
            begin(made)

    return loop(made, step)


@pytest.mark.parametrize(
    ("first", "late", "expected"),
    [(1.02, True, []), (1.5, True, ["initial-weights"]), (1.02, False, ["initial-weights"])],
)
def test_a_variable_that_comes_after_steps_may_differ_as_the_noise_runs_do_and_no_other_may(
    folder: Folder, first: float, late: bool, expected: list[str]
) -> None:
    noise = [_trained(folder, "1x1", value, late=late) for value in (0.99, 1.01, 1.0)]
    found = judge(case_of(_trained(folder, "1x1", 1.0, late=late), _trained(folder, "1x4", first, late=late), noise))
    assert codes(found) == expected
    if expected:
        assert found.first_divergence is not None
        assert found.first_divergence.kind == "initial-weight"
