"""Gradient tapes: what the gradient is taken of, and the steps of loops without a known optimizer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from emulate.probe import body as bodies
from emulate.probe import upstream
from emulate.probe.variables import is_floating

if TYPE_CHECKING:
    from emulate.probe.probe import Probe


def install(probe: Probe) -> None:
    """Wrap `tf.GradientTape.gradient`."""
    cls = upstream.tape_class()
    original = cls.gradient

    @functools.wraps(original)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, target, sources, *args, **kwargs)
        body = bodies.current()
        if body is not None:
            body.taped = True
        if body is not None and body.is_here():
            _remember(body, probe, target, sources, result)
        return result

    cls.gradient = gradient


def _remember(body: bodies.Body, probe: Probe, target: Any, sources: Any, result: Any) -> None:
    import tensorflow as tf

    body.objective += [t for t in tf.nest.flatten(target) if tf.is_tensor(t) and is_floating(t)]
    variables = tf.nest.flatten(sources)
    gradients = tf.nest.flatten(result)
    if len(variables) == len(gradients) and variables and all(hasattr(v, "assign") for v in variables):
        body.tape.append((gradients, variables))
        probe.initial.before_first("tape", body.replica, variables)
