"""Switch off suspected causes in a re-run, so that their absence confirms them; and XLA, which hides tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from emulate import graph_functions
from emulate.probe import batch_norm, upstream
from emulate.probe import body as bodies
from emulate.probe.plan import IN_32_BITS
from emulate.probe.point import around, caller
from emulate.probe.variables import is_floating

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

CLIPS = ("clip_by_norm", "clip_by_global_norm", "clip_by_value")
_CLIPPING_ELSEWHERE = (".losses", ".metrics", ".layers", ".nn", ".activations", ".image", ".constraints")


def install(probe: Probe) -> None:
    """Install TensorFlow's interventions: clipping functions, XLA."""
    _without_xla(probe)
    for name in CLIPS:
        _wrap_clip(probe, name)
    _see_casts(probe)
    _see_gathers(probe)
    _see_reductions(probe)


def _without_xla(probe: Probe) -> None:
    """Run a step without XLA, which cannot pass tensors out, and tell the supervisor."""
    cls = graph_functions.function_class()

    @around(cls, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._jit_compile and _is_a_step(caller()):
            self._jit_compile = False
            probe.note("xla-off", "a function with jit_compile=True was recorded without XLA: inside XLA nothing can be seen")


def _is_a_step(frame: Any) -> bool:
    """Return whether the program or Keras's trainer compiles this: TensorFlow and Keras compile small functions, too."""
    while frame.f_globals.get("__name__", "").startswith("tensorflow."):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    return not module.startswith(("keras.", "tf_keras.")) or ".trainer" in module or ".training" in module


def _wrap_clip(probe: Probe, name: str) -> None:
    import tensorflow as tf

    @around(tf, name)
    def clip(original: Any, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else next(kwargs[name] for name in ("t", "t_list") if name in kwargs)
        body = bodies.current()
        if body is None or _is_of_a_loss(body, value) or _is_keras_own(caller()):
            return original(*args, **kwargs)
        probe.facts.note("clipped_by", name)
        if "no-clipping" not in probe.plan.switches:
            return original(*args, **kwargs)
        return (value, tf.linalg.global_norm([v for v in value if v is not None])) if name == "clip_by_global_norm" else value


def _is_of_a_loss(body: bodies.Body, value: Any) -> bool:
    """Return whether a value is clipped on the way to a loss: while a tape records, and not a gradient."""
    import tensorflow as tf

    if not upstream.is_recording():
        return False
    ids = {id(gradient) for gradient in body.taken().values()}
    return not any(id(tensor) in ids for tensor in tf.nest.flatten(value))


def _is_keras_own(frame: Any) -> bool:
    """Return whether a loss, a metric or a layer of Keras clips (probabilities, for example)."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("tensorflow.", "keras.", "tf_keras.")) or ".optimizers" in module:
            return False
        if any(part in module for part in _CLIPPING_ELSEWHERE):
            return True
        frame = frame.f_back
    return False


def _see_gathers(probe: Probe) -> None:
    """Record which examples are a replica's own, for a step whose replicas gather each other's."""
    import tensorflow as tf

    @around(tf.distribute.ReplicaContext, "all_gather")
    def all_gather(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if bodies.current() is not None:
            probe.facts.gathers = True
        return original(self, *args, **kwargs)


def _see_values(probe: Probe, body: Any, value: Any) -> None:
    """Note variables whose sparse gradient is added up without its rows: the replicas have different ones."""
    import tensorflow as tf

    added = {id(tensor) for tensor in tf.nest.flatten(value)}
    taken = [pair for gradients, variables in body.tape for pair in zip(gradients, variables, strict=True)]
    names = [probe.names.of(variable) for gradient, variable in taken if id(getattr(gradient, "values", None)) in added]
    probe.facts.note("values_added", *names)


def _see_reductions(probe: Probe) -> None:
    """See what replicas add up, which an evaluation of their shares adds up in the same way.

    Keep the tapes' gradients for a step that sums them itself and passes equal ones to the optimizer on every replica. What it
    adds up before it takes gradients may be what the loss is made of (statistics of all rows).
    """
    import tensorflow as tf

    @around(tf.distribute.ReplicaContext, "all_reduce")
    def all_reduce(original: Any, self: Any, reduce_op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        body = bodies.current()
        if body is None:
            return original(self, reduce_op, value, *args, **kwargs)
        probe.facts.joins_gradients = probe.facts.joins_gradients or body.takes_gradients
        if not (body.taped or body.layer_depth):
            probe.facts.joins = probe.facts.joins or any(map(_is_of_numbers, tf.nest.flatten(value)))
        if body.tape:
            _see_values(probe, body, value)
            ids = {id(gradient) for gradient in body.taken().values()}
            body.reduces = body.reduces or any(id(tensor) in ids for tensor in tf.nest.flatten(value))
        return probe.functions.reduced(functools.partial(original, self), body.taped, reduce_op, value, *args, **kwargs)


def _is_of_numbers(value: Any) -> bool:
    """Return whether it is more than a count or a sum of weights."""
    return is_floating(value) and bool(value.shape.rank)


def _see_casts(probe: Probe) -> None:
    """Record casts from 32 to 16 bits: all gradients that pass them are rounded."""
    import tensorflow as tf

    @around(tf, "cast")
    def cast(original: Any, x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(x, dtype, *args, **kwargs)
        if bodies.current() is not None and result.dtype in (tf.float16, tf.bfloat16):
            given, name = getattr(x, "dtype", None), result.dtype.name
            if getattr(given, "name", given) in ("float32", "float64"):
                probe.facts.note("casts", name)
        return result


def without_clipping(probe: Probe, optimizer: Any, inner: Any) -> None:
    """Take clipping out of an optimizer."""
    if "no-clipping" not in probe.plan.switches:
        return
    for each in (optimizer, inner):
        for setting in ("clipnorm", "clipvalue", "global_clipnorm"):
            if getattr(each, setting, None) is not None:
                setattr(each, setting, None)


def install_keras(probe: Probe, package: str) -> None:
    """Install Keras's interventions: BatchNormalization, regularization, 16 bits; its loss factor in float64."""
    if package == upstream.KERAS_3:
        _scale_exactly(probe)
    batch_norm.install(package, probe.plan.switches)
    if IN_32_BITS in probe.plan.switches:
        for cls in upstream.policy_classes():
            _compute_in_32_bits(cls)
    if "no-regularization" in probe.plan.switches:
        for cls in upstream.layer_classes():
            _unregularize(cls)


def _scale_exactly(probe: Probe) -> None:
    """Compute 1 / replicas exactly: Keras 3 computes it in float32 for any loss, and 1/3 is off by 3e-8."""
    import tensorflow as tf

    module = upstream.keras_loss_module()

    @around(module, "scale_loss_for_distribution")
    def scale(original: Any, value: Any) -> Any:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if getattr(value, "dtype", None) != tf.float64 or replicas & (replicas - 1) == 0:
            return original(value)
        text = (
            f"Keras 3 rounds the factor 1/{replicas} of a float64 loss to float32 (off by up to 6e-8): the exact one was used"
        )
        probe.note_once("exact-loss-factor", text)
        return value * tf.constant(1.0 / replicas, tf.float64)


def _compute_in_32_bits(cls: Any) -> None:
    """Compute in 32 bits, and keep the policy's name, so that a loss is scaled as before."""

    @around(cls, "_parse_name")
    def parse_name(original: Any, self: Any, name: Any) -> Any:
        return tuple("float32" if dtype in ("float16", "bfloat16") else dtype for dtype in original(self, name))


def _unregularize(cls: Any) -> None:
    original = cls.losses

    def losses(self: Any) -> Any:
        return [0.0 * loss for loss in original.fget(self)]

    cls.losses = property(losses)
