"""Whether two runs on one device train the same, as `gpudist fix` asks of each edit."""

from __future__ import annotations

import numpy as np
import pytest

from emulate.trace import Trace
from emulate.verify.recorded import trained_otherwise
from tests.emulate.verify.cases import Folder


def _trained(folder: Folder, *, rounding: float = 0.0, moved_by: float = 0.0, factor: float = 1.0) -> Trace:
    """Three steps of Adam; the gradient of `bias` is rounding in the first two, and 0 in the last."""
    made = folder.made()
    kernel, bias = np.ones(4, "f4"), np.zeros(4, "f4")
    made.initial({"kernel": kernel, "bias": bias})
    for k in range(3):
        kernel = kernel - np.float32(0.1 * factor)
        bias = bias + np.float32(np.sign(rounding) * 0.1 + moved_by)
        gradients = {"kernel": np.full(4, 1.0, "f4"), "bias": np.full(4, rounding if k < 2 else 0.0, "f4")}
        made.step(k, gradients, {"kernel": kernel, "bias": bias}, optimizer="adam", rows=["a", "b"], objective=1.0)
    return made.trace()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"rounding": 1e-8}, {"rounding": -1e-8}, None),
        ({"rounding": 1e-8}, {"rounding": -1e-1}, "the losses or the updates"),
        ({}, {"moved_by": 0.1}, "the losses or the updates"),
        ({"rounding": 1e-8}, {"rounding": -1e-8, "factor": 2.0}, "the losses or the updates"),
    ],
)
def test_what_an_optimizer_makes_of_a_gradient_that_is_rounding_is_no_other_training(
    folder: Folder, one: dict[str, float], other: dict[str, float], expected: str | None
) -> None:
    assert trained_otherwise(_trained(folder, **one), _trained(folder, **other)) == expected
