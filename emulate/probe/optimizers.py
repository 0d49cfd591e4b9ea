"""Hook into an optimizer's apply, the second probe point, which gets each replica's local gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emulate.probe import body as bodies
from emulate.probe import rates, replay, switches, upstream
from emulate.probe.lines import note
from emulate.probe.point import around
from emulate.probe.variables import is_floating, read_local

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

Pairs = list[tuple[Any, Any]]
_inside: set[tuple[int, int]] = set()  # (optimizer, replica): replicas' threads take turns, so a thread-local would not do


def install_tensorflow(probe: Probe) -> None:
    """Wrap the optimizers of TensorFlow 1."""
    for cls, method in upstream.legacy_optimizers()[:1]:
        _watch_made(probe, cls)
        _wrap_apply_gradients(probe, cls, method)


def install_keras(probe: Probe, package: str) -> None:
    """Wrap the optimizers of Keras 3 or tf_keras."""
    if package == upstream.KERAS_3:
        for cls, method in upstream.keras_optimizers():
            _watch_made(probe, cls)
            _wrap_apply(probe, cls, method)
    else:
        for cls, method in upstream.legacy_optimizers()[1:]:
            _watch_made(probe, cls)
            _wrap_apply_gradients(probe, cls, method)


def _watch_made(probe: Probe, cls: Any) -> None:
    """Know that the program has an optimizer, before it applies anything."""

    @around(cls, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        probe.has_optimizer = True
        note(probe, "optimizer", {"clips": any(kwargs.get(name) for name in ("clipnorm", "clipvalue", "global_clipnorm"))})
        original(self, *args, **kwargs)


def _wrap_apply(probe: Probe, cls: Any, method: str) -> None:
    @around(cls, method)
    def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = list(trainable_variables if trainable_variables is not None else self._trainable_variables)
        pairs = list(zip(list(grads), variables, strict=False))
        return _apply(probe, self, pairs, lambda new: original(self, [g for g, _ in new], trainable_variables))


def _wrap_apply_gradients(probe: Probe, cls: Any, method: str) -> None:
    @around(cls, method)
    def apply_gradients(original: Any, self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        skips = kwargs.get("skip_gradients_aggregation", not kwargs.get("experimental_aggregate_gradients", True))
        return _apply(probe, self, list(grads_and_vars), lambda new: original(self, new, *args, **kwargs), skips=skips)


def _apply(probe: Probe, optimizer: Any, pairs: Pairs, proceed: Callable[[Pairs], Any], *, skips: bool = False) -> Any:
    """Record an outermost apply; an apply inside another one (a wrapped optimizer's) is part of it."""
    body = bodies.current()
    replica, reduced = _where(probe, body)
    if (id(optimizer), replica) in _inside or not pairs:
        return proceed(pairs)
    probe.coordinated.see_update()
    if body is not None and body.lines is not None:
        body.lines.apply([gradient for gradient, _ in pairs])
    else:
        note(probe, "apply")
    inner = upstream.inner_optimizer(optimizer)
    marked = {(id(each), replica) for each in (optimizer, inner) if each is not None}
    name = _name(probe, optimizer)
    how = "replicated" if reduced else "skipped" if skips else "sum"
    _remember_optimizer(probe, name, inner if inner is not None else optimizer, scales=inner is not None, how=how)
    probe.resume(name, optimizer)
    probe.initial.before_first(name, replica, [v for _, v in pairs] + probe.untrained(body))
    if body is not None:
        body.updates[name] += 1
        if body.updates[name] == 2:
            probe.facts.note("repeated", name)
    if body is not None and body.share is not None and probe.plan.replay is not None:
        pairs = replay.applied(probe.plan.replay, body, name, pairs)
        if not pairs:
            return None
    recorded = probe.rounding.changed(name, pairs)
    applied = probe.following.applied(name, pairs, recorded)
    switches.without_clipping(probe, optimizer, inner)
    numbers = upstream.numbers_of(optimizer) if body is not None and probe.plan.keeps_functions else []
    before = [(variable, read_local(variable)) for variable in numbers]
    _inside.update(marked)
    try:
        result = proceed(applied)
    finally:
        _release(marked)
    # An optimizer of one's own, which gpudist_core gives the sum: each replica has its part of it.
    parts = upstream.replicas_summed(optimizer)
    kept = [(_part(gradient, parts), variable) for gradient, variable in recorded if is_floating(variable)]
    again = body is not None and body.updates.total() > 1
    probe.step_made(name, body, replica, kept, {"reduced": reduced, "again": again}, before)
    return result


def _part(gradient: Any, parts: int) -> Any:
    import tensorflow as tf

    if parts == 1 or gradient is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / parts, gradient.indices, gradient.dense_shape)
    return gradient / parts


def is_applying(replica: int) -> bool:
    """Return whether an optimizer runs on a replica: what it assigns is its own."""
    return any(number == replica for _, number in _inside)


def _release(marked: set[tuple[int, int]]) -> None:
    for entry in marked:
        _inside.discard(entry)


def _where(probe: Probe, body: bodies.Body | None) -> tuple[int, bool]:
    """Return the replica of these gradients, and whether they are already summed over the replicas."""
    import tensorflow as tf

    if body is not None:
        return body.replica, False
    if probe.has_servers:  # the coordinator applies what workers have sent
        return probe.first_replica, True
    context = tf.distribute.get_replica_context()
    # Neither in a replica nor in a scope: what Strategy.run made the gradients of was summed by the program, if it made any.
    is_of_runs = not tf.distribute.has_strategy() and bool(probe.facts.taping)
    if context is not None and not is_of_runs:
        return bodies.static_int(context.replica_id_in_sync_group), False
    return probe.first_replica, True


def _name(probe: Probe, optimizer: Any) -> str:
    return probe.names.of(optimizer)


def _remember_optimizer(probe: Probe, name: str, optimizer: Any, *, scales: bool, how: str) -> None:
    if name in probe.facts.optimizers:
        return
    facts: dict[str, Any] = {"class": type(optimizer).__name__, "loss_scale": scales, "aggregation": how}
    facts["learning_rate"], facts["scheduled"] = rates.first_rate(optimizer), rates.is_scheduled(optimizer)
    facts["settings"] = rates.settings_of(optimizer)
    for setting in ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay"):
        value = getattr(optimizer, setting, None)
        facts[setting] = float(value) if isinstance(value, (int, float)) and value else None
    probe.facts.optimizers[name] = facts
