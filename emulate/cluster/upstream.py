"""The one place of this package that reads private names of TensorFlow (2.21)."""

from __future__ import annotations

import sys


def is_runtime_initialized() -> bool:
    """Whether this process has a TensorFlow runtime: after a fork every op of it would hang."""
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is None:
        return False
    current = context._context
    return current is not None and current._context_handle is not None
