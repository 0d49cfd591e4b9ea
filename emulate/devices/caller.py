"""Tell calls of the program, which sees emulated GPUs, from calls of TensorFlow, Keras and gpudist, which see real devices.

With GPUs faked for everybody Keras chooses XLA and CuDNN kernels that are not there.
"""

from __future__ import annotations

import sys
from types import FrameType

_FRAMEWORK = frozenset({"tensorflow", "keras", "tf_keras", "emulate"})
_TRANSPARENT = "tensorflow.python.autograph."


def is_program(depth: int) -> bool:
    """Return whether the function `depth` frames above the caller belongs to the program.

    Autograph calls a program's functions on its behalf, so its frames are looked through.

    Args:
        depth: 1 for the caller of the function that asks.

    Returns:
        True for the program, False for TensorFlow, Keras and this package.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        name = _module(frame)
        if not name.startswith(_TRANSPARENT):
            return name.partition(".")[0] not in _FRAMEWORK
        frame = frame.f_back
    return True


def calling_module(depth: int) -> str:
    """Return the name of the calling module, with `depth` as for `is_program`."""
    return _module(sys._getframe(depth + 1))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
