"""Changing what a Keras object does without changing what it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

_made: dict[tuple[type, type], type] = {}


def mix_in(thing: Any, mixin: type) -> Any:
    """Let a mixin's methods come before those of an object's class.

    The new class has the name and module of the old one, so what Keras saves of the object is a plain one, which loads where
    gpudist_core is not installed.

    Args:
        thing: A Keras object; its class is changed in place. One that has the mixin already stays as it is.
        mixin: A class whose methods call `super()`.

    Returns:
        The same object.
    """
    cls = type(thing)
    if not issubclass(cls, mixin):
        if (mixin, cls) not in _made:
            names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            names["__reduce__"] = _reduced_as(cls)
            _made[mixin, cls] = _saved_as(cls, type(cls.__name__, (mixin, cls), names))
        thing.__class__ = _made[mixin, cls]
    return thing


def _reduced_as(cls: type) -> Callable[[Any], Any]:
    """Let what pickle makes of an object be of the plain class, which is found by its name."""

    def reduce(self: Any) -> Any:
        function, *rest = cast(Any, cls).__reduce__(self)
        is_of_class = getattr(function, "__self__", None) is type(self)
        return (getattr(cls, function.__name__) if is_of_class else function, *rest)

    return reduce


def _saved_as(cls: type, made: type) -> type:
    """Let objects of a class be saved under the name of another: Keras's own, or that a user registered."""
    from keras.src import api_export
    from keras.src.saving import object_registration

    for names in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
        if cls in names:
            names[made] = names[cls]
    return made
