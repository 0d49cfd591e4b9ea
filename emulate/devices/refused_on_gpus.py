"""Detect sums over the replicas that run here and that TensorFlow 2.21 refuses on whole GPUs.

There it sums by collectives unless a program chooses otherwise. Their keys are lost where a function that sums is called in a
condition or a loop (deferred_captures.py; it is Python that loses them, on any device), and they take neither int32 nor
bfloat16 of GPUs (`Collective all-reduce does not support datatype DT_INT32 on DEVICE_GPU`).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from emulate.devices import upstream
from emulate.devices.plan import Note

IN_A_BRANCH = (
    "A sum over the replicas is inside of a condition or a loop (steps_per_execution, or an optimizer that creates its "
    "variables in a tf.function). It works here, but TensorFlow's collectives, which sum on whole GPUs and between hosts by "
    "default, fail: You must feed a value for placeholder tensor. Call optimizer.build(model.trainable_variables) in the "
    "scope, before the first step. On one host MirroredStrategy(cross_device_ops=tf.distribute.ReductionToOneDevice()) works "
    "too"
)
OF_DTYPE = (
    "Replicas are summed in {dtype}. It works here, but TensorFlow's collectives, which sum on whole GPUs by default, "
    "fail: Collective all-reduce does not support datatype {name} on DEVICE_GPU. Cast to {wide} before the "
    "sum"
)
_WIDER = {"int32": "int64 (or a float)", "bfloat16": "float32"}


class RefusedOnGpus:
    """Follow sums, and the functions that make them.

    Args:
        note: Says what would be refused.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._summing: weakref.WeakSet[Any] = weakref.WeakSet()
        self._launchers: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        """Look at calls of functions and at collectives; once in a process."""
        function, launcher = upstream.concrete_function_class(), upstream.replica_launcher_class()
        call, all_reduce = function._call_flat, launcher.all_reduce

        @functools.wraps(call)
        def called(traced: Any, *args: Any, **kwargs: Any) -> Any:
            if traced.graph in self._summing:
                self._sums_in(upstream.function_being_built())
            return call(traced, *args, **kwargs)

        @functools.wraps(all_reduce)
        def reduced(replica_launcher: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if replica_launcher in self._launchers:
                self._see_dtype(input_tensor, "int32", "bfloat16")
            return all_reduce(replica_launcher, input_tensor, *args, **kwargs)

        function._call_flat, launcher.all_reduce = called, reduced

    def see_collectives(self, operation: Any) -> None:
        """Record what sums over the devices of a strategy of several hosts, apart from what sums values of the hosts."""
        self._launchers.update(operation._launchers)

    def see_reduction(self, operation: Any) -> Any:
        """Follow what stands for TensorFlow's own choice on one host, which sums int32 in the host's memory."""
        for name in ("reduce_implementation", "batch_reduce_implementation"):
            setattr(operation, name, self._seen(getattr(operation, name)))
        return operation

    def _seen(self, real: Any) -> Any:
        @functools.wraps(real)
        def reduce(reduce_op: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            self._sums_in(_around(upstream.function_being_built()))
            for value in upstream.reduced_values(values):
                self._see_dtype(value, "bfloat16")
            return real(reduce_op, values, *args, **kwargs)

        return reduce

    def _sums_in(self, graph: Any) -> None:
        """Record that a graph sums, or calls a function that does."""
        if graph is None:
            return
        if _around(graph) is not graph:
            self.say_in_a_branch()
        self._summing.add(_around(graph))

    def _see_dtype(self, value: Any, *refused: str) -> None:
        dtype = getattr(value, "dtype", None)
        if dtype is not None and dtype.name in refused:
            name = f"DT_{dtype.name.upper()}"
            self._note("all-reduce", OF_DTYPE.format(dtype=dtype.name, name=name, wide=_WIDER[dtype.name]))

    def say_in_a_branch(self) -> None:
        """Say that a function which sums is called in a condition or a loop."""
        self._note("all-reduce", IN_A_BRANCH)


def _around(graph: Any) -> Any:
    """Return the function around the conditions and loops of a graph."""
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph
