"""Check whether gpudist supports the TensorFlow that hosts will import."""

from __future__ import annotations

from emulate.errors import UsageError
from gpudist_core.installed import unsupported


def check_tensorflow() -> None:
    """Refuse an environment without a supported TensorFlow and Keras.

    Raises:
        UsageError: When one of them is missing or too old; the text says what to install.
    """
    if text := unsupported():
        raise UsageError(text)
