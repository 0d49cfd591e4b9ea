"""Let clipping in a custom step clip the gradients of all replicas.

A tape gives a replica its part of each gradient. Clipped parts do not sum to the clipped whole. So `tf.clip_by_global_norm`,
`tf.clip_by_norm`, `tf.clip_by_value` and `tf.linalg.global_norm` sum the parts that a tape made, and return an equal part of
the clipped whole to each replica. Later operations (a factor, the optimizer's sum over the replicas) then work as before. All
other arguments are passed through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gpudist_core import share as shares
from gpudist_core.gradients import clipping, reduction
from gpudist_core.upstream.parts import Parts
from gpudist_core.upstream.patches import Replacements

Current = Callable[[], tuple[Parts, shares.Share] | None]


def replacements(current: Current) -> Replacements:
    """Return replacements of TensorFlow's functions.

    Args:
        current: A function that returns the parts and the share of the custom step that this thread traces on several replicas,
            or None.

    Returns:
        Owners, names and replacements.
    """
    import tensorflow as tf

    return [
        (tf, "clip_by_global_norm", functools.partial(_by_global_norm, current)),
        (tf, "clip_by_norm", functools.partial(_by_norm, current)),
        (tf, "clip_by_value", functools.partial(_by_value, current)),
        (tf.linalg, "global_norm", functools.partial(_global_norm, current)),
    ]


def _by_global_norm(current: Current, by_global_norm: Any) -> Any:
    @functools.wraps(by_global_norm)
    def clip_by_global_norm(t_list: Any, clip_norm: Any, use_norm: Any = None, name: Any = None) -> Any:
        whole = _Whole.of(current, t_list)
        if whole is None:
            return by_global_norm(t_list, clip_norm, use_norm, name)
        norm = whole.norm() if use_norm is None else use_norm
        clipped, norm = by_global_norm(whole.gradients, clip_norm, norm, name)
        return whole.parts_of(clipped), norm

    return clip_by_global_norm


def _by_norm(current: Current, by_norm: Any) -> Any:
    @functools.wraps(by_norm)
    def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: Any = None) -> Any:
        whole = _Whole.of(current, [t])
        if whole is None:
            return by_norm(t, clip_norm, axes, name)
        if whole.is_sharded:
            return whole.parts_of([clipping.to_norm(whole.gradients[0], whole.norm(), clip_norm)])[0]
        return whole.parts_of([by_norm(whole.gradients[0], clip_norm, axes, name)])[0]

    return clip_by_norm


def _by_value(current: Current, by_value: Any) -> Any:
    @functools.wraps(by_value)
    def clip_by_value(t: Any, clip_value_min: Any, clip_value_max: Any, name: Any = None) -> Any:
        whole = _Whole.of(current, [t])
        if whole is None:
            return by_value(t, clip_value_min, clip_value_max, name)
        return whole.parts_of([by_value(whole.gradients[0], clip_value_min, clip_value_max, name)])[0]

    return clip_by_value


def _global_norm(current: Current, global_norm: Any) -> Any:
    @functools.wraps(global_norm)
    def norm_of_all(t_list: Any, name: Any = None) -> Any:
        whole = _Whole.of(current, t_list)
        return global_norm(t_list, name) if whole is None else whole.norm()

    return norm_of_all


class _Whole:
    """Hold the gradients of all replicas for the parts that a function was given.

    Args:
        parts: What is known of the step's gradients.
        share: This replica's share of the step.
        gradients: This replica's parts.
        variables: The variables of the gradients.
    """

    def __init__(self, parts: Parts, share: shares.Share, gradients: list[Any], variables: list[Any]) -> None:
        self._parts, self._replicas, self._variables = parts, share.num_replicas, variables
        self.gradients = reduction.sum_over_replicas(gradients, variables, differentiable=True)
        self.is_sharded = any(reduction.is_sharded(variable) for variable in variables)

    @classmethod
    def of(cls, current: Current, given: Any) -> _Whole | None:
        """Return the whole gradients.

        None if the argument is not a list of parts of gradients, or collectives do not work here.
        """
        now = current()
        if now is None or not isinstance(given, (list, tuple)) or not now[1].can_meet():
            return None
        variables = now[0].variables(given)
        return None if variables is None else cls(*now, list(given), variables)

    def norm(self) -> Any:
        """Return the L2 norm of all gradients together, including those of all slices of a table."""
        return clipping.global_norm(self.gradients, self._variables)

    def parts_of(self, gradients: list[Any]) -> list[Any]:
        """Return this replica's parts of changed gradients: equal parts, and of a sharded table its own slice."""
        parts = [
            gradient if reduction.is_sharded(variable) else reduction.scale(gradient, 1 / self._replicas)
            for gradient, variable in zip(gradients, self._variables, strict=True)
        ]
        self._parts.remember(parts, self._variables)
        return parts
