"""Collect the private names of TensorFlow 2.21 and Keras 3.15 for this package. Tests cover each.

Warm hosts train together in job after job. Every strategy of several hosts starts TensorFlow's collectives anew, and a host
that asks for a group before its leader has done so is forgotten. So they are started anew between jobs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from emulate.imports import Later
from emulate.point import instead_of
from emulate.upstream import IS_KERAS_2, LEGACY_KERAS

CONTEXT = "tensorflow.python.eager.context"
_STRATEGY = "tensorflow.python.distribute.collective_all_reduce_strategy"
_OF_SEVERAL_HOSTS, _KEYS_APART = 1_000_000, 10_000  # apart from the groups that strategies of one host count

_are_new = False  # no strategy has used the collectives since
_before_start: list[Callable[[], None]] = []
_PATIENCE = 10.0
_POLL = 0.005
_DRAWS = {
    "keras.src.visualization.plot_image_gallery": ("plt", "matplotlib.pyplot"),
    "keras.src.visualization.plot_bounding_box_gallery": ("patches", "matplotlib.patches"),
}
"""Keras's imports of matplotlib: by importing module, the name in it and the imported module."""
TF_KERAS = "keras" if IS_KERAS_2 else "keras._tf_keras.keras"
"""Module behind `tf.keras`. With Keras 3 `import keras` does not import it (Keras 3.8)."""


def _eager_context() -> Any:
    """Return the eager context; None before there is one."""
    module = sys.modules.get(CONTEXT)
    return None if module is None else module._context


def is_runtime_initialized() -> bool:
    """Return whether this process has a TensorFlow runtime: after a fork every operation of it would hang."""
    current = _eager_context()
    return current is not None and bool(current._initialized)


def wait_for_leader() -> None:
    """Have this process join a cluster's collectives only once their leader listens.

    A host that comes first is refused, and TensorFlow's gRPC channel tries again a whole second later
    (`grpc.testing.fixed_reconnect_backoff_ms`). To be called when `tensorflow.python.eager.context` is imported.
    """

    @instead_of(sys.modules[CONTEXT].Context, "enable_collective_ops")
    def enable_collective_ops(real: Any, self: Any, server_def: Any) -> Any:
        jobs = {job.name: job.tasks for job in server_def.cluster.job}
        leader = "chief" if "chief" in jobs else "worker"
        is_leader = server_def.job_name == leader and server_def.task_index == 0
        _wait_until_listening(None if is_leader or leader not in jobs else str(jobs[leader][0]))
        return real(self, server_def)


def _wait_until_listening(address: str | None) -> None:
    """Wait some seconds for the leader to listen. After that TensorFlow waits as it does."""
    deadline = time.monotonic() + _PATIENCE
    while address is not None and time.monotonic() < deadline:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(_POLL)
        else:
            return


@contextlib.contextmanager
def without_matplotlib() -> Iterator[None]:
    """Import Keras within: it loads matplotlib (0.3 s, 26 MB) for two functions that draw. They load it when they draw."""
    if "matplotlib" in sys.modules or importlib.util.find_spec("matplotlib") is None:
        yield
        return
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["matplotlib"]
        for module, (name, wanted) in _DRAWS.items():
            if module in sys.modules:
                setattr(sys.modules[module], name, Later(wanted))


def watch() -> None:
    """Change the class of the eager context. To be called once in a process, when TensorFlow has been imported."""
    cls = sys.modules[CONTEXT].Context

    @instead_of(cls, "enable_collective_ops")
    def enable_collective_ops(real: Any, self: Any, server_def: Any) -> None:
        global _are_new
        are_new, _are_new = _are_new, False
        current = self._collective_ops_server_def
        if are_new and current is not None and _place(current) == _place(server_def):
            self._collective_ops_server_def = server_def
        else:
            real(self, server_def)

    @instead_of(cls, "ensure_initialized")
    def ensure_initialized(real: Any, self: Any) -> None:
        if _before_start and not self._initialized:
            _before_start.pop()()
        real(self)


@contextlib.contextmanager
def before_runtime(action: Callable[[], None]) -> Iterator[None]:
    """Run an action before TensorFlow's runtime starts, and only if something starts it.

    Args:
        action: Called before the first operation within, if there is one.
    """
    _before_start.append(action)
    try:
        yield
    finally:
        _before_start.clear()


def _place(server_def: Any) -> tuple[Any, ...]:
    return server_def.cluster, server_def.job_name, server_def.task_index


def first_key() -> int:
    """Return the first group key of the next MultiWorkerMirroredStrategy in this process."""
    return 0 if _STRATEGY not in sys.modules else int(_strategy()._collective_key_base)


def renew_collectives(first_key: int) -> None:
    """Start the collectives anew; on all hosts, while none is in a collective. The job's first strategy then takes them.

    Args:
        first_key: What no host has counted to. Strategies that outlive a job keep their keys.
    """
    global _are_new
    if _STRATEGY in sys.modules:
        _strategy()._collective_key_base = max(first_key, _OF_SEVERAL_HOSTS) + _KEYS_APART
    current = _eager_context()
    if current is not None and current._context_handle is not None and current._collective_ops_server_def is not None:
        from tensorflow.python import pywrap_tfe

        pywrap_tfe.TFE_EnableCollectiveOps(current._context_handle, current._collective_ops_server_def.SerializeToString())
        _are_new = True


def keep_meeting() -> None:
    """Keep the collectives of a strategy that was made only to connect the hosts of this job.

    The next one of the job does not start the collectives anew, which would need another meeting.
    """
    global _are_new
    _are_new = True


def _strategy() -> Any:
    return sys.modules[_STRATEGY].CollectiveAllReduceStrategy


def forget_generator() -> None:
    """Forget TensorFlow's global generator: its next user gets a new one."""
    if (module := sys.modules.get("tensorflow.python.ops.stateful_random_ops")) is not None:
        module.global_generator = None  # type: ignore[attr-defined]


def imported_keras_3() -> Any:
    """Return the module `keras`; None if it is not imported, or is Keras 2."""
    return sys.modules.get("keras") if not IS_KERAS_2 else None


def clear_legacy_session() -> None:
    """Clear the session of Keras 2, and forget its seed."""
    for package in LEGACY_KERAS:
        if (backend := sys.modules.get(f"{package}.backend")) is not None:
            backend.clear_session()
            vars(backend._SEED_GENERATOR).pop("generator", None)
