"""Pass tensors by reference from a running step to the trace.

A step puts its tensors, packed into one variant, on a queue; that costs a few operations and no copy, works in eager code,
graphs, `cond` and `while`, and needs no Python callback. A thread takes them off and writes.

- Not `tf.py_function`: it takes Python's lock in the middle of a step, so that replicas wait for each other there. And a step
  that contains one cannot be evaluated without the program.
- Not the results of the program's function: it may be called by code that expects what it returns, and what is made inside of
  a `while` or a `cond` cannot leave it.
- One variant for a record, not one queue entry for a tensor: the parts of a record would mix with those of other replicas.
- By reference: TensorFlow never changes a tensor, so that what is on the queue stays as it was. The price is memory: a queue
  of large records could hold many copies of a model's gradients. So a large record takes credits, and waits until the thread
  has given enough of them back.
- What is said of a record stands beside the graph, as the *site* of a number. The number is an operand. In a graph that serves
  several virtual replicas it is chosen when the step runs.

The step after which the run ends is held by a gate: an operation at its end that waits for a permit which never comes, so that
no code after it runs and all its effects are recorded. An exception in its place would be seen by the program, which may catch
it; an exit would lose what other replicas have not handed over yet. Eager code is held in Python (`hold_if_reached`), after
the call of `Strategy.run` and not within it, because the threads of replicas take turns there; or where a step ends outside of
one.

XLA compiles no queue and no call of Python. So what is recorded in a function that XLA compiles leaves it beside its own
results (an `Outlet`), which the program gets as if there were nothing else, and is handed over after the call. What the
function is given in place of its own numbers is read before each call.
"""

from __future__ import annotations

import functools
import math
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulate import graph_functions, upstream
from emulate.imports import tf

_releases: list[Callable[[list[Any]], Any]] = []
_ATTRIBUTE = "_gpudist_outlet"


class Outlet:
    """Collect what leaves one graph that XLA compiles.

    Args:
        graph: The graph of the function.

    Attributes:
        tensors: What leaves it so far, by the number of what records it.
    """

    def __init__(self, graph: Any) -> None:
        self.graph, self.tensors = graph, dict[str, list[Any]]()
        setattr(graph, _ATTRIBUTE, self)

    def add(self, release: Callable[[list[Any]], Any], tensors: list[Any]) -> None:
        """Have `release` called after each call of the function with the values of these tensors.

        Args:
            release: What records them.
            tensors: Of the graph itself.

        Raises:
            RuntimeError: Where they are in a condition, a loop or another function of it, which they cannot leave.
        """
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise RuntimeError(
                "gpudist cannot record a step in a condition, a loop or a function inside of a function under XLA"
            )
        self.tensors[f"{len(_releases):06d}"] = [tf.identity(tensor) for tensor in tensors]
        _releases.append(release)


def outlet() -> Outlet | None:
    """Return the outlet of the graph under construction; None outside of XLA."""
    found: Outlet | None = graph_functions.found_on_graphs(_ATTRIBUTE)
    return found


def collecting(function: Callable[..., Any], *, autograph: bool) -> Callable[..., Any]:
    """Return the function of a `tf.function` that XLA compiles, with what leaves it beside its result."""

    @graph_functions.do_not_convert
    @functools.wraps(function, updated=())  # not its mark of autograph, by which TensorFlow would call it directly
    def collect(*args: Any, **kwargs: Any) -> Any:
        inner = graph_functions.convert(function, enabled=autograph)
        if outlet() is not None:  # a strategy has put it into another function that XLA compiles
            return inner(*args, **kwargs)
        own = Outlet(tf.compat.v1.get_default_graph())
        return inner(*args, **kwargs), own.tensors

    return collect


def release(returned: Any) -> Any:
    """Record what has left a function that collects, and return the function's own result."""
    result, tensors = returned
    for number, values in sorted(tensors.items()):
        _releases[int(number)](values)
    return result


