"""Reset tf.functions that outlive a job (those of a module): each job finds them untraced, as in a fresh process.

A trace keeps what it was made with: settings, a strategy, and above all the state of the random operations in it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

_MODULE = "tensorflow.python.eager.polymorphic_function.polymorphic_function"
_TRACES = ("_variable_creation_config", "_no_variable_creation_config", "_created_variables")
_made: weakref.WeakSet[Any] = weakref.WeakSet()


def watch() -> None:
    """Remember every tf.function that is made from now on; called once in a process, when TensorFlow has been imported."""
    cls = sys.modules[_MODULE].Function
    real = cls.__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        _made.add(self)

    cls.__init__ = init


def forget_traces() -> None:
    """Have all of them traced anew, but those that made variables: these belong to what the module keeps."""
    for function in list(_made):
        if not function._created_variables:
            for name in _TRACES:
                setattr(function, name, None)
    if (module := sys.modules.get(_MODULE)) is not None:
        module._frequent_tracing_detector_manager._detectors.clear()
