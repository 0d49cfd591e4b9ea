"""Check that all gradients are finite before any of them is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from gpudist_core.gradients import reduction

Check = Callable[[list[Any], list[Any]], list[Any]]


@contextlib.contextmanager
def checking(*, on: bool) -> Iterator[Check]:
    """Check gradients while an update is traced. If a gradient is not finite, nothing after the check runs.

    Args:
        on: Whether to check.

    Yields:
        A function of the gradients (None for a missing one) and their variables, to be called once; it returns the gradients.
        Code that depends on them raises `InvalidArgumentError`, which names the variable.
    """
    with contextlib.ExitStack() as rest:

        def checked(grads: list[Any], variables: list[Any]) -> list[Any]:
            if not on:
                return grads
            named = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            checks = [tf.debugging.check_numerics(reduction.values_of(g), f"gradient of {v.name}") for g, v in named]
            rest.enter_context(tf.control_dependencies(checks))
            return [g if g is None else reduction.with_values(g, tf.identity(reduction.values_of(g))) for g in grads]

        yield checked