Key = tuple[Any, ...]
WEIGHT_ELEMENTS = 1 << 16
"""About so many elements of a variable are kept.

A larger one is sampled where it is read: as long as its value is on the queue, TensorFlow copies the variable to update it.
"""
_SAMPLE = "sample"
QUEUE_RECORDS = 64
NUM_CREDITS = 64
CREDIT_BYTES = 8 << 20
"""Bytes of a large record for each credit. The program waits for credits, and the writer gives them back."""
MOST_MORE = 64
"""So many steps beyond the last wanted one can be allowed later."""


@dataclass(frozen=True)
class GraphSite:
    """Describe one place in the program's graphs that passes tensors."""

    kind: str
    about: dict[str, Any]
    keys: tuple[Key, ...]
    dtypes: tuple[Any, ...]
    credits: int = 0


@dataclass(frozen=True)
class Sampled:
    """Stand for a large variable.

    Attributes:
        values: Every `stride`-th element of the flattened variable.
        shape: The variable's.
        stride: One for each shape.
        digest: 64 bits that depend on all its elements.
        is_finite: Whether all its elements are.
    """

    values: NDArray[Any]
    shape: tuple[int, ...]
    stride: int
    digest: str
    is_finite: bool

    @classmethod
    def of(cls, value: Any) -> Sampled:
        """Sample an array or an eager tensor."""
        tensor = tf.convert_to_tensor(value)
        return cls.taken(tuple(tensor.shape), *map(_in_place, _sample(tensor)))

    @classmethod
    def taken(cls, shape: tuple[int, ...], values: NDArray[Any], digest: NDArray[Any], health: NDArray[Any]) -> Sampled:
        """Return what a graph has sampled."""
        return cls(values, shape, _stride(shape), digest.tobytes().hex(), not health[1])


def is_sampled(key: Key, value: Any, shards: Collection[str]) -> bool:
    """Return whether a value, an array or a tensor, is a large variable's that no replica holds a slice of."""
    if key[0] not in ("weight", "variable") or key[1] in shards or isinstance(value, Sampled):
        return False
    is_known = value.shape is not None and None not in tuple(value.shape)
    dtype = tf.as_dtype(value.dtype)  # of floats of 8 bits TensorFlow tells no health
    return is_known and math.prod(value.shape) > WEIGHT_ELEMENTS and dtype.is_floating and dtype.size > 1


