"""Read arrays of traces: the elements that all of them kept, and gradients and weights of one step beside the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from emulate.trace import Step, StoredArray, Trace, Variable

Floats = NDArray[np.float64]


def aligned(arrays: Sequence[StoredArray]) -> list[Floats]:
    """Return the elements that every array kept, flat and as float64.

    Traces with different budgets keep every a-th and every b-th element: both have every lcm(a, b)-th. Of sparse arrays alone,
    whose other rows are zero in all, the rows that any of them has: a table may have millions.
    """
    if all(array.rows is not None and array.is_complete and not array.parts for array in arrays):
        return _of_rows(arrays)
    stride = math.lcm(*(array.stride for array in arrays))
    return [array.read().reshape(-1)[:: stride // array.stride].astype(np.float64) for array in arrays]


def _of_rows(arrays: Sequence[StoredArray]) -> list[Floats]:
    rows = [array.read_rows() for array in arrays]
    together = np.unique(np.concatenate([numbers for numbers, _ in rows]))
    aligned_ones = []
    for array, (numbers, values) in zip(arrays, rows, strict=True):
        dense = np.zeros((len(together), *array.shape[1:]))
        dense[np.searchsorted(together, numbers)] = values
        aligned_ones.append(dense.reshape(-1))
    return aligned_ones


def is_numeric(array: StoredArray) -> bool:
    """Return whether the array holds floats (counters and seeds are compared exactly or not at all)."""
    return np.dtype(array.dtype).kind == "f"


def eps_of(dtype: str) -> float:
    """Return the unit in the last place at 1 of a float dtype; float32's for other dtypes."""
    kind = np.dtype(dtype)
    return float(np.finfo(kind).eps) if kind.kind == "f" else float(np.finfo(np.float32).eps)


def largest(values: Floats) -> float:
    """Return the largest absolute value of the finite elements; 0 if there are none."""
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def norm(values: Floats) -> float:
    """Return the L2 norm."""
    return float(np.sqrt(np.einsum("i,i->", values, values)))  # not np.dot, whose threads wait for those of other runs


def kept(variables: Iterable[Variable]) -> StoredArray | None:
    """Return the first kept array among one variable's values on several replicas."""
    return next((variable.array for variable in variables if variable.array is not None), None)


def finite_difference(ours: Floats, theirs: Floats) -> tuple[Floats, Floats]:
    """Return what two arrays differ by, and the second one, with 0 where one of them is not finite."""
    finite = np.isfinite(ours) & np.isfinite(theirs)
    ours, theirs = (np.where(finite, array, 0.0) for array in (ours, theirs))
    return ours - theirs, theirs


StepOfAll = Mapping[int, Step]
"""One step by replica."""


def gradients_of(step: StepOfAll, tensor: str) -> dict[int, StoredArray]:
    """Return the local gradients of one tensor by replica. Replicas without one (an unused branch) are left out."""
    gradients = {replica: local.gradients[tensor] for replica, local in sorted(step.items()) if tensor in local.gradients}
    return {replica: array for replica, array in gradients.items() if is_numeric(array)}


def names_of(step: StepOfAll) -> list[str]:
    """Return the names of the tensors with a gradient on any replica, in the program's order."""
    return list(dict.fromkeys(name for replica in sorted(step) for name in step[replica].gradients))


def weight_of(step: StepOfAll, tensor: str) -> StoredArray | None:
    """Return the first replica's value of a variable after the step (only digests are kept if replicas agree)."""
    return kept(step[replica].weights[tensor] for replica in sorted(step) if tensor in step[replica].weights)


def copies_of(step: StepOfAll, tensor: str) -> list[StoredArray]:
    """Return each replica's value of a variable that no gradient changes, where the replicas keep different ones."""
    values = [local.weights[tensor] for local in step.values() if tensor in local.weights]
    first, differ = kept(values), len({value.digest for value in values}) > 1
    return [value.array or first for value in values] if first and differ and not values[0].trainable else []


def state_of(step: StepOfAll, name: str) -> StoredArray | None:
    """Return the first replica's value of a variable that the step assigned itself."""
    return kept(step[replica].state[name] for replica in sorted(step) if name in step[replica].state)


