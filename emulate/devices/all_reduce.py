"""Choose how replicas are summed: by an operation that works on logical CPUs and runs every program that GPUs would run.

TensorFlow's default, a collective, fails on logical CPUs inside `cond` and `while` (`steps_per_execution`, an optimizer built
inside a tf.function), and one failed collective poisons the process. On GPUs that are whole TensorFlow and the program choose;
slices of GPUs are treated as CPUs are, because NCCL refuses two ranks on one GPU.

It runs some sums more that TensorFlow 2.21 refuses on whole GPUs, which are told. There it sums by collectives unless a program
chooses otherwise. Their keys are lost where a function that sums is called in a condition or a loop (install.py; it is Python
that loses them, on any device), and they take neither int32 nor bfloat16 of GPUs (`Collective all-reduce does not support
datatype DT_INT32 on DEVICE_GPU`).
"""

from __future__ import annotations

import weakref
from typing import Any

from emulate.devices import upstream
from emulate.devices.config import calling_module
from emulate.devices.plan import DevicePlan, Note
from emulate.devices.virtual.replicas import in_ring_order
from emulate.graph_functions import collective_launcher
from emulate.imports import tf
from emulate.point import instead_of
from emulate.upstream import control_flow_root

_KEYS_APART = 10_000  # more than the collective groups that one strategy makes
_ASKS_BY_DEFAULT = "tensorflow.python.distribute.mirrored_strategy"  # whatever the program asked for
_NAMES = {
    "ReductionToOneDevice": "one-device",
    "HierarchicalCopyAllReduce": "hierarchical",
    "InRingOrder": "ring",
    "NcclAllReduce": "nccl",
}
_in_use = "none"
_num_strategies = 0


def all_reduce_in_use() -> str:
    """Return how replicas are summed in this process.

    Returns:
        `ring`, `hierarchical`, `one-device`, on GPUs also `nccl`, or `none` before there is a strategy.
    """
    return _in_use


class AllReduceChoice:
    """Choose the all-reduce for each strategy of a host.

    Args:
        plan: What the host was given, with the user's wish.
        note: Says where a program's own choice cannot be had.

    Attributes:
        refused: Tells what TensorFlow's own choice would refuse on whole GPUs.
    """

    def __init__(self, plan: DevicePlan, note: Note) -> None:
        self._wish = "ring" if plan.is_virtual else plan.all_reduce
        self._is_virtual = plan.is_virtual
        self._is_nccl_possible = plan.gpus is not None and not plan.gpus.may_share_gpus
        if plan.gpus is None:
            self._why_not = "runs on GPUs only"
        else:
            self._why_not = "refuses two ranks on one GPU" if plan.gpus.may_share_gpus else "gives way to --all-reduce ring"
        self._note = note
        self.refused = RefusedOnGpus(note)

    @property
    def replaces(self) -> bool:
        """Return whether TensorFlow's own choice is impossible here, or not wanted."""
        return not self._is_nccl_possible or self._wish == "ring"

    def for_multi_worker(self, extended: Any) -> None:
        """Replace the ring of a MultiWorkerMirroredStrategy that runs on one host."""
        if extended._num_workers > 1:
            if self._wish not in ("auto", "ring"):
                by = {"ring": "a ring", "nccl": "NCCL"}[_collective(extended)]
                self._say(f"several hosts are summed by {by}: --all-reduce {self._wish} holds on one host only")
            if self.replaces:
                self.refused.see_collectives(extended._cross_device_ops)
            _remember(_collective(extended))
            return
        chosen = self.on_one_host(None, len(extended.worker_devices))
        if chosen is not None:
            extended._cross_device_ops = chosen
        self.remember(extended)

    def remember(self, extended: Any) -> None:
        """Record how a strategy sums that was made on this host alone."""
        name = type(extended._cross_device_ops).__name__
        in_use = _collective(extended) if name == "CollectiveAllReduce" else _NAMES.get(name, name)
        _remember(in_use if len(extended.worker_devices) > 1 else "none")

    def new_keys(self, owner: Any) -> None:
        """Give a strategy collective keys of its own.

        A second strategy of another size would otherwise abort all collectives of the process.
        """
        global _num_strategies
        _num_strategies += 1
        owner._collective_key_base = _num_strategies * _KEYS_APART

    def without_nccl(self) -> None:
        """Replace NCCL by the ring in options: NCCL has no kernels for CPUs and refuses slices of one GPU."""

        @instead_of(upstream.communication_options(), "__init__")
        def init(real: Any, options: Any, *args: Any, **kwargs: Any) -> None:
            real(options, *args, **kwargs)
            if options.implementation.name == "NCCL":
                if calling_module(2) != _ASKS_BY_DEFAULT:
                    self._say(f"NCCL {self._why_not}: the ring is used here")
                options.implementation = type(options.implementation).RING

    def on_one_host(self, asked: Any, num_devices: int) -> Any:
        """Return the cross-device operation for a strategy of one host. None means TensorFlow's default.

        NCCL, or else the ring.
        """
        chosen = self._chosen(asked, num_devices)
        return chosen if chosen is None or chosen is asked or self._is_virtual else _ending_walks(chosen)

    def _chosen(self, asked: Any, num_devices: int) -> Any:
        ops = upstream.cross_device_ops()
        if self._wish == "auto" and self._is_nccl_possible:
            return asked
        if self._wish == "auto":
            if getattr(asked, "chosen_automatically", False):
                return ops.ReductionToOneDevice()
            if isinstance(asked, ops.NcclAllReduce):
                self._say(f"NcclAllReduce {self._why_not}: ReductionToOneDevice is used here")
                return ops.ReductionToOneDevice()
            return asked or self.refused.see_reduction(ops.ReductionToOneDevice())
        if asked is not None and not getattr(asked, "chosen_automatically", False):
            used = (
                "virtual replicas are summed in the ring's order" if self._is_virtual else f"--all-reduce {self._wish} is used"
            )
            self._say(f"the program asks for {type(asked).__name__}: {used} instead")
        if self._wish == "hierarchical" and num_devices % 2:
            # TensorFlow 2.21 makes two groups of half the devices, rounded down.
            self._say(f"HierarchicalCopyAllReduce loses one of {num_devices} devices: ReductionToOneDevice is used instead")
            return ops.ReductionToOneDevice()
        if self._is_virtual:
            return in_ring_order()
        return {"ring": lambda: None, "hierarchical": ops.HierarchicalCopyAllReduce}.get(self._wish, ops.ReductionToOneDevice)()

    def _say(self, text: str) -> None:
        self._note("all-reduce", text)


