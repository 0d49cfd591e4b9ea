"""Turn callables into bytes by value, so that a host needs neither the caller's module nor its state."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from emulate.errors import UsageError
from emulate.pickling import to_bytes


def pickle_by_value(target: Callable[[], Any], name: str) -> bytes:
    """Pickle a callable together with what it refers to in its own module.

    Args:
        target: The callable.
        name: What messages call it.

    Returns:
        What `pickle.loads` makes a callable of, in a process that cannot import the caller's module.

    Raises:
        UsageError: When it refers to something that cannot be sent to another process.
    """
    from cloudpickle import register_pickle_by_value, unregister_pickle_by_value

    module = _module_to_copy(target)
    if module is not None:
        register_pickle_by_value(module)
    try:
        return to_bytes(_Sent(target, _names_of_annotations(target)))
    except Exception as error:  # objects refuse in many ways: TypeError, PicklingError, NotImplementedError, their own
        raise UsageError(
            f"A callable and its arguments must be sendable to another process. Received: program={name!r}, which is or refers "
            f"to something that is not ({type(error).__name__}: {error}). "
            "Make such objects (models, datasets, tensors, locks) inside the function."
        ) from error
    finally:
        if module is not None:
            unregister_pickle_by_value(module)


def _module_to_copy(target: Any) -> ModuleType | None:
    module = sys.modules.get(getattr(_inner(target), "__module__", None) or "")
    if module is None or module.__name__ == "__main__":  # __main__ goes by value anyway
        return None
    from cloudpickle import list_registry_pickle_by_value

    is_known = module.__name__ in list_registry_pickle_by_value()
    return None if is_known or not getattr(module, "__file__", None) else module


class _Sent:
    """Hold a callable with the names in its module's annotations: no code refers to them, but autograph evaluates them."""

    def __init__(self, target: Any, names: Mapping[str, Any]) -> None:
        self._sent = target, names

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._sent


def _received(target: Any, names: Mapping[str, Any]) -> Any:
    module_globals = getattr(_inner(target), "__globals__", {})
    for name, value in names.items():
        module_globals.setdefault(name, value)
    return target


def _inner(target: Any) -> Any:
    return inspect.unwrap(getattr(target, "func", target))


def _names_of_annotations(target: Any) -> dict[str, Any]:
    """Return classes and modules from elsewhere that a callable's module names in annotations."""
    module = sys.modules.get(getattr(_inner(target), "__module__", None) or "")
    values = {name: getattr(module, name) for name in _annotated(module) if hasattr(module, name)} if module is not None else {}
    return {name: value for name, value in values.items() if _is_from_elsewhere(value, getattr(module, "__name__", ""))}


@functools.lru_cache(maxsize=64)
def _annotated(module: ModuleType) -> tuple[str, ...]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):  # typed into a console
        return ()
    annotations = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    return tuple(sorted({part.id for hint in annotations if hint for part in ast.walk(hint) if isinstance(part, ast.Name)}))


def _is_from_elsewhere(value: Any, module: str) -> bool:
    own = getattr(value, "__module__", module) == module
    return isinstance(value, ModuleType) or (not own and (isinstance(value, type) or type(value).__module__ == "typing"))
