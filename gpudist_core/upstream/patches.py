"""Change what functions, methods and objects of TensorFlow and Keras do.

Functions and methods are replaced while a step of gpudist_core is traced or run, and put back. A replacement is seen by all
threads of the process. So each one calls the original unless its own thread is in a step: replicas are traced in threads of
their own, which `share.sharing` marks.

Other code may wrap a replaced attribute before its original is put back. Its wrapper then stays. The replacement inside of it
stays in use, and is not installed a second time.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, cast

Replacement = Callable[..., Any]
"""A function of the original and of its arguments."""
Replacements = Iterable[tuple[Any, str, Replacement]]

_lock = threading.RLock()
_inherited = object()


class Patches:
    """Install replacements while at least one `with` block of any thread is active.

    Example:
        >>> import math
        >>> doubled = Patches(lambda: [(math, "floor", lambda original, x: 2 * original(x))])
        >>> with doubled:
        ...     math.floor(1.5)
        2
        >>> math.floor(1.5)
        1

    Args:
        replacements: A function, called once, that returns an owner (a module or a class), the name of its attribute, and the
            replacement, which gets the original before its arguments. Of several for one attribute the last one is outermost.
    """

    def __init__(self, replacements: Callable[[], Replacements]) -> None:
        self._replacements = replacements
        self._places: dict[tuple[int, str], _Place] | None = None
        self._blocks = 0

    def prepare(self) -> None:
        """Import what the replacements need. The first block does it otherwise, in the middle of a trace."""
        with _lock:
            if self._places is None:
                places: dict[tuple[int, str], _Place] = {}
                for owner, name, replacement in self._replacements():
                    places.setdefault((id(owner), name), _Place(owner, name)).replacements.append(replacement)
                self._places = places

    def __enter__(self) -> None:
        with _lock:
            self.prepare()
            self._blocks += 1
            if self._blocks == 1:
                for place in (self._places or {}).values():
                    place.replace()

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._blocks -= 1
            if self._blocks == 0:
                for place in (self._places or {}).values():
                    place.put_back()


class _Place:
    """Replace one attribute of a module or class."""

    def __init__(self, owner: Any, name: str) -> None:
        self.replacements: list[Replacement] = []
        self._owner, self._name = owner, name
        self._original: Any = None
        self._own: Any = None  # what the owner itself had: nothing where it inherits
        self._replacement: Any = None
        self._around: Any = None  # what others have put around the replacement

    def replace(self) -> None:
        now = getattr(self._owner, self._name)
        if now is self._replacement or now is self._around:
            return
        if now is not self._original:
            self._original = self._replacement = now
            for replacement in self.replacements:
                self._replacement = _around(self._replacement, replacement)
        self._own = vars(self._owner).get(self._name, _inherited)
        setattr(self._owner, self._name, self._replacement)

    def put_back(self) -> None:
        now = getattr(self._owner, self._name)
        self._around = None if now is self._replacement or now is self._original else now
        if now is not self._replacement:
            return
        if self._own is _inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


def _around(original: Any, replacement: Replacement) -> Callable[..., Any]:
    # Of a class that a function stands for the attributes are not the function's.
    @functools.wraps(original, updated=() if isinstance(original, type) else functools.WRAPPER_UPDATES)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call


def caller() -> FrameType:
    """Return the frame that has called the original, as it believes; for a replacement that asks."""
    return sys._getframe(3)


def _of_step() -> Replacements:
    for name in ("strategies", "empty_batches", "layers", "losses", "randomness", "row_means", "custom_step"):
        yield from importlib.import_module(f"gpudist_core.upstream.{name}").replacements()


of_step = Patches(_of_step)
"""The replacements for steps. Outside of a step each of them calls the original."""


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
