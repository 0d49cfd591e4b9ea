"""Change what a Keras object does without changing its class name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

_made: dict[tuple[Any, ...], type] = {}
_plain: dict[type, type] = {}


def mix_in(thing: Any, mixin: type, **settings: Any) -> Any:
    """Put a mixin's methods before those of an object's class.

    The new class has the name and module of the old one. So Keras saves the object as a plain one, which loads without
    gpudist_core.

    Args:
        thing: A Keras object. Its class is changed in place.
        mixin: A class whose methods call `super()`.
        **settings: Attributes of the new class, so that a clone made by Keras has them too.

    Returns:
        The same object.
    """
    cls = _plain.get(type(thing), type(thing))
    if issubclass(cls, mixin):
        return thing  # a class that a user made of one of ours
    key = (mixin, cls, *sorted(settings.items()))
    if key not in _made:
        names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        names |= {"__reduce__": _reduced_as(cls), **settings}
        _made[key] = _saved_as(cls, type(cls.__name__, (mixin, cls), names))
        _plain[_made[key]] = cls
    if type(thing) is not _made[key]:
        thing.__class__ = _made[key]
    return thing


def _reduced_as(cls: type) -> Callable[[Any], Any]:
    """Let pickle save an object as one of the plain class, which is found by its name."""

    def reduce(self: Any) -> Any:
        function, *rest = cast(Any, cls).__reduce__(self)
        is_of_class = getattr(function, "__self__", None) is type(self)
        return (getattr(cls, function.__name__) if is_of_class else function, *rest)

    return reduce


def _saved_as(cls: type, mixed: type) -> type:
    """Let objects of a class be saved under the name of another: Keras's own, or one that a user registered."""
    from keras.src import api_export
    from keras.src.saving import object_registration

    for names in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
        if cls in names:
            names[mixed] = names[cls]
    return mixed
