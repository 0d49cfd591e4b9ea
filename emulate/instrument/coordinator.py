"""Run what a program schedules on parameter-server workers one after the other, so that runs can be compared.

TensorFlow gives a function to whichever worker is free. Here the workers have them in turn, and each waits until the one before
is done: the updates are those that one worker would make with the same rows. Whether a program leaves the order to chance (it
schedules updates without waiting for them) is remembered.

The queue that is wrapped is private to TensorFlow (2.21): a test (`tests/emulate/probe/test_upstream.py`) fails when it is
another one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, final

from emulate import upstream
from emulate.imports import tf
from emulate.interventions import permuted
from emulate.point import around
from emulate.recorder import Recorder, tensors_of
from emulate.recorder.coordinated import Coordinated, processing

MOST_APART = 256
"""So many functions whose gradients are applied together have numbers of their own."""


def install(recorder: Recorder) -> None:
    """Wrap the coordinator, its queue and what it returns."""
    names = upstream.coordination()
    _take_turns(names)
    _see_closures(recorder, names)
    _see_waits(recorder, names)

    @around(tf.distribute.ParameterServerStrategy, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder.strategy_seen(self)  # even if this process never runs a step with it


def _see_closures(recorder: Recorder, names: SimpleNamespace) -> None:
    @around(names.closure, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if isinstance(self, names.resource_closure):
            return  # a dataset of a worker's own, or its iterator
        graph = self._concrete_function.graph
        self._gpudist_number = recorder.coordinated.scheduled(graph)
        if recorder.coordinated.makes_gradients_of_its_arguments(graph):
            if recorder.plan.permute:  # a noise run gets the examples in another order
                self._args, self._kwargs = permuted(recorder.plan.noise_seed, self._args, self._kwargs)
            values = enumerate(tf.nest.flatten((self._args, self._kwargs)))
            tensors = [part for position, value in values for part in tensors_of(position, value)]
            if tensors:
                about = {"replica": self._gpudist_number % MOST_APART, "taped": True, "kept_by": None}
                recorder.queue.hand_over("run", about, tensors)


def _see_waits(recorder: Recorder, names: SimpleNamespace) -> None:
    """Know what the program waits for: all (`join`, `done`), or one value (`fetch`, `get`)."""
    for name, is_over in (("join", lambda _: True), ("done", bool)):
        _wrap_wait(names.coordinator, name, is_over, recorder.coordinated)

    @around(names.closure, "build_output_remote_value")
    def build_output_remote_value(build: Any, self: Any) -> Any:
        value = build(self)
        value._gpudist_number = getattr(self, "_gpudist_number", None)
        return value

    @around(names.worker, "_process_closure")
    def process_closure(process: Any, self: Any, closure: Any) -> None:
        with processing.set(True):  # the worker's own thread brings the value too
            process(self, closure)

    for name in ("fetch", "get"):
        _wrap_value(names.remote_value, name, recorder.coordinated)


def _wrap_wait(cls: Any, name: str, is_over: Callable[[Any], bool], coordinated: Coordinated) -> None:
    @around(cls, name)
    def wait(original: Any, self: Any) -> Any:
        result = original(self)
        if is_over(result):
            coordinated.waited_for()
        return result


def _wrap_value(cls: Any, name: str, coordinated: Coordinated) -> None:
    @around(cls, name)
    def value(original: Any, self: Any) -> Any:
        result = original(self)
        number = getattr(self, "_gpudist_number", None)
        if number is not None:
            coordinated.waited_for(number)
        return result


def _take_turns(names: SimpleNamespace) -> None:
    """Have the queue give each function to the worker whose turn it is, once nothing else is done."""
    queue = names.queue

    @around(names.cluster, "__init__")
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.closure_queue._gpudist_turns = WorkerTurns(len(self.workers))

    def get(self: Any, timeout: float | None = None, tag: int | None = None) -> Any:
        with self._queue_lock:
            while self._should_process_closures and not (_has_own(self, tag) or _has_turn(self, tag)):
                if not self._closures_queued_condition.wait(timeout=timeout):
                    return None
            if not self._should_process_closures:
                return None
            if _has_own(self, tag):
                return self._tagged_queue[tag].get(block=False)
            closure = self._queue.get(block=False)
            closure._gpudist_worker = tag
            self._gpudist_turns.taken()
            self._queue_free_slot_condition.notify()
            self.inflight_closure_count += 1
            return closure

    queue.get = get
    for name in ("put", "mark_finished", "mark_failed", "put_back"):
        _wake_all_after(queue, name)


@final
class WorkerTurns:
    """Track whose turn it is. A worker that could not finish its function misses its turns until it is back.

    Args:
        number: How many workers there are.

    Attributes:
        lost: Those that could not end what they had.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._next = 0
        self.lost: set[int] = set()

    def is_of(self, worker: int | None) -> bool:
        """Return whether it is the turn of a worker that asks for work."""
        if worker is not None:
            self.lost.discard(worker)  # it asks for work
        return next((number for number in self._order() if number not in self.lost), None) == worker

    def taken(self) -> None:
        """Note that the worker whose turn it is has taken something."""
        self._next = next(number for number in self._order() if number not in self.lost) + 1

    def _order(self) -> list[int]:
        return [(self._next + k) % self._number for k in range(self._number)]


def _has_own(queue: Any, tag: int | None) -> bool:
    return tag is not None and not queue._tagged_queue[tag].empty()


def _has_turn(queue: Any, tag: int | None) -> bool:
    if queue._queue.empty() or queue._inflight_closure_count:
        return False
    return bool(queue._gpudist_turns.is_of(tag))


def _wake_all_after(cls: Any, name: str) -> None:
    @around(cls, name)
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        with self._queue_lock:
            if name == "put_back":
                self._gpudist_turns.lost.add(args[0]._gpudist_worker)
            self._closures_queued_condition.notify_all()
        return result
