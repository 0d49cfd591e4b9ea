"""Replace functions and methods of TensorFlow and Keras while a step of gpudist_core is traced or run, and put them back.

A replacement is seen by all threads of the process. So each one calls the original unless its own thread is in a step: replicas
are traced in threads of their own, which `share.sharing` marks.

Other code may wrap a replaced attribute before its original is put back. Its wrapper then stays. The replacement inside of it
stays in use, and is not installed a second time.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Replacements = Iterable[tuple[Any, str, Wrap]]

_lock = threading.RLock()
_inherited = object()


class Patches:
    """Install replacements while at least one `with` block of any thread is active.

    Example:
        >>> import math
        >>> doubled = Patches(lambda: [(math, "floor", lambda original: lambda x: 2 * original(x))])
        >>> with doubled:
        ...     math.floor(1.5)
        2
        >>> math.floor(1.5)
        1

    Args:
        replacements: A function, called once, that returns an owner (a module or a class), the name of its attribute, and a
            function that makes the replacement from the original. Of several for one attribute the last one is outermost.
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
                for owner, name, wrap in self._replacements():
                    places.setdefault((id(owner), name), _Place(owner, name)).wraps.append(wrap)
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
        self.wraps: list[Wrap] = []
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
            for wrap in self.wraps:
                self._replacement = wrap(self._replacement)
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


_MODULES = (
    "central_storage",
    "added_losses",
    "empty_batches",
    "layer_state",
    "losses",
    "batch_norm",
    "randomness",
    "coordination",
    "row_means",
    "custom_step",
)


def _of_step() -> Replacements:
    for name in _MODULES:
        yield from importlib.import_module(f"gpudist_core.upstream.{name}").replacements()


of_step = Patches(_of_step)
"""The replacements for steps. Outside of a step each of them calls the original."""
