"""Record gradient tapes: what the gradient is taken of, and the steps of loops without a known optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emulate.probe import body as bodies
from emulate.probe import replay, upstream
from emulate.probe.plan import TAPES_JOINED
from emulate.probe.point import around
from emulate.probe.variables import is_floating, read_local

if TYPE_CHECKING:
    from emulate.probe.probe import Probe


def install(probe: Probe) -> None:
    """Wrap `tf.GradientTape.gradient` and `tf.gradients`."""
    cls = upstream.tape_class()

    @around(cls, "gradient")
    def gradient(original: Any, self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return _taken(probe, target, sources, lambda: original(self, target, sources, *args, **kwargs))

    for module in upstream.modules_with_gradients():
        _wrap_function(probe, module)


def _wrap_function(probe: Probe, module: Any) -> None:
    @around(module, "gradients")
    def gradients(original: Any, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        return _taken(probe, ys, xs, lambda: original(ys, xs, *args, **kwargs))


def _taken(probe: Probe, target: Any, sources: Any, take: Callable[[], Any]) -> Any:
    """Take gradients and note them, and return them as the plan has them."""
    import tensorflow as tf

    body = bodies.current()
    if body is not None:
        body.taped = body.takes_gradients = True  # the gradient of an all-reduce (synchronized BatchNormalization) is one, too
    result = take()
    if body is not None:
        body.takes_gradients = False
    probe.coordinated.see_tape()
    if body is None:
        return result
    body.last_tape = tf.nest.flatten(sources), body.num_draws
    probe.takes_gradients(body.label)
    if body.lines is not None and _are_variables(sources):
        body.lines.tape(target, result)
    result = _joined_over_shares(body, probe, sources, result)
    if body.is_here():
        _remember(body, probe, target, sources, result)
    return _joined_over_replicas(probe, sources, result)


def _joined_over_shares(body: bodies.Body, probe: Probe, sources: Any, result: Any) -> Any:
    """Join the gradients of shares of another run's examples, and return all of them with the last share."""
    import tensorflow as tf

    plan = probe.plan.replay
    if plan is None or not plan.taped or body.share is None or not _are_variables(sources):
        return result
    return tf.nest.pack_sequence_as(result, replay.taped(plan, body, tf.nest.flatten(result)))


def _joined_over_replicas(probe: Probe, sources: Any, result: Any) -> Any:
    """Join the replicas' gradients at once: everything computed from them then uses those of all."""
    import tensorflow as tf

    asked = [how for how, switch in TAPES_JOINED.items() if switch in probe.plan.switches]
    context = tf.distribute.get_replica_context()
    if not asked or context is None or context.num_replicas_in_sync == 1 or not _are_variables(sources):
        return result
    flat = tf.nest.flatten(result)
    places = [place for place, gradient in enumerate(flat) if gradient is not None]
    joined = context.all_reduce(asked[0].upper(), [flat[place] for place in places])
    for place, gradient in zip(places, joined, strict=True):
        flat[place] = gradient
    return tf.nest.pack_sequence_as(result, flat)


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
        of_loop = not (probe.has_optimizer or probe.has_servers)  # where no optimizer is seen to apply; workers take turns
        for variable in variables if of_loop else ():
            body.at_tape.setdefault(id(upstream.tf_variable(variable)), read_local(variable))
        probe.initial.before_first("tape", body.replica, variables)