def _ending_walks(operation: Any) -> Any:
    """Wrap an operation so that TensorFlow 2.21 does not search for variables behind its sums, as it does for custom gradients.

    Behind a collective there is the replica's own tensor, behind a sum of tensors the graphs of all replicas: it walks through
    them for each sum in the step, in time that grows with the square of their size. A MobileNet whose batch normalizations are
    synchronized was traced for more than ten minutes.
    """

    def ended(sums: Any) -> Any:
        values = getattr(sums, "values", None)
        if not isinstance(values, tuple) or not all(isinstance(value, tf.Tensor) for value in values):
            return sums
        stopped = []
        for value in values:
            with tf.device(value.device):
                stopped.append(tf.stop_gradient(value))
        return type(sums)(stopped)

    @instead_of(operation, "batch_reduce")
    def batch_reduce(real: Any, *args: Any, **kwargs: Any) -> Any:
        return [ended(sums) for sums in real(*args, **kwargs)]

    return operation


def _collective(extended: Any) -> str:
    """Return the collectives of a strategy: TensorFlow 2.21 uses NCCL on request, and the ring for AUTO."""
    return "nccl" if extended._communication_options.implementation.name == "NCCL" else "ring"


def _remember(name: str) -> None:
    global _in_use
    _in_use = name


IN_A_BRANCH = (
    "A sum over the replicas is inside of a condition or a loop (steps_per_execution, or an optimizer that creates its "
    "variables in a tf.function). It works here, but TensorFlow's collectives, which sum on whole GPUs and between hosts by "
    "default, fail: You must feed a value for placeholder tensor. Call optimizer.build(model.trainable_variables) in the "
    "scope, before the first step. On one host MirroredStrategy(cross_device_ops=tf.distribute.ReductionToOneDevice()) works "
    "too"
)
OF_DTYPE = (
    "Replicas are summed in {dtype}. It works here, but TensorFlow's collectives, which sum on whole GPUs by default, fail: "
    "Collective all-reduce does not support datatype {name} on DEVICE_GPU. Cast to {wide} before the sum"
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

        @instead_of(upstream.concrete_function_class(), "_call_flat")
        def called(call: Any, traced: Any, *args: Any, **kwargs: Any) -> Any:
            if traced.graph in self._summing:
                self._sums_in(upstream.function_being_built())
            return call(traced, *args, **kwargs)

        @instead_of(collective_launcher(), "all_reduce")
        def reduced(all_reduce: Any, replica_launcher: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if replica_launcher in self._launchers:
                self._see_dtype(input_tensor, "int32", "bfloat16")
            return all_reduce(replica_launcher, input_tensor, *args, **kwargs)

    def see_collectives(self, operation: Any) -> None:
        """Record what sums over the devices of a strategy of several hosts, apart from what sums values of the hosts."""
        self._launchers.update(operation._launchers)

    def see_reduction(self, operation: Any) -> Any:
        """Follow what stands for TensorFlow's own choice on one host, which sums int32 in the host's memory."""

        def reduce(real: Any, reduce_op: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            self._sums_in(control_flow_root(upstream.function_being_built()))
            for value in upstream.reduced_values(values):
                self._see_dtype(value, "bfloat16")
            return real(reduce_op, values, *args, **kwargs)

        for name in ("reduce_implementation", "batch_reduce_implementation"):
            instead_of(operation, name)(reduce)
        return operation

    def _sums_in(self, graph: Any) -> None:
        """Record that a graph sums, or calls a function that does."""
        if graph is None:
            return
        if control_flow_root(graph) is not graph:
            self.say_in_a_branch()
        self._summing.add(control_flow_root(graph))

    def _see_dtype(self, value: Any, *refused: str) -> None:
        dtype = getattr(value, "dtype", None)
        if dtype is not None and dtype.name in refused:
            name = f"DT_{dtype.name.upper()}"
            self._note("sum-of-dtype", OF_DTYPE.format(dtype=dtype.name, name=name, wide=_WIDER[dtype.name]))

    def say_in_a_branch(self) -> None:
        """Say that a function which sums is called in a condition or a loop."""
        self._note("sum-in-a-branch", IN_A_BRANCH)
