"""Changing what a Keras object does without changing what it is called."""

from __future__ import annotations

from typing import Any

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
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            _made[mixin, cls] = type(cls.__name__, (mixin, cls), names)
        thing.__class__ = _made[mixin, cls]
    return thing
