"""Restore what a job may change in Python itself: environment, folder, signals, warnings, logging, hooks, generators."""

from __future__ import annotations

import builtins
import decimal
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import warnings
from typing import Any

_READ_BY_LIBRARIES = ("TF_", "TF2_", "XLA_", "KERAS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NCCL_", "GRPC_")
_STREAMS = ("stdin", "stdout", "stderr", "displayhook", "excepthook", "unraisablehook")
_NOTHING = object()
_RLIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_STACK)


class Interpreter:
    """Hold the interpreter's state at one moment.

    Attributes:
        environment: The environment's variables then.
    """

    def __init__(self) -> None:
        self._environ = os.environ
        self.environment = dict(os.environ)
        self._cwd = os.getcwd()
        self._path = list(sys.path)
        self._arguments = list(sys.argv)
        self._main = sys.modules["__main__"]
        self._streams = {name: getattr(sys, name) for name in _STREAMS}
        self._thread_hook = threading.excepthook
        self._signals = _handlers()
        self._filters = list(warnings.filters)
        self._show_warning = warnings.showwarning
        self._loggers = {name: _Logger(logger) for name, logger in _loggers().items()}
        self._disabled = logging.root.manager.disable
        self._limits = (sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled())
        self._trace = (sys.gettrace(), sys.getprofile())
        self._umask = _umask()
        self._locale = locale.setlocale(locale.LC_ALL)
        self._builtins = dict(vars(builtins))
        self._importers = (list(sys.meta_path), list(sys.path_hooks))
        self._precision = decimal.getcontext().copy()
        self._patience = socket.getdefaulttimeout()
        self._processors = os.sched_getaffinity(0)
        self._rlimits = {kind: resource.getrlimit(kind) for kind in _RLIMITS}
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)

    def restore(self) -> list[str]:
        """Put it back; what that does not undo."""
        reasons = self._restore_environment()
        os.chdir(self._cwd)
        sys.path[:] = self._path
        sys.argv[:] = self._arguments
        sys.modules["__main__"] = self._main
        for name, stream in self._streams.items():
            setattr(sys, name, stream)
        threading.excepthook = self._thread_hook
        self._restore_signals()
        self._restore_warnings()
        self._restore_logging()
        self._restore_limits()
        locale.setlocale(locale.LC_ALL, self._locale)
        random.seed()
        return reasons + self._check_builtins() + self._restore_process()

    def _restore_process(self) -> list[str]:
        """Restore what the system keeps for the process. A hard limit that was lowered cannot be restored."""
        decimal.setcontext(self._precision.copy())
        socket.setdefaulttimeout(self._patience)
        os.sched_setaffinity(0, self._processors)
        sys.meta_path[:], sys.path_hooks[:] = self._importers
        stuck = [] if os.getpriority(os.PRIO_PROCESS, 0) == self._nice else ["its priority"]
        for kind, limit in self._rlimits.items():
            try:
                resource.setrlimit(kind, limit)
            except (OSError, ValueError):
                stuck.append("the limits of its process")
        return [f"it changed {', '.join(dict.fromkeys(stuck))}"] if stuck else []

    def _restore_environment(self) -> list[str]:
        """Put the environment back. What C++ has read while it was different stays read."""
        os.environ = self._environ  # noqa: B003 - a job may have assigned another mapping
        before, now = self.environment, dict(os.environ)
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        read = [name for name in changed if name.startswith(_READ_BY_LIBRARIES)]
        return [f"it changed {', '.join(read)}, which libraries may have read"] if read else []

    def _restore_signals(self) -> None:
        for number, handler in _handlers().items():
            if handler is not self._signals[number] and self._signals[number] is not None:
                signal.signal(number, self._signals[number])
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _restore_warnings(self) -> None:
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings.showwarning = self._show_warning
        # Modules forget with this which warnings they have shown already.
        warnings.onceregistry.clear()  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    def _restore_logging(self) -> None:
        logging.disable(self._disabled)
        for name, logger in _loggers().items():
            if name in self._loggers:
                self._loggers[name].put_back(logger)
            elif name.partition(".")[0] not in sys.modules:  # else its module has set it up, and is not imported again
                _UNTOUCHED.put_back(logger)

    def _restore_limits(self) -> None:
        recursion, interval, thresholds, collects = self._limits
        sys.setrecursionlimit(recursion)
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        (gc.enable if collects else gc.disable)()
        sys.settrace(self._trace[0])
        sys.setprofile(self._trace[1])
        os.umask(self._umask)

    def _check_builtins(self) -> list[str]:
        now = vars(builtins)
        names = (self._builtins.keys() | now.keys()) - {"_"}
        changed = sorted(name for name in names if now.get(name, _NOTHING) is not self._builtins.get(name, _NOTHING))
        return [f"it changed the builtins {', '.join(changed)}"] if changed else []


class _Logger:
    """Hold the settings of one logger."""

    def __init__(self, logger: logging.Logger | None) -> None:
        self._level = logger.level if logger else logging.NOTSET
        self._propagate = logger.propagate if logger else True
        self._disabled = logger.disabled if logger else False
        self._handlers = list(logger.handlers) if logger else []
        self._filters = list(logger.filters) if logger else []

    def put_back(self, logger: logging.Logger) -> None:
        if logger.level != self._level:
            logger.setLevel(self._level)
        logger.propagate, logger.disabled = self._propagate, self._disabled
        if logger.handlers != self._handlers:
            logger.handlers[:] = self._handlers
        if logger.filters != self._filters:
            logger.filters[:] = self._filters


_UNTOUCHED = _Logger(None)


def _loggers() -> dict[str, logging.Logger]:
    known = logging.root.manager.loggerDict
    return {"": logging.root, **{name: one for name, one in known.items() if isinstance(one, logging.Logger)}}


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
