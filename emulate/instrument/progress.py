"""Track which step and which collective each replica is in, and report both to the supervisor.

A host waits for ever in a collective that a peer never enters. Two counters a replica (entered, left) and the number of the
collective entered last are enough to see it from outside, whatever the Python side is doing. They are counted in the graph and
read by a thread.

Of a host that is not recorded, `Pulse` reports the last step and the last collective. Nothing is added to the program's steps
but the counters of collectives; a thread looks at them, and at how many steps the optimizers say that they have made, a few
times a second.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from emulate import graph_functions, point, upstream
from emulate.imports import tf
from emulate.point import around, when_imported
from emulate.upstream import static_int

POLL_SECONDS = 0.25


class Counters:
    """Count the entered and left collectives of one replica."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        ops = graph_functions.load("tensorflow.python.ops.gen_resource_variable_ops")
        self._ops = ops
        self._handles: list[Any] = []
        with tf.init_scope(), graph_functions.device("CPU:0"):
            for what in ("entered", "site", "left"):
                handle = ops.var_handle_op(dtype=tf.int64, shape=[], shared_name=f"gpudist_{what}_{replica}")
                ops.assign_variable_op(handle, tf.zeros([], tf.int64))
                self._handles.append(handle)

    def enter(self, site: int) -> list[Any]:
        """Return the operations that count an entry."""
        one = tf.ones([], tf.int64)
        entered, at, _ = self._handles
        operations = [
            self._ops.assign_add_variable_op(entered, one),
            self._ops.assign_variable_op(at, tf.constant(site, tf.int64)),
        ]
        return [operation for operation in operations if operation is not None]

    def leave(self) -> Any:
        """Return the operation that counts an exit."""
        return self._ops.assign_add_variable_op(self._handles[2], tf.ones([], tf.int64))

    def read(self) -> tuple[int, int, int]:
        """Return (entered, site of the last entry, left)."""
        values = [int(self._ops.read_variable_op(handle, tf.int64)) for handle in self._handles]
        return values[0], values[1], values[2]


Send = Callable[[Mapping[str, Any]], None]


class CollectiveCounter:
    """Count collectives, and report where each replica is.

    Args:
        send: Sends an event to the supervisor.
        num_steps: Returns how many steps were made so far.
        write: Writes an event into the trace.
    """

    def __init__(self, send: Send, num_steps: Callable[[], int], write: Send) -> None:
        self._send, self._num_steps, self._write = send, num_steps, write
        self._lock = threading.Lock()
        self._counters: dict[int, Counters] = {}
        self._sites: list[str] = []
        self._told: dict[int, tuple[int, int]] = {}

    def around(self, replica: int, name: str, start: Any) -> Any:
        """Start a collective between an entry and an exit."""
        counters = self._of(replica)
        with graph_functions.device("CPU:0"):
            entered = counters.enter(self._site(name))
        with tf.control_dependencies(entered):
            result = start()
        with graph_functions.device("CPU:0"), tf.control_dependencies(tf.nest.flatten(result, expand_composites=True)):
            counters.leave()
        return result

    def _of(self, replica: int) -> Counters:
        with self._lock:
            if not self._counters:
                threading.Thread(target=self._poll, name="gpudist-collectives", daemon=True).start()
            if replica not in self._counters:
                self._counters[replica] = Counters(replica)
            return self._counters[replica]

    def _site(self, name: str) -> int:
        """Assign a number to a place with a collective: from 0 in each graph, and by first use for eager code."""
        with self._lock:
            if name not in self._sites or not tf.executing_eagerly():
                self._send({"event": "site", "name": name})
            self._sites.append(name)
            return len(self._sites) - 1

    def _poll(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            for replica, counters in list(self._counters.items()):
                self._tell(replica, *counters.read())

    def _tell(self, replica: int, entered: int, site: int, left: int) -> None:
        if self._told.get(replica) == (entered, left):
            return
        self._told[replica] = (entered, left)
        phase = "enter" if entered > left else "exit"
        name = self._sites[site] if site < len(self._sites) else ""
        event = {"event": "collective", "phase": phase, "name": name, "ordinal": entered, "replica": replica}
        self._send({**event, "step": self._num_steps()})
        self._write(event)


def install(send: Send, num_steps: Callable[[], int], write: Send = lambda event: None) -> None:
    """Wrap the methods by which every collective between replicas is started. The arguments are those of the counter."""
    watch = CollectiveCounter(send, num_steps, write)
    cls = graph_functions.collective_launcher()
    for method in ("all_reduce", "_all_gather"):
        _wrap_collective(watch, cls, method)


def _wrap_collective(watch: CollectiveCounter, cls: Any, method: str) -> None:
    @around(cls, method)
    def collective(original: Any, self: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{method.strip('_')} {input_tensor.dtype.name}{list(input_tensor.shape)}"
        replica = static_int(self._device_index) if hasattr(self, "_device_index") else _number_in(self._device)
        return watch.around(replica, name, lambda: original(self, input_tensor, *args, **kwargs))


def _number_in(device: str) -> int:
    """Return the local device's number: 3 for `/job:worker/replica:0/task:1/device:CPU:3`."""
    return int(str(device).rsplit(":", 1)[-1])


class Pulse:
    """Send `progress`, `collective` and `site` events while a program runs.

    Args:
        send: Sends an event to the supervisor.
        several_hosts: Whether collectives between hosts are to be watched.
    """

    def __init__(self, send: Send, *, several_hosts: bool) -> None:
        self._send = send
        self._several_hosts = several_hosts
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self.num_steps = 0

    def install(self) -> None:
        """Watch the collectives and optimizers of TensorFlow, Keras and tf_keras, as soon as they are imported."""
        point.listen(self._failed)
        if self._several_hosts:
            when_imported("tensorflow", lambda: install(self._send, lambda: self.num_steps))
        for name, package in upstream.KERAS_PACKAGES.items():
            when_imported(name, functools.partial(self._see, package))

    def _failed(self, at: str, error: Exception) -> None:
        text = f"gpudist itself failed at {at} ({type(error).__name__}: {error}): it cannot tell how far the program is"
        self._send({"event": "note", "code": "gpudist-failed", "text": text})

    def _see(self, package: str) -> None:
        for cls, method in upstream.optimizers(package):

            @around(cls, method)
            def apply(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                self._optimizers.add(optimizer)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._look, name="gpudist-pulse", daemon=True)
                    self._thread.start()
                return original(optimizer, *args, **kwargs)

    def _look(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            num_steps = max((upstream.steps_made(optimizer) for optimizer in list(self._optimizers)), default=0)
            if num_steps != self.num_steps:
                self.num_steps = num_steps
                self._send({"event": "progress", "step": num_steps})
