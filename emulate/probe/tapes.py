"""Gradient tapes: what the gradient is taken of, and the steps of loops without a known optimizer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from emulate.probe import body as bodies
from emulate.probe import replay, upstream
from emulate.probe.variables import is_floating

if TYPE_CHECKING:
    from emulate.probe.probe import Probe


def install(probe: Probe) -> None:
    """Wrap `tf.GradientTape.gradient`."""
    cls = upstream.tape_class()
    original = cls.gradient

    @functools.wraps(original)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        result = original(self, target, sources, *args, **kwargs)
        body = bodies.current()
        probe.coordinated.see_tape()
        if body is not None:
            body.taped, body.last_tape = True, (tf.nest.flatten(sources), body.num_draws)
            probe.takes_gradients(body.label)
            result = _joined_over_shares(body, probe, sources, result)
        if body is not None and body.is_here():
            _remember(body, probe, target, sources, result)
        return result

    cls.gradient = gradient


def _joined_over_shares(body: bodies.Body, probe: Probe, sources: Any, result: Any) -> Any:
    """Where shares of another run's rows come one after the other and are joined here: with the last of them, all."""
    import tensorflow as tf

    plan = probe.plan.replay
    if plan is None or not plan.taped or body.share is None or not _are_variables(sources):
        return result
    return tf.nest.pack_sequence_as(result, replay.taped(plan, body, tf.nest.flatten(result)))


def _are_variables(sources: Any) -> bool:
    import tensorflow as tf

    variables = tf.nest.flatten(sources)
    return bool(variables) and all(hasattr(variable, "assign") for variable in variables)


def _remember(body: bodies.Body, probe: Probe, target: Any, sources: Any, result: Any) -> None:
    import tensorflow as tf

    body.objective += [t for t in tf.nest.flatten(target) if tf.is_tensor(t) and is_floating(t)]
    variables = tf.nest.flatten(sources)
    gradients = tf.nest.flatten(result)
    if len(variables) == len(gradients) and _are_variables(sources) and (body.share is None or body.share == -1):
        body.tape.append((gradients, variables))
        probe.initial.before_first("tape", body.replica, variables)
