"""Access the state of this process's TensorFlow runtime (2.21): devices, collectives, the store of a cluster, seeds."""

from __future__ import annotations

from typing import Any


def context() -> Any:
    """Return TensorFlow's eager context, of which there is one in a process."""
    from tensorflow.python.eager import context

    return context.context()
