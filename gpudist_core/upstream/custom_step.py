"""Give a custom step the gradients of all replicas, and warn of what it keeps of one replica's examples.

A custom step may use gradients before an optimizer does: it clips them, computes a norm, accumulates them, or assigns weights.
One replica's part of a gradient is wrong there. So a tape sums the parts at once, and the optimizer does not sum them again.
Inside a branch, loop or function of the step, collectives do not work. There a tape gives parts, and the optimizer sums them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import gradients
from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.state import PerThread
from gpudist_core.upstream import layers, patches, runtime
from gpudist_core.upstream.patches import Replacements

_trace: PerThread[_Trace | None] = PerThread(None)
_merging = PerThread(0)  # of how many replicas this thread merges gradients
Key = tuple[int, str]


def tracing() -> contextlib.AbstractContextManager[Any]:
    """Let this thread trace one replica's part of a custom step."""
    return _trace.set(_Trace())


def replacements() -> Replacements:
    """Return what lets tapes, collectives and Keras's variables know replicas."""
    from keras.src import backend
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    context = tf.distribute.ReplicaContext
    yield tf.GradientTape, "gradient", _of_all
    yield from ((context, name, _meeting) for name in ("all_reduce", "all_gather", "merge_call"))
    yield context, "all_reduce", _refusing_sums
    yield context, "merge_call", _noting_gradients
    yield from ((tf.distribute.StrategyExtended, name, _refusing_merged_sums) for name in ("reduce_to", "batch_reduce_to"))
    yield runtime, "all_reduce", _meeting
    yield backend.Variable, "_direct_assign", _looking_for_rows
    yield TFOptimizer, "_all_reduce_sum_gradients", _summing_once
    for owner, name in ((tf, "clip_by_global_norm"), (tf, "clip_by_norm"), (tf.linalg, "global_norm")):
        yield owner, name, _refusing_slices


def are_gradients_summed() -> bool:
    """Return whether the tapes of the custom step that this thread traces have summed the gradients over the replicas.

    Returns:
        False outside of a custom step on several replicas.

    Raises:
        UsageError: If some tapes have, and others could not.
    """
    trace = _current()
    if trace is not None and trace.has_sums and trace.has_parts:
        raise UsageError(
            "All tapes of a custom step must be used either outside of its branches, loops and functions, or inside",
            "Call tape.gradient outside of tf.function, tf.cond and tf.while_loop.",
            outside=True,
            inside=True,
        )
    return trace is not None and trace.has_sums


class _Trace:
    """Know the tensors of one replica's trace that are equal on all replicas, and which of them are gradients."""

    def __init__(self) -> None:
        self.has_sums = self.has_parts = False
        self.slices: dict[int, Any] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._same: dict[Key, Any] = {}
        self._gradients: dict[Key, Any] = {}

    def remember(self, value: Any, *, gradients: bool = False) -> None:
        """Note that a value is equal on all replicas: the result of a collective."""
        for tensor in tf.nest.flatten(value, expand_composites=True):
            if tf.is_symbolic_tensor(tensor):
                self._same[_key(tensor)] = tensor
                if gradients:
                    self._gradients[_key(tensor)] = tensor

    def is_of_rows(self, value: Any) -> bool:
        """Return whether a tensor depends on this replica's examples other than by gradients or collectives."""
        return any(self._is_of_the_batch(source) for source in self._sources(value))

    def is_of_gradients(self, value: Any) -> bool:
        """Return whether a tensor depends on gradients, and not on this replica's examples besides."""
        sources = list(self._sources(value))
        return any(_key(source) in self._gradients for source in sources) and not any(map(self._is_of_the_batch, sources))

    def _is_of_the_batch(self, value: Any) -> bool:
        is_argument = value.op.type == "Placeholder" and value.graph is self._graph
        return is_argument and _has_numbers(value) and _captured(value) is None

    def _sources(self, value: Any) -> Iterator[Any]:
        """Yield a tensor of a graph and all that it is computed from. What is equal on all replicas ends the search."""
        seen: set[Key] = set()
        waiting = [value]
        while waiting:
            tensor = waiting.pop()
            if not tf.is_symbolic_tensor(tensor) or _key(tensor) in seen:
                continue
            seen.add(_key(tensor))
            yield tensor
            if _key(tensor) not in self._same and _has_numbers(tensor):
                outer = _captured(tensor)
                waiting += tensor.op.inputs if outer is None else [outer]


def _current() -> _Trace | None:
    """Return the trace of a custom step on several replicas, or None."""
    share = shares.current()
    return None if share is None or share.num_replicas == 1 else _trace.value


def _of_all(
    original: Callable[..., Any], self: Any, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
) -> Any:
    trace, share = _current(), shares.current()
    flat = [] if trace is None else tf.nest.flatten(sources)
    variables = [(place, source) for place, source in enumerate(flat) if isinstance(source, (tf.Variable, keras.Variable))]
    if trace is None or share is None or not variables:
        return original(self, target, sources, output_gradients, **kwargs)
    targets = tf.nest.flatten(target)
    given = tf.nest.flatten(output_gradients) if output_gradients is not None else [tf.ones_like(t) for t in targets]
    # Of values by row a tape takes the sum, as it does on one device; one number is the mean over the replica's rows.
    seeds = [g if g.shape.rank else g * tf.cast(share.fraction, g.dtype) for g in given]
    grads = tf.nest.flatten(original(self, targets, sources, seeds, **kwargs))
    parts = [_finite_without_rows(grads[place], share) for place, _ in variables]
    if share.can_meet():
        trace.has_sums = True
        parts = gradients.sum_over_replicas(parts, [variable for _, variable in variables], differentiable=True)
        trace.remember([part for part in parts if part is not None], gradients=True)
        trace.slices |= {
            id(part): part for part, (_, source) in zip(parts, variables, strict=True) if gradients.is_sharded(source)
        }
    else:
        trace.has_parts = True
    for (place, _), part in zip(variables, parts, strict=True):
        grads[place] = part
    return tf.nest.pack_sequence_as(sources, grads)


