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
            _made[mixin, cls] = _saved_as(cls, type(cls.__name__, (mixin, cls), names))
        thing.__class__ = _made[mixin, cls]
    return thing


def _saved_as(cls: type, made: type) -> type:
    """Let objects of a class be saved under the name of another: Keras's own, or that a user registered."""
    from keras.src import api_export
    from keras.src.saving import object_registration

    for names in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
        if cls in names:
            names[made] = names[cls]
    return made
