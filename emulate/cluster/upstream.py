"""Collect the private names of TensorFlow 2.21 and Keras 3.15 for this package."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

_PATIENCE = 10.0
_POLL = 0.005
_DRAWS = {
    "keras.src.visualization.plot_image_gallery": ("plt", "matplotlib.pyplot"),
    "keras.src.visualization.plot_bounding_box_gallery": ("patches", "matplotlib.patches"),
}
"""Keras's imports of matplotlib: by importing module, the name in it and the imported module."""
TF_KERAS = "keras._tf_keras.keras"
"""Module behind `tf.keras` with Keras 3. `import keras` does not import it in Keras 3.8."""


def is_runtime_initialized() -> bool:
    """Return whether this process has a TensorFlow runtime: after a fork every operation of it would hang."""
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is None:
        return False
    current = context._context
    return current is not None and bool(current._initialized)


def wait_for_leader() -> None:
    """Have this process join a cluster's collectives only once their leader listens.

    A host that comes first is refused, and TensorFlow's gRPC channel tries again a whole second later
    (`grpc.testing.fixed_reconnect_backoff_ms`). To be called when `tensorflow.python.eager.context` is imported.
    """
    context = sys.modules["tensorflow.python.eager.context"].Context
    real = context.enable_collective_ops

    @functools.wraps(real)
    def enable_collective_ops(self: Any, server_def: Any) -> Any:
        _wait_until_listening(_leader_of(server_def))
        return real(self, server_def)

    context.enable_collective_ops = enable_collective_ops


def _leader_of(server_def: Any) -> str | None:
    """Return the leader's address; None in the leader's process."""
    jobs = {job.name: job.tasks for job in server_def.cluster.job}
    leader = "chief" if "chief" in jobs else "worker"
    is_leader = server_def.job_name == leader and server_def.task_index == 0
    return None if is_leader or leader not in jobs else str(jobs[leader][0])


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
                setattr(sys.modules[module], name, _Later(wanted))


class _Later:
    """Import a module on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
