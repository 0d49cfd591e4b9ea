"""Restore switches in Python's own modules that are set for the whole process."""

from __future__ import annotations

import copyreg
import faulthandler
import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_Switch = tuple[Callable[[], Any], Callable[[Any], object]]


class Switches:
    """Hold their settings at one moment."""

    def __init__(self) -> None:
        self._before = [(get, put, get()) for get, put in _switches()]
        self._zone = time.tzname
        self._modules = frozenset(sys.modules)
        self._callbacks = list(gc.callbacks)
        self._reducers = dict(copyreg.dispatch_table)
        self._main = sys.modules["__main__"]
        self._names = dict(vars(self._main))
        self._dumps = faulthandler.is_enabled()

    def restore(self) -> list[str]:
        """Put them back; what that does not undo. To be called when the environment is as it was."""
        for get, put, value in self._before:
            if get() != value:
                put(value)
        if time.tzname != self._zone:
            time.tzset()
        self._restore_callbacks()
        self._restore_reducers()
        self._restore_main()
        faulthandler.cancel_dump_traceback_later()
        is_mute = self._dumps and not faulthandler.is_enabled()
        return ["it disabled faulthandler, which writes down where a host crashed"] if is_mute else []

    def _restore_callbacks(self) -> None:
        if gc.callbacks != self._callbacks:
            gc.callbacks[:] = self._callbacks + [one for one in gc.callbacks if self._is_of_later_import(one)]

    def _restore_reducers(self) -> None:
        now = copyreg.dispatch_table
        if now != self._reducers:
            later = {kind: reduce for kind, reduce in now.items() if self._is_of_later_import(reduce)}
            now.clear()
            now.update({**later, **self._reducers})

    def _is_of_later_import(self, function: Any) -> bool:
        """Return whether a module set it that was imported since then, and is not imported again."""
        module = getattr(function, "__module__", None)
        return module not in self._modules and (module is None or module in sys.modules)

    def _restore_main(self) -> None:
        now = vars(self._main)
        for name in now.keys() - self._names.keys():
            del now[name]
        now.update(self._names)


def _switches() -> list[_Switch]:
    found: list[_Switch] = [
        (threading.gettrace, threading.settrace),
        (threading.getprofile, threading.setprofile),
        (gc.get_debug, gc.set_debug),
        (lambda: sys.dont_write_bytecode, lambda value: setattr(sys, "dont_write_bytecode", value)),
        (_start_method, _set_start_method),
        (_loop_policy, _set_loop_policy),
        (_opener, _set_opener),
    ]
    if hasattr(sys, "set_int_max_str_digits"):  # since 3.10.7
        found.append((sys.get_int_max_str_digits, sys.set_int_max_str_digits))
    return found


def _start_method() -> str | None:
    module = sys.modules.get("multiprocessing")
    return None if module is None else module.get_start_method(allow_none=True)


def _set_start_method(name: str | None) -> None:
    import multiprocessing

    multiprocessing.set_start_method(name, force=True)


def _loop_policy() -> Any:
    """Return the policy of asyncio; None for its default, which is made on first use."""
    policy = getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None)
    return None if type(policy).__module__.startswith("asyncio.") else policy


def _set_loop_policy(policy: Any) -> None:
    import asyncio

    asyncio.set_event_loop_policy(policy)


def _opener() -> Any:
    return getattr(sys.modules.get("urllib.request"), "_opener", None)


def _set_opener(opener: Any) -> None:
    import urllib.request

    urllib.request.install_opener(opener)
