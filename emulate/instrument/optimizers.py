"""Wrap optimizers and gradient tapes, which get each replica's local gradients.

An optimizer's apply ends a step. Tapes tell what the gradient is taken of, and the steps of loops without a known optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.interventions import Interventions, Pairs, are_variables
from emulate.point import around
from emulate.recorder import Body, Recorder, current_body
from emulate.upstream import is_floating, read_local, static_int


def is_scheduled(optimizer: Any) -> bool:
    """Return whether an optimizer's learning rate changes with its steps."""
    rate = upstream.rate_of(optimizer)
    return callable(rate) and not hasattr(rate, "assign")


def first_rate(optimizer: Any) -> float | None:
    """Return an optimizer's initial learning rate; for a schedule that of the second step, because a warm-up starts at 0.

    Args:
        optimizer: Of any Keras.

    Returns:
        The rate, None where it cannot be told.
    """
    import numpy as np

    rate = upstream.rate_of(optimizer)
    try:
        with tf.init_scope():
            number = rate(1) if is_scheduled(optimizer) else upstream.local_copies(rate)[0]
            return float(np.asarray(number))
    except Exception:  # a rate of the program's own making: whatever it raises here, it is not known
        return None


_inside: set[tuple[int, int]] = set()  # (optimizer, replica): replicas' threads take turns, so a thread-local would not do


def install(recorder: Recorder, interventions: Interventions, package: str) -> None:
    """Wrap the optimizers of TensorFlow 1, Keras 3 or tf_keras."""
    wrap = _wrap_apply if package == upstream.KERAS_3 else _wrap_apply_gradients
    for cls, method in upstream.optimizers(package):

        @around(cls, "__init__")
        def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            recorder.has_optimizer = True  # known before it applies anything
            recorder.lines.note_call(
                "optimizer", {"clips": any(kwargs.get(name) for name in ("clipnorm", "clipvalue", "global_clipnorm"))}
            )
            original(self, *args, **kwargs)

        wrap(recorder, interventions, cls, method)


def _wrap_apply(recorder: Recorder, interventions: Interventions, cls: Any, method: str) -> None:
    @around(cls, method)
    def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = list(trainable_variables if trainable_variables is not None else self._trainable_variables)
        pairs = list(zip(list(grads), variables, strict=False))
        return _apply(
            recorder, interventions, self, pairs, lambda new: original(self, [g for g, _ in new], trainable_variables)
        )


def _wrap_apply_gradients(recorder: Recorder, interventions: Interventions, cls: Any, method: str) -> None:
    @around(cls, method)
    def apply_gradients(original: Any, self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        skips = kwargs.get("skip_gradients_aggregation", not kwargs.get("experimental_aggregate_gradients", True))
        pairs = list(grads_and_vars)
        return _apply(recorder, interventions, self, pairs, lambda new: original(self, new, *args, **kwargs), skips=skips)


def _apply(
    recorder: Recorder,
    interventions: Interventions,
    optimizer: Any,
    pairs: Pairs,
    proceed: Callable[[Pairs], Any],
    *,
    skips: bool = False,
) -> Any:
    """Record an outermost apply; an apply inside another one (a wrapped optimizer's) is part of it."""
    body = current_body()
    replica, reduced = _where(recorder, body)
    if (id(optimizer), replica) in _inside or not pairs:
        return proceed(pairs)
    recorder.coordinated.see_update()
    if body is not None and body.lines is not None:
        body.lines.apply([gradient for gradient, _ in pairs])
    else:
        recorder.lines.note_call("apply")
    inner = upstream.inner_optimizer(optimizer)
    marked = {(id(each), replica) for each in (optimizer, inner) if each is not None}
    name = recorder.names.of(optimizer)
    how = "replicated" if reduced else "skipped" if skips else "sum"
    _remember_optimizer(recorder, name, inner if inner is not None else optimizer, scales=inner is not None, how=how)
    recorder.resume(name, optimizer)
    recorder.initial.before_first(name, replica, [v for _, v in pairs] + recorder.untrained(body))
    if body is not None:
        body.updates[name] += 1
        if body.updates[name] == 2:
            recorder.facts.add("repeated", name)
    pairs = interventions.applied_of_shares(body, name, pairs)
    if not pairs:
        return None
    recorded, applied = interventions.applied(name, pairs, replica)
    interventions.without_clipping(optimizer, inner)
    numbers = upstream.numbers_of(optimizer) if body is not None and recorder.plan.keeps_functions else []
    before = [(variable, read_local(variable)) for variable in numbers]
    _inside.update(marked)
    try:
        result = proceed(applied)
    finally:
        _inside.difference_update(marked)
    # An optimizer of one's own, which gpudist_core gives the sum: each replica has its part of it.
    parts = upstream.replicas_summed(optimizer)
    kept = [(_part(gradient, parts), variable) for gradient, variable in recorded if is_floating(variable)]
    again = body is not None and body.updates.total() > 1
    recorder.step_made(name, body, replica, kept, {"reduced": reduced, "again": again}, before)
    return result


def _part(gradient: Any, parts: int) -> Any:
    if parts == 1 or gradient is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / parts, gradient.indices, gradient.dense_shape)
    return gradient / parts


