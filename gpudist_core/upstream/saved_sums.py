"""Save the sums of `gradient_accumulation_steps` among an optimizer's variables, where Keras numbers them.

Keras 3.12 and 3.15 number the iterations, the learning rate if it is a variable, the averages, the sums, and the optimizer's
own variables. Keras 3.8 numbers each sum after the average of the same variable. An exact optimizer keeps its sums elsewhere,
over replicas. In a file they are where Keras looks for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from gpudist_core import state


def take_over(optimizer: Any) -> None:
    """Take over the sums that a plain Keras optimizer was built or loaded with as the first state of its accumulation.

    Args:
        optimizer: A built optimizer, before it is exact, that is not a `LossScaleOptimizer`.
    """
    sums = optimizer.__dict__.get("_accumulated_gradients")
    if sums:
        values = [variable.numpy() for variable in sums]
        for variable in sums:
            optimizer._untrack_variable(variable)
        object.__setattr__(optimizer, "_accumulated_gradients", None)
        state.of_optimizer.of(optimizer).taken_over = values


def taken_over(optimizer: Any) -> list[Any] | None:
    """Return the sums from `take_over` or a loaded file, once; None if there are none."""
    kept = state.of_optimizer.of(_keeps(optimizer))
    values, kept.taken_over = kept.taken_over, None
    return values


def save(optimizer: Any, values: list[Any], store: Any) -> None:
    """Write an optimizer's variables in Keras's numbering.

    Args:
        optimizer: An exact optimizer.
        values: The values of its own variables.
        store: Keras's store for one optimizer.
    """
    places = _places(optimizer)
    own, sums = iter(values), iter(_sums(optimizer) if places else ())
    for number in range(len(values) + len(places)):
        store[str(number)] = next(sums if number in places else own)


def split(optimizer: Any, store: Mapping[str, Any]) -> Mapping[str, Any]:
    """Separate the optimizer's own variables from the saved ones. The sums go to its accumulation.

    Args:
        optimizer: An exact optimizer.
        store: Keras's store for one optimizer.

    Returns:
        A store without the sums; the same one if there are none.
    """
    places = _places(optimizer)
    if not places or len(store.keys()) != len(optimizer.variables) + len(places):
        return store
    values = [store[str(number)] for number in range(len(store.keys()))]
    state.of_optimizer.of(_keeps(optimizer)).taken_over = [np.array(values[number]) for number in places]
    own = [value for number, value in enumerate(values) if number not in places]
    return {str(number): value for number, value in enumerate(own)}


def _keeps(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _places(optimizer: Any) -> range:
    """Return the indices of the sums in Keras's numbering; none if it saves none."""
    inner = _keeps(optimizer)
    if not inner.built or not state.of_optimizer.of(inner).accumulate:
        return range(0)
    outer = len(optimizer._variables) if inner is not optimizer else 0
    first = outer + sum(isinstance(value, keras.Variable) for value in (inner._iterations, inner._learning_rate))
    number = len(inner._trainable_variables)
    if not inner.use_ema:
        return range(first, first + number)
    if not hasattr(keras.optimizers.Optimizer, "add_optimizer_variables"):  # Keras 3.8
        return range(first + 1, first + 2 * number, 2)
    first += sum(isinstance(value, keras.Variable) for value in inner._model_variables_moving_average)
    return range(first, first + number)


def _sums(optimizer: Any) -> list[Any]:
    inner = _keeps(optimizer)
    accumulation = state.of_optimizer.of(inner).accumulation
    saved: dict[str, Any] | None = {"sums": {}} if accumulation is None else accumulation.state_here()
    if saved is None:
        warnings.warn(
            "A model that Keras saves in the middle of an accumulation loses the batches without an update: hosts cannot add "
            "their "
            "sums while one of them saves. To continue exactly use gd.Checkpoints.",
            stacklevel=2,
        )
    kept = dict(saved["sums"]).get("sums") if saved else None
    if kept is not None:
        return [np.asarray(array) for array in kept]
    return [np.zeros(v.shape, v.dtype) for v in inner._trainable_variables]