def _stride(shape: Iterable[int]) -> int:
    return -(-math.prod(shape) // WEIGHT_ELEMENTS)


def _sample(value: Any) -> tuple[Any, Any, Any]:
    """Return the elements, a fingerprint and the health of a tensor, each in one pass without another copy of it."""
    flat = tf.reshape(value, [-1])
    digest = tf.raw_ops.Fingerprint(data=flat[None], method="farmhash64")
    return flat[:: _stride(value.shape)], digest, tf.raw_ops.DebugNumericSummaryV2(input=flat, tensor_debug_mode=2)


@dataclass(frozen=True)
class Record:
    """Hold the tensors of one execution of a site."""

    kind: str
    about: dict[str, Any]
    values: list[tuple[Key, Any]]


class RecordQueue:
    """Pass records from the program's threads to `handle`, in their order on this host.

    Args:
        steps: The gate holds a step with this number (counted from 1); None holds nothing.
        handle: Called on the recording thread with each record.
        on_fault: Called with a traceback when a record could not be handled; the run is worth nothing then.

    Attributes:
        made_before: Steps of each optimizer that a run made from which this one goes on.
    """

    def __init__(self, steps: int | None, handle: Callable[[Record], None], on_fault: Callable[[str], None]) -> None:
        self._steps = steps
        self._moved = threading.Condition()
        self._handle = handle
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._sites: list[GraphSite] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._queue: Any = None
        self._credits: Any = None
        self._gates: dict[tuple[str, int], Any] = {}
        self._turns: dict[tuple[str, int], int] = {}
        self._eager_steps: dict[tuple[str, int], int] = {}
        self._one_more: set[tuple[str, int]] = set()
        self.made_before: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._last: Any = None

    def hand_over(self, kind: str, about: dict[str, Any], tensors: Sequence[tuple[Key, Any]]) -> Any:
        """Record these tensors now (eager) or whenever this place of the graph is reached; returns the operation."""
        if (leaving := outlet()) is not None:
            keys = [key for key, _ in tensors]
            return leaving.add(
                lambda values: self.hand_over(kind, about, [*zip(keys, values, strict=True)]), [tensor for _, tensor in tensors]
            )
        handed = _with_samples(tensors, about.get("shards", {}))
        keys, values = [key for key, _ in handed], [value for _, value in handed]
        size = sum(_num_bytes(value) for value in values)
        needed = min(NUM_CREDITS, size // CREDIT_BYTES)
        site = GraphSite(kind, about, tuple(keys), tuple(value.dtype for value in values), needed)
        queue = self._started_queue()
        packed = upstream.pack(values or [tf.zeros([], tf.int32)])
        with graph_functions.device("CPU:0"), tf.control_dependencies([self._credit(needed)] if needed else []):
            self._last = queue.enqueue([self._place(site), packed])
            return self._last

    def _place(self, site: GraphSite) -> Any:
        """Return the number of a site: in a graph that serves virtual replicas that of the replica which runs it."""
        virtual = graph_functions.virtual_replicas()
        if virtual is None or "replica" not in site.about:
            return tf.constant(self._number(site), tf.int64)
        replica, count = virtual
        sites = [replace(site, about=site.about | {"replica": number}) for number in range(count)]
        return tf.gather(tf.constant([self._number(of_replica) for of_replica in sites], tf.int64), replica)

    def _credit(self, number: int) -> Any:
        """Wait until what is on its way leaves room for a large record."""
        with self._lock:
            if self._credits is None:
                with tf.init_scope(), graph_functions.device("CPU:0"):
                    self._credits = tf.queue.FIFOQueue(NUM_CREDITS, [tf.int32], shapes=[[]])
                    self._credits.enqueue_many([tf.zeros([NUM_CREDITS], tf.int32)])
        return self._credits.dequeue_many(number)

    def _number(self, site: GraphSite) -> int:
        identity = (site.kind, repr(site.about), site.keys, site.dtypes, site.credits)
        with self._lock:
            number = self._numbers.get(identity)
            if number is None:
                number = self._numbers[identity] = len(self._sites)
                self._sites.append(site)
            return number

    def _started_queue(self) -> Any:
        with self._lock:
            if self._queue is None:
                with tf.init_scope(), graph_functions.device("CPU:0"):
                    self._queue = tf.queue.FIFOQueue(QUEUE_RECORDS, [tf.int64, tf.variant], shapes=[[], []])
                self._thread = threading.Thread(target=self._drain, name="gpudist-recorder", daemon=True)
                self._thread.start()
            return self._queue

    def _drain(self) -> None:
        try:
            while True:
                number, packed = self._queue.dequeue()
                if int(number) < 0:
                    return
                site = self._sites[int(number)]
                # On the CPU, where the record is: on a machine with GPUs it would go through the memory of the first.
                with graph_functions.device("CPU:0"):
                    values = upstream.unpack(packed, list(site.dtypes)) if site.dtypes else []
                arrays = [*_sampled(zip(site.keys, map(_in_place, values), strict=True))]
                del values, packed
                self._handle(Record(site.kind, site.about, arrays))
                del arrays
                if site.credits:
                    self._credits.enqueue_many([np.zeros([site.credits], np.int32)])
        except Exception:  # a thread's exception is seen by nobody
            self._on_fault(traceback.format_exc())

    def gate(self, optimizer: str, replica: int, after: Any, *, one_more: bool = False) -> None:
        """Hold the step that this is the end of, if it is the last wanted one, or the one after it: in a graph by an operation.

        Args:
            optimizer: Whose step it is.
            replica: The replica's number.
            after: The operation that the step ends with.
            one_more: What the last wanted step leads to is seen in the next one.
        """
        if self._steps is None:
            return
        if (leaving := outlet()) is not None:
            # What was recorded before in the function is handed over before.
            leaving.add(lambda _: self.gate(optimizer, replica, self._last, one_more=one_more), [])
            return
        key = (optimizer, replica)
        if one_more and key not in self._one_more:
            self._allow_one_more(key)
        if tf.executing_eagerly():
            self._eager_steps[key] = self._eager_steps.get(key, self.made_before.get(optimizer, 0)) + 1
            return
        virtual = graph_functions.virtual_replicas()
        permits = self._permits(optimizer, replica, 1 if virtual is None else virtual[1])
        with graph_functions.device("CPU:0"), tf.control_dependencies([after]):
            permits.dequeue()

    def _allow_one_more(self, key: tuple[str, int]) -> None:
        """Hold the step after the last wanted one, whichever function makes it."""
        self._one_more.add(key)
        self._eager_steps[key] = self._eager_steps.get(key, self.made_before.get(key[0], 0)) - 1
        virtual = graph_functions.virtual_replicas()
        count = 1 if virtual is None else virtual[1]
        permits = self._permits(*key, count)
        with tf.init_scope(), graph_functions.device("CPU:0"):
            permits.enqueue_many([tf.zeros([count], tf.int32)])

    def _permits(self, optimizer: str, replica: int, count: int = 1) -> Any:
        """Return what each of so many replicas takes a permit from in each step: the last one finds none in the last."""
        with self._lock:
            assert self._steps is not None
            left = max(1, self._steps - self.made_before.get(optimizer, 0))
            permits = self._gates.get((optimizer, replica))
            if permits is None:
                with tf.init_scope(), graph_functions.device("CPU:0"):
                    permits = tf.queue.FIFOQueue((left + MOST_MORE) * count, [tf.int32], shapes=[[]])
                    if left * count > 1:
                        permits.enqueue_many([tf.zeros([left * count - 1], tf.int32)])
                self._gates[(optimizer, replica)] = permits
                self._turns[(optimizer, replica)] = count
            return permits

    def hold_if_reached(self) -> None:
        """Stop eager code: wait forever after the step with the last wanted number."""
        with self._moved:
            self._moved.wait_for(lambda: self._steps is None or all(step < self._steps for step in self._eager_steps.values()))

    def go_on_to(self, steps: int) -> None:
        """Hold a later step instead; steps that are held now go on.

        Args:
            steps: The last wanted step, at most `MOST_MORE` later than the one before.
        """
        assert self._steps is not None
        with self._lock, self._moved:
            more, self._steps = steps - self._steps, steps
            with tf.init_scope(), graph_functions.device("CPU:0"):
                for key, permits in self._gates.items() if more else ():
                    permits.enqueue_many([tf.zeros([more * self._turns[key]], tf.int32)])
            self._moved.notify_all()

    def finish(self) -> None:
        """Wait until everything handed over so far was written, and stop the thread."""
        if self._thread is None:
            return
        with tf.init_scope(), graph_functions.device("CPU:0"):
            packed = upstream.pack([tf.zeros([], tf.int32)])
            self._queue.enqueue([tf.constant(-1, tf.int64), packed])
        self._thread.join()


def _with_samples(tensors: Sequence[tuple[Key, Any]], shards: Collection[str]) -> list[tuple[Key, Any]]:
    """Return what is handed over: in place of a large variable its sample, in three tensors."""
    handed: list[tuple[Key, Any]] = []
    with graph_functions.device("CPU:0"):
        for key, tensor in tensors:
            value = tf.convert_to_tensor(tensor)
            if is_sampled(key, value, shards):
                handed += [((_SAMPLE, key, tuple(value.shape)), part) for part in _sample(value)]
            else:
                handed.append((key, value))
    return handed


def _sampled(handed: Iterable[tuple[Key, NDArray[Any]]]) -> Iterator[tuple[Key, Any]]:
    """Yield what was handed over, a sample in place of its three tensors."""
    arrived = iter(handed)
    for key, value in arrived:
        if key[0] == _SAMPLE:
            (_, digest), (_, health) = next(arrived), next(arrived)
            yield key[1], Sampled.taken(key[2], value, digest, health)
        else:
            yield key, value


def _in_place(tensor: Any) -> NDArray[Any]:
    """Return the numbers of a tensor, without a copy where NumPy knows the dtype."""
    try:
        return np.asarray(memoryview(tensor))
    except ValueError:  # bfloat16
        return np.asarray(tensor.numpy())


def _num_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, as far as they are known before the graph runs."""
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size or 0)
