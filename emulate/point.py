"""Wrap the points of TensorFlow, Keras and NumPy at which a program is seen, so that gpudist's own errors never reach it.

A wrapper gets what it wraps as its first argument, and calls it as the program would. What the wrapped function raises is the
program's own, and passes. What a wrapper raises itself is a fault of gpudist: the program gets what the wrapped function has
returned, or the function is called now, as if nothing were wrapped. The listener is told, and the run is judged no more, since
its record has a hole. Without a listener such an error passes, too: a run that gpudist changes on purpose ends where it cannot.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from emulate import imports

Wrapper = Callable[..., Any]


def instead_of(owner: Any, name: str) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator that puts a function in place of `owner.name`. What it raises reaches the program.

    Args:
        owner: A class, a module or an object.
        name: A function of it, or a property, of which it replaces the function that reads it.

    Returns:
        A decorator of the function, which gets what stood there as its first argument. It gives what now stands there.
    """

    def put(function: Wrapper) -> Wrapper:
        there = getattr(owner, name)
        real: Any = there.fget if isinstance(there, property) else there

        @functools.wraps(real)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(real, *args, **kwargs)

        setattr(owner, name, there.getter(replacement) if isinstance(there, property) else replacement)
        return replacement

    return put


_listeners: list[Callable[[str, Exception], None]] = []
_told: set[str] = set()


def listen(told: Callable[[str, Exception], None]) -> None:
    """Have gpudist's own errors in this process told, by the name of the point, and kept from the program: each once."""
    _listeners[:] = [told]
    _told.clear()


def around(owner: Any, name: str, *, static: bool = False) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator that puts a wrapper in place of `owner.name`.

    Args:
        owner: A class or a module.
        name: A function of it.
        static: Whether it is called without an instance, though it belongs to a class.

    Returns:
        A decorator of the wrapper, whose first argument is what it wraps. It gives what now stands there.
    """

    def put(wrapper: Wrapper) -> Wrapper:
        seen = around_function(getattr(owner, name), wrapper, f"{owner.__name__.rpartition('.')[2]}.{name}")
        setattr(owner, name, staticmethod(seen) if static else seen)
        return seen

    return put


def around_function(original: Any, wrapper: Wrapper, point: str) -> Wrapper:
    """Return the function that calls `wrapper` in place of `original`; `point` tells the user where."""

    @functools.wraps(original)
    def seen(*args: Any, **kwargs: Any) -> Any:
        call = Call(original, point)
        try:
            return wrapper(call, *args, **kwargs)
        except Exception as error:
            if call.raised is not None and error is not call.raised:
                raise call.raised from None
            if call.raised is not None or not _listeners:
                raise
            if point not in _told:
                _told.add(point)
                _listeners[0](point, error)
        return call.returned[0] if call.returned else original(*args, **kwargs)

    return seen


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once a module has been imported, now or later; its errors are told and kept from the program."""
    imports.when_imported(name, around_function(lambda: None, lambda _: action(), f"import {name}"))


def caller() -> Any:
    """Return the frame that has called what is wrapped."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("emulate."):
        frame = frame.f_back
    return frame


PASSING = ("tensorflow.python.autograph.", "tensorflow.python.distribute.one_device_strategy", "emulate.")
"""Modules that stand between the program and what it calls."""


class Caller(NamedTuple):
    """Describe the program's calling function, and where it calls: autograph may move it to other lines."""

    name: str
    place: tuple[int, int]

    @classmethod
    def of(cls, name: str, frame: Any) -> Caller:
        """Return the description of a function of this name at this frame."""
        return cls(name, (frame.f_lineno - frame.f_code.co_firstlineno, frame.f_lasti))


def program_caller(frame: Any) -> Caller | None:
    """Return the program's calling function; `lambda` for an unnamed one that TensorFlow calls.

    None where TensorFlow or Keras themselves do. Autograph may stand between.
    """
    nameless = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        name = str(frame.f_code.co_name).removeprefix("tf__")
        passing = module.startswith(PASSING)
        theirs = module.startswith(("tensorflow.", "keras.", "tf_keras."))
        if not passing and theirs:
            return nameless
        if not passing and name not in ("<listcomp>", "<genexpr>", "<lambda>"):
            return Caller.of(name.strip("<>"), frame)
        nameless = nameless if passing else Caller.of("lambda", frame)
        frame = frame.f_back
    return nameless


class Call:
    """Call what is wrapped, and remember how that ended.

    Args:
        original: What is wrapped.
        point: What it is to the user.

    Attributes:
        returned: What it has returned, if it has; empty before.
        raised: What it has raised the last time.
    """

    __slots__ = ("__wrapped__", "point", "raised", "returned")

    def __init__(self, original: Any, point: str) -> None:
        self.__wrapped__ = original  # inspect.signature looks for it
        self.point = point
        self.returned: list[Any] = []
        self.raised: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.raised = None
        try:
            self.returned = [self.__wrapped__(*args, **kwargs)]
        except BaseException as error:
            self.raised = error
            raise
        return self.returned[0]
