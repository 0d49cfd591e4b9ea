"""See operations of a step that decide how it may be compared: clipping, casts to 16 bits, what replicas gather and add up.

XLA, inside of which nothing can be seen, is off for a step; and Keras's factor of a float64 loss is exact.
"""

from __future__ import annotations

import functools
from typing import Any

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.point import around, caller
from emulate.recorder import Body, Recorder, collecting, current_body, release
from emulate.upstream import is_floating

CLIPS = ("clip_by_norm", "clip_by_global_norm", "clip_by_value")
_WITHOUT_XLA = 0
"""In place of `jit_compile=True`: a clone of the function keeps it, and no program gives it."""
_XLA_OFF = "a function with jit_compile=True was recorded without XLA: inside XLA nothing can be seen"
_CLIPPING_ELSEWHERE = (".losses", ".metrics", ".layers", ".nn", ".activations", ".image", ".constraints")


def install(recorder: Recorder) -> None:
    """Wrap what tells how a step computes: clipping, casts, what replicas gather and add up; keep it out of XLA."""

    @around(graph_functions.function_class(), "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not (self._jit_compile and _is_a_step(caller())):
            return
        if recorder.plan.keeps_xla:
            graph_functions.wrap_traced(self, collecting)
            recorder.note_once("compared-under-xla", "what runs under XLA was compared by what it returns: gradients, updates")
            return
        self._jit_compile = _WITHOUT_XLA  # XLA cannot pass tensors out

    @around(graph_functions.function_class(), graph_functions.TRACES_FIRST)  # packages make functions that nobody calls
    def initialize(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._jit_compile is _WITHOUT_XLA:
            recorder.note_once("xla-off", _XLA_OFF)
        return original(self, *args, **kwargs)

    if recorder.plan.keeps_xla:

        @around(graph_functions.function_class(), "__call__")
        def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if hasattr(self, "_gpudist_wrapped"):
                result = release(result)
                if tf.executing_eagerly():
                    recorder.queue.hold_if_reached()
            return result

    for name in CLIPS:
        _wrap_clip(recorder, name)

    @around(graph_functions.load("tensorflow"), "cast")
    def cast(original: Any, x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(x, dtype, *args, **kwargs)
        if current_body() is not None and result.dtype in (tf.float16, tf.bfloat16):
            given, name = getattr(x, "dtype", None), result.dtype.name
            if getattr(given, "name", given) in ("float32", "float64"):
                recorder.facts.add("casts", name)  # all gradients that pass it are rounded
        return result

    @around(tf.distribute.ReplicaContext, "all_gather")
    def all_gather(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_body() is None:
            return original(self, *args, **kwargs)
        recorder.facts.gathers = True  # which examples are a replica's own then has to be known
        return recorder.functions.gathered(functools.partial(original, self), *args, **kwargs)

    _see_reductions(recorder)


def _is_a_step(frame: Any) -> bool:
    """Return whether the program or Keras's trainer compiles this: TensorFlow and Keras compile small functions, too."""
    while frame.f_globals.get("__name__", "").startswith("tensorflow."):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    return not module.startswith(("keras.", "tf_keras.")) or ".trainer" in module or ".training" in module


def _wrap_clip(recorder: Recorder, name: str) -> None:
    @around(graph_functions.load("tensorflow"), name)
    def clip(original: Any, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else next(kwargs[name] for name in ("t", "t_list") if name in kwargs)
        body = current_body()
        if body is None or _are_weights(value) or _is_of_a_loss(body, value) or _is_keras_own(caller()):
            return original(*args, **kwargs)
        recorder.facts.add("clipped_by", name)
        if "no-clipping" not in recorder.plan.switches:
            return original(*args, **kwargs)
        return (value, tf.linalg.global_norm([v for v in value if v is not None])) if name == "clip_by_global_norm" else value


def _are_weights(value: Any) -> bool:
    """Return whether weights are clipped, as a critic's are. Sums of gradients are kept in variables that nobody trains."""
    return all(getattr(one, "trainable", False) for one in tf.nest.flatten(value))


def _is_of_a_loss(body: Body, value: Any) -> bool:
    """Return whether a value is clipped on the way to a loss: while a tape records, and not a gradient."""
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


def _see_reductions(recorder: Recorder) -> None:
    """See what replicas add up, which an evaluation of their shares adds up in the same way.

    Keep the tapes' gradients for a step that sums them itself and passes equal ones to the optimizer on every replica. What it
    adds up before it takes gradients may be what the loss is made of (statistics of all rows).
    """

    @around(tf.distribute.ReplicaContext, "all_reduce")
    def all_reduce(original: Any, self: Any, reduce_op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        body = current_body()
        if body is None:
            return original(self, reduce_op, value, *args, **kwargs)
        recorder.facts.joins_gradients = recorder.facts.joins_gradients or body.takes_gradients
        if not (body.taped or body.layer_depth):
            # A tensor without a rank is a count or a sum of weights.
            tensors = tf.nest.flatten(value)
            recorder.facts.joins = recorder.facts.joins or any(is_floating(one) and bool(one.shape.rank) for one in tensors)
        if body.tape:
            added = {id(tensor) for tensor in tf.nest.flatten(value)}
            taken = [pair for gradients, variables in body.tape for pair in zip(gradients, variables, strict=True)]
            # A sparse gradient that is added up without its rows, of which the replicas have different ones.
            sparse = [variable for gradient, variable in taken if id(getattr(gradient, "values", None)) in added]
            recorder.facts.add("values_added", *map(recorder.names.of, sparse))
            body.reduces = body.reduces or any(id(gradient) in added for gradient in body.taken().values())
        return recorder.functions.reduced(functools.partial(original, self), body.taped, reduce_op, value, *args, **kwargs)


def scale_exactly(recorder: Recorder) -> None:
    """Compute 1 / replicas exactly: Keras 3 computes it in float32 for any loss, and 1/3 is off by 3e-8."""

    @around(upstream.keras_loss_module(), "scale_loss_for_distribution")
    def scale(original: Any, value: Any) -> Any:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if getattr(value, "dtype", None) != tf.float64 or replicas & (replicas - 1) == 0:
            return original(value)
        text = (
            f"Keras 3 rounds the factor 1/{replicas} of a float64 loss to float32 (off by up to 6e-8): the exact one was used"
        )
        recorder.note_once("exact-loss-factor", text)
        return value * tf.constant(1.0 / replicas, tf.float64)
