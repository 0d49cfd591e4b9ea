"""Change what a program computes in a re-run, so that the absence of a suspected cause confirms it.

A program on one device reads other numbers of replicas and workers, and another replica's number. Suspected causes are switched
off; and XLA, which hides tensors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import numbers
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from emulate import graph_functions
from emulate.probe import batch_norm, upstream
from emulate.probe import replica_call as bodies
from emulate.probe.plan import IN_32_BITS, Replay
from emulate.probe.point import around, caller
from emulate.probe.upstream import is_floating

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

_NO_HOST = "no-worker.invalid"
_KNOWS_BETTER = ("tensorflow.", "keras.", "tf_keras.", "emulate.", "gpudist_core.")

_number = threading.local()


def install_numbers(replay: Replay) -> None:
    """Tell the program, and what scales losses for it, how many replicas there are; TensorFlow itself knows better.

    Where TF_CONFIG is set, it has so many workers for the program.
    """
    if replay.workers > 1 and "TF_CONFIG" in os.environ:
        _tell_of_workers(replay.workers)
    for cls in upstream.replica_counters():
        if replay.told > 1:
            _wrap_counter(cls, replay.told, scales_losses=True)
        elif replay.batch_of > 1:
            _wrap_counter(cls, ReplicaCount(replay.batch_of), scales_losses=False)


def see_numbers(asked: Callable[[], None]) -> None:
    """Answer the program when it asks for its replica's number.

    Args:
        asked: Called when it does.
    """
    cls = upstream.numbered()
    original = cls.replica_id_in_sync_group.fget

    def replica_id_in_sync_group(self: Any) -> Any:
        if _module_above().startswith(_KNOWS_BETTER):
            return original(self)
        asked()
        number = getattr(_number, "told", None)
        return original(self) if number is None else _as_tensor(number)

    cls.replica_id_in_sync_group = property(replica_id_in_sync_group, doc=cls.replica_id_in_sync_group.__doc__)


def see_counts(asked: Callable[[], None]) -> None:
    """Have it seen when the program asks for the number of replicas.

    Args:
        asked: Called when it does.
    """
    for cls in upstream.replica_counters():
        original = cls.num_replicas_in_sync.fget

        def num_replicas_in_sync(self: Any, _original: Callable[[Any], Any] = original) -> Any:
            if not _module_above().startswith(_KNOWS_BETTER):
                asked()
            return _original(self)

        cls.num_replicas_in_sync = property(num_replicas_in_sync, doc=cls.num_replicas_in_sync.__doc__)


@contextlib.contextmanager
def numbered(number: int | None) -> Iterator[None]:
    """Set the number that this thread's replica step reads; None for its own."""
    outer = getattr(_number, "told", None)
    _number.told = number
    try:
        yield
    finally:
        _number.told = outer


def _as_tensor(number: int) -> Any:
    import tensorflow as tf

    return tf.constant(number, tf.int32)


def _module_above() -> str:
    """Return the module that reads the calling property."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _wrap_counter(cls: Any, told: Any, *, scales_losses: bool) -> None:
    original = cls.num_replicas_in_sync.fget

    def num_replicas_in_sync(self: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_told = scales_losses and caller.startswith(upstream.LOSS_SCALERS)
        return original(self) if caller.startswith(_KNOWS_BETTER) and not is_told else told

    cls.num_replicas_in_sync = property(num_replicas_in_sync, doc=cls.num_replicas_in_sync.__doc__)


def _tell_of_workers(number: int) -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config.get("cluster", {}).get("worker", [])
    config["cluster"]["worker"] = [*workers, *(f"{_NO_HOST}:{k}" for k in range(1, number - len(workers) + 1))]
    text = json.dumps(config)
    base: Any = type(os.environ)

    class Told(base):
        __slots__ = ()  # else Python refuses to change the class of os.environ

        def __getitem__(self, name: Any) -> Any:
            if name == "TF_CONFIG" and not _module_that_asks().startswith(_KNOWS_BETTER):
                return text
            return super().__getitem__(name)

    os.environ.__class__ = Told
    _refuse_workers_that_are_not_there()


def _module_that_asks() -> str:
    """Return the module that reads the environment, also through Python's own modules."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _refuse_workers_that_are_not_there() -> None:
    """Make a program fail at once that builds a cluster from such a number, instead of waiting for it."""
    import tensorflow as tf

    cls: Any = tf.train.ClusterSpec
    original = cls.__init__  # not by `around`, which would keep the error from the program

    @functools.wraps(original)
    def init(self: Any, cluster: Any) -> None:
        if _NO_HOST in str(cluster):
            raise RuntimeError("The program makes a cluster of TF_CONFIG itself, so it cannot be told of other workers.")
        original(self, cluster)

    cls.__init__ = init


