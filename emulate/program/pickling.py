"""Callables as bytes: by value, so that a host needs neither the caller's module nor its state."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from emulate.errors import WrongUse


def pickle_by_value(target: Callable[[], Any], name: str) -> bytes:
    """Pickle a callable together with what it refers to in its own module.

    Args:
        target: The callable.
        name: What messages call it.

    Returns:
        What `pickle.loads` makes a callable of, in a process that cannot import the caller's module.

    Raises:
        WrongUse: When it refers to something that cannot be sent to another process.
    """
    import cloudpickle

    module = _module_to_copy(target)
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(target))
    except Exception as error:  # objects refuse in many ways: TypeError, PicklingError, NotImplementedError, their own
        raise WrongUse(
            f"A callable must be sendable to another process. Received: program={name!r}, which refers to something "
            f"that is not ({type(error).__name__}: {error}). "
            "Make such objects (models, datasets, tensors, locks) inside the function."
        ) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def _module_to_copy(target: Any) -> ModuleType | None:
    inner = inspect.unwrap(getattr(target, "func", target))
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":  # __main__ goes by value anyway
        return None
    from cloudpickle import list_registry_pickle_by_value

    is_known = module.__name__ in list_registry_pickle_by_value()
    return None if is_known or not getattr(module, "__file__", None) else module