def is_applying(replica: int) -> bool:
    """Return whether an optimizer runs on a replica: what it assigns is its own."""
    return any(number == replica for _, number in _inside)


def _where(recorder: Recorder, body: Body | None) -> tuple[int, bool]:
    """Return the replica of these gradients, and whether they are already summed over the replicas."""
    if body is not None:
        return body.replica, False
    if recorder.has_servers:  # the coordinator applies what workers have sent
        return recorder.first_replica, True
    context = tf.distribute.get_replica_context()
    # Neither in a replica nor in a scope: what Strategy.run made the gradients of was summed by the program, if it made any.
    is_of_runs = not tf.distribute.has_strategy() and bool(recorder.facts.taping)
    if context is not None and not is_of_runs:
        return static_int(context.replica_id_in_sync_group), False
    return recorder.first_replica, True


def _remember_optimizer(recorder: Recorder, name: str, optimizer: Any, *, scales: bool, how: str) -> None:
    if name in recorder.facts.optimizers:
        return
    facts: dict[str, Any] = {"class": type(optimizer).__name__, "loss_scale": scales, "aggregation": how}
    facts["learning_rate"], facts["scheduled"] = first_rate(optimizer), is_scheduled(optimizer)
    public = {name: value for name, value in getattr(optimizer, "__dict__", {}).items() if not name.startswith("_")}
    facts["settings"] = {name: float(value) for name, value in public.items() if isinstance(value, (int, float))}
    facts["settings"] |= upstream.accumulated_by_core(optimizer)
    for setting in ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay"):
        value = getattr(optimizer, setting, None)
        facts[setting] = float(value) if isinstance(value, (int, float)) and value else None
    recorder.facts.optimizers[name] = facts


def install_tapes(recorder: Recorder, interventions: Interventions) -> None:
    """Wrap `tf.GradientTape.gradient` and `tf.gradients`."""

    @around(upstream.tape_class(), "gradient")
    def gradient(original: Any, self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return _taken(recorder, interventions, target, sources, lambda: original(self, target, sources, *args, **kwargs))

    for module in upstream.modules_with_gradients():

        @around(module, "gradients")
        def gradients(original: Any, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
            return _taken(recorder, interventions, ys, xs, lambda: original(ys, xs, *args, **kwargs))


def _taken(recorder: Recorder, interventions: Interventions, target: Any, sources: Any, take: Callable[[], Any]) -> Any:
    """Take gradients and note them, and return them as the plan has them."""
    body = current_body()
    if body is not None:
        body.taped = body.takes_gradients = True  # the gradient of an all-reduce (synchronized BatchNormalization) is one, too
    result = take()
    if body is not None:
        body.takes_gradients = False
    recorder.coordinated.see_tape()
    if body is None:
        return result
    variables = tf.nest.flatten(sources)
    body.last_tape = variables, body.num_draws
    recorder.facts.add("taping", body.label)
    if body.lines is not None and are_variables(variables):
        body.lines.tape(target, result, map(recorder.names.of, variables))
    flat = tf.nest.flatten(result)
    gradients = interventions.taped_of_shares(body, variables, flat)
    if body.is_here():
        if are_variables(variables):  # what a loss takes of its own inputs, as a gradient penalty does, is no loss
            body.objective += [t for t in tf.nest.flatten(target) if tf.is_tensor(t) and is_floating(t)]
        if len(variables) == len(gradients) and are_variables(variables) and body.share in (None, -1):
            body.tape.append((gradients, variables))
            of_loop = not (recorder.has_optimizer or recorder.has_servers)  # no optimizer is seen to apply; workers take turns
            for variable in variables if of_loop else ():
                body.at_tape.setdefault(id(upstream.tf_variable(variable)), read_local(variable))
            recorder.initial.before_first("tape", body.replica, variables)
    given = interventions.taped_of_replicas(variables, gradients)
    return result if given is flat else tf.nest.pack_sequence_as(result, given)