def _finite_without_rows(gradient: Any, share: shares.Share) -> Any:
    if gradient is None:
        return None
    values = gradients.values_of(gradient)
    here = tf.cast(tf.minimum(share.rows, 1), values.dtype)
    return gradients.with_values(gradient, tf.math.multiply_no_nan(values, here))


def _meeting(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark the results of collectives as equal on all replicas."""
    value, trace = original(self, *args, **kwargs), _current()
    if trace is not None:
        trace.remember(value)
    return value


def _refusing_sums(original: Callable[..., Any], self: Any, reduce_op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse sums of gradients by a custom step, which would be as many times too large as there are replicas."""
    is_own = str(patches.caller().f_globals.get("__name__")).startswith("gpudist_core.")
    if _is_sum(reduce_op) and not is_own and _are_of_gradients(value):
        raise _summed_twice(self.num_replicas_in_sync)
    return original(self, reduce_op, value, *args, **kwargs)


def _noting_gradients(original: Callable[..., Any], self: Any, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Note that a merge call of a custom step gets gradients. The optimizers of tf_keras (2.21) sum them in one."""
    replicas = self.num_replicas_in_sync

    @functools.wraps(merge_fn)
    def merge(*args: Any, **kwargs: Any) -> Any:  # in the thread of all replicas
        with _merging.set(replicas):
            return merge_fn(*args, **kwargs)

    # TensorFlow's own call is that of a collective, which `_refusing_sums` has let pass.
    is_own = str(patches.caller().f_globals.get("__name__")).startswith(("gpudist_core.", "tensorflow."))
    return original(self, merge_fn if is_own or not _are_of_gradients(args) else merge, args, kwargs)


def _refusing_merged_sums(original: Callable[..., Any], self: Any, reduce_op: Any, *args: Any, **kwargs: Any) -> Any:
    if _merging.value and _is_sum(reduce_op):
        raise _summed_twice(_merging.value)
    return original(self, reduce_op, *args, **kwargs)


def _is_sum(reduce_op: Any) -> bool:
    return str(getattr(reduce_op, "name", reduce_op)).upper() == "SUM"


def _are_of_gradients(value: Any) -> bool:
    trace = _current()
    return trace is not None and any(map(trace.is_of_gradients, tf.nest.flatten(value, expand_composites=True)))


def _summed_twice(replicas: int) -> UsageError:
    return UsageError(
        "The gradients in a custom step are those of all replicas, and must not be summed again",
        "Leave the all_reduce out, and a division of its result by the number of replicas. Use an optimizer of Keras 3: one of "
        "tf_keras sums by itself.",
        reduce_op="SUM",
        replicas=replicas,
    )


def _summing_once(original: Callable[..., Any], self: Any, grads_and_vars: Any) -> Any:
    """Keep an optimizer that the model does not keep, and that is therefore a plain one, from summing again."""
    return list(grads_and_vars) if are_gradients_summed() else original(self, grads_and_vars)


def _refusing_slices(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse a norm of a replica's slice of a sharded table, which would be another one on each replica."""
    trace = _current()
    given = tf.nest.flatten((args, kwargs))
    if trace is not None and any(id(value) in trace.slices for value in given):
        raise UsageError(
            "A custom step must not compute the norm of a sharded table's gradient, of which each replica has a slice",
            "Use clipnorm or global_clipnorm of the optimizer.",
            function=original.__name__,
        )
    return original(*args, **kwargs)


def _looking_for_rows(assign: Callable[..., Any], self: Any, value: Any) -> Any:
    """Warn of an assigned value that depends on this replica's examples: nobody knows how to combine it over the replicas."""
    trace = _current()
    if trace is not None and layers.is_of_rows(self) and not layers.in_call_of_a_layer() and trace.is_of_rows(value):
        warnings.warn(
            "A custom step must assign the same value to a variable on all replicas. Received: "
            f"variable={self.path!r}, computed from each replica's own examples. From now on each replica has another "
            "value. Combine the values first: tf.distribute.get_replica_context().all_reduce('MEAN', value) of means "
            "over equal shares, 'SUM' of sums and counts, all_gather(rows, axis=0) of examples.",
            stacklevel=3,  # beyond the replacement and what `patches` puts around it
        )
    return assign(self, value)


def _key(value: Any) -> Key:
    return id(value.graph), value.name


def _has_numbers(value: Any) -> bool:
    return value.dtype not in (tf.resource, tf.variant, tf.string)


def _captured(value: Any) -> Any:
    """Return the outer tensor that a function has captured as this tensor, or None."""
    captures = getattr(value.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is value), None) if value.op.type == "Placeholder" else None