def objective(step: StepOfAll) -> float | None:
    """Return the sum of the replicas' objectives; None if one is missing."""
    objectives = [local.objective for local in step.values()]
    return sum(value for value in objectives if value is not None) if objectives and None not in objectives else None


def total(locals_: list[Floats], how: str) -> Floats:
    """Return the gradient that the optimizer applies."""
    whole = np.sum(locals_, axis=0)
    return np.asarray(whole / len(locals_) if how == "mean" else whole)


@dataclass(frozen=True)
class GradientView:
    """Hold one tensor's gradient in one step.

    Attributes:
        locals: Each replica's local gradient, by replica.
        reference: The reference's.
        weight: The reference's weights before the step where they were kept.
        noise: The noise floor of this tensor at this step.
    """

    tensor: str
    locals: Mapping[int, Floats]
    reference: Floats
    weight: Floats | None
    noise: float
    how: str = "sum"

    @property
    def total(self) -> Floats:
        """Return the gradient of all replicas together."""
        return total(list(self.locals.values()), self.how)

    @property
    def residual(self) -> Floats:
        """Return what the topology has too much."""
        return self.total - self.reference


def views(
    reference: Trace, topology: Trace, optimizer: str, index: int, noise: Mapping[str, float], how: str = "sum"
) -> Iterator[GradientView]:
    """Yield every tensor's gradient of one step that both traces have; tensors without a noise floor were not compared."""
    ours, theirs = topology.steps(optimizer)[index], reference.steps(optimizer)[index]
    for tensor in names_of(theirs):
        mine, others = gradients_of(ours, tensor), gradients_of(theirs, tensor)
        if not mine or not others or tensor not in noise:
            continue
        before = weights_before(reference, optimizer, index, tensor)
        arrays = aligned([*mine.values(), *others.values(), *([before] if before is not None else [])])
        weight = arrays.pop() if before is not None else None
        whole = np.sum(arrays[len(mine) :], axis=0)
        yield GradientView(tensor, dict(zip(mine, arrays, strict=False)), whole, weight, noise[tensor], how)


def taped_views(
    reference: Trace, topology: Trace, optimizer: str, index: int, seen: Sequence[GradientView]
) -> list[GradientView]:
    """Return the same for the tapes' gradients, if a program sums them itself. Tensors missing on a replica are left out."""
    ours, theirs = topology.steps(optimizer)[index], reference.steps(optimizer)[index]
    taped = []
    for view in seen:
        mine, others = (
            {r: local.taped[view.tensor] for r, local in sorted(s.items()) if view.tensor in local.taped}
            for s in (ours, theirs)
        )
        if len(mine) < len(ours) or len(others) < len(theirs):
            continue
        arrays = aligned([*mine.values(), *others.values()])
        whole = np.sum(arrays[len(mine) :], axis=0)
        size, clipped = norm(whole), norm(view.reference)
        noise = view.noise * (max(1.0, size / clipped) if clipped else 1.0)
        taped.append(replace(view, locals=dict(zip(mine, arrays, strict=False)), reference=whole, noise=noise, how="sum"))
    return taped


def weights_before(trace: Trace, optimizer: str, index: int, tensor: str, replica: int | None = None) -> StoredArray | None:
    """Return a variable before a step: the initial value, or the one after the previous step."""
    if index > 0:
        step = trace.steps(optimizer)[index - 1]
        return weight_of({replica: step[replica]} if replica in step else step, tensor)
    initial = trace.variables("initial")
    own = [v for (_, r), v in sorted(initial.items()) if r == replica] or [v for _, v in sorted(initial.items())]
    return kept(v[tensor] for v in own if tensor in v) or kept(v[tensor] for _, v in sorted(initial.items()) if tensor in v)


def state_before(trace: Trace, optimizer: str, index: int, name: str) -> StoredArray | None:
    """Return an assigned variable before a step: its initial value if it was recorded, or the one after the previous step."""
    if index > 0:
        return state_of(trace.steps(optimizer)[index - 1], name)
    return kept(v[name] for _, v in sorted(trace.variables("initial").items()) if name in v)
