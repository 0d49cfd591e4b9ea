"""Tell whether hosts pad their own batches: an example then has another length than on one device."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.compared_runs import complete


def is_padded_otherwise(case: Case, optimizer: str, step: int) -> bool:
    """Return whether the examples of a step have other lengths than on one device: each host fills up its own batches."""
    steps = [of_all for trace in (case.plain, case.untouched) for of_all in complete(trace, optimizer)[step : step + 1]]
    lengths = [
        {(place, array.shape[1:]) for local in of_all.values() for place in local.row_inputs if (array := local.inputs[place])}
        for of_all in steps
    ]
    return any(shapes != lengths[0] for shapes in lengths)
