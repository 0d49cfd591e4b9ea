"""The key-value store of TensorFlow's coordination service, through which the hosts of a job tell each other small things.

TensorFlow starts it with every MultiWorkerMirroredStrategy. It needs no collective operation: a thread beside the training
may use it.
"""

from __future__ import annotations

from typing import Any


def is_available() -> bool:
    """Whether this process belongs to a job whose hosts share a store."""
    return _context().coordination_service is not None


def put(key: str, value: str) -> bool:
    """Store a value under a key that is free.

    Args:
        key: Unique within the job.
        value: Any text.

    Returns:
        Whether the key was free; a key that was taken keeps its value.
    """
    import tensorflow as tf

    try:
        _context().set_config_key_value(key, value)
    except tf.errors.AlreadyExistsError:
        return False
    return True


def get(key: str, seconds: float | None) -> str | None:
    """The value under a key, once there is one.

    Args:
        key: The key.
        seconds: How long to wait; None for as long as it takes.

    Returns:
        The value, None when there was none in time.
    """
    import tensorflow as tf

    try:
        return str(_context().get_config_key_value(key, 0 if seconds is None else max(1, int(seconds * 1000))))
    except tf.errors.DeadlineExceededError:
        return None


def delete(key: str) -> None:
    """Forget a key."""
    _context().delete_config_key_value(key)


def _context() -> Any:
    from tensorflow.python.eager import context

    return context.context()