class ReplicaCount:
    """Represent a number of replicas that only enlarges a batch.

    A program asks for the number for two ends: what it multiplies grows with the batch (its rows, a learning rate), and what it
    divides makes up for the replicas that are added up. One device that has the rows of all needs the former alone. So this is
    the number wherever Python computes with it, but for a division by it; there, and where it becomes a tensor, it is 1.

    Args:
        number: The number of replicas.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __rtruediv__(self, other: Any) -> Any:
        return other / 1

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        import tensorflow as tf

        return tf.constant(1, dtype or tf.int32, name=name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        divides = ufunc.__name__ in ("divide", "true_divide")
        plain = [(1 if divides and at else int(value)) if value is self else value for at, value in enumerate(inputs)]
        return getattr(ufunc, method)(*plain, **options)

    def __array__(self, *args: Any, **options: Any) -> Any:
        import numpy as np

        return np.array(self._number, *args, **options)

    def __index__(self) -> int:
        return self._number

    def __int__(self) -> int:
        return self._number

    def __float__(self) -> float:
        return float(self._number)

    def __bool__(self) -> bool:
        return bool(self._number)

    def __hash__(self) -> int:
        return hash(self._number)

    def __repr__(self) -> str:
        return repr(self._number)

    def __format__(self, spec: str) -> str:
        return format(self._number, spec)

    def _beside(self, other: Any) -> int:
        import tensorflow as tf

        return 1 if tf.is_tensor(other) or isinstance(other, tf.Variable) else self._number


def _left(name: str) -> Callable[[ReplicaCount, Any], Any]:
    apply = getattr(operator, name)
    return lambda self, other: apply(self._beside(other), other)


def _right(name: str) -> Callable[[ReplicaCount, Any], Any]:
    apply = getattr(operator, name)
    return lambda self, other: apply(other, self._beside(other))


for _operator in ("add", "sub", "mul", "floordiv", "mod", "pow"):
    setattr(ReplicaCount, f"__{_operator}__", _left(_operator))
    setattr(ReplicaCount, f"__r{_operator}__", _right(_operator))
for _operator in ("truediv", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ReplicaCount, f"__{_operator}__", _left(_operator))
numbers.Integral.register(ReplicaCount)


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
        probe.facts.add("clipped_by", name)
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
    probe.facts.add("values_added", *names)


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
            # A tensor without a rank is a count or a sum of weights.
            tensors = tf.nest.flatten(value)
            probe.facts.joins = probe.facts.joins or any(is_floating(one) and bool(one.shape.rank) for one in tensors)
        if body.tape:
            _see_values(probe, body, value)
            ids = {id(gradient) for gradient in body.taken().values()}
            body.reduces = body.reduces or any(id(tensor) in ids for tensor in tf.nest.flatten(value))
        return probe.functions.reduced(functools.partial(original, self), body.taped, reduce_op, value, *args, **kwargs)


def _see_casts(probe: Probe) -> None:
    """Record casts from 32 to 16 bits: all gradients that pass them are rounded."""
    import tensorflow as tf

    @around(tf, "cast")
    def cast(original: Any, x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(x, dtype, *args, **kwargs)
        if bodies.current() is not None and result.dtype in (tf.float16, tf.bfloat16):
            given, name = getattr(x, "dtype", None), result.dtype.name
            if getattr(given, "name", given) in ("float32", "float64"):
                probe.facts.add("casts", name)
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
