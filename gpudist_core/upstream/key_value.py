"""Use the key-value store of TensorFlow's coordination service, through which the hosts of a job exchange small texts.

TensorFlow starts it with every MultiWorkerMirroredStrategy. It needs no collective, so a thread beside the training may use it.
"""

from __future__ import annotations

import tensorflow as tf

from gpudist_core.upstream.runtime import eager_context


def is_available() -> bool:
    """Return whether this process belongs to a job whose hosts share a store."""
    return eager_context().coordination_service is not None


def put(key: str, value: str) -> bool:
    """Store a value under a free key.

    Args:
        key: A key that is unique in the job.
        value: Any text.

    Returns:
        Whether the key was free. A key in use keeps its value.
    """
    try:
        eager_context().set_config_key_value(key, value)
    except tf.errors.AlreadyExistsError:
        return False
    return True


def get(key: str, seconds: float | None) -> str | None:
    """Return the value of a key as soon as there is one.

    Args:
        key: The key.
        seconds: How long to wait, in seconds; None for no limit.

    Returns:
        The value, or None after the time limit.
    """
    try:
        return str(eager_context().get_config_key_value(key, 0 if seconds is None else max(1, int(seconds * 1000))))
    except tf.errors.DeadlineExceededError:
        return None


def delete(key: str) -> None:
    """Delete a key."""
    eager_context().delete_config_key_value(key)
