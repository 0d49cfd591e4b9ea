"""Check the arguments of `Checkpoints` when it is made, not hours later when it saves."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpudist_core.errors import UsageError
from gpudist_core.values import is_finite, is_whole

_NEVER_CAUGHT = {"SIGKILL", "SIGSTOP"}
_METHODS = {"pipeline": ("state", "restore"), "step": ("model",), "optimizer": ("variables",)}
_MEANT = {
    "model": ("model must be a Keras model, or have variables", "Pass the model that is trained."),
    "optimizer": ("optimizer must be a Keras optimizer", "Pass an optimizer object, not its name."),
    "pipeline": ("pipeline must be a gpudist_core.Pipeline, or have state() and restore(state)", "Pass the object itself."),
    "step": ("step must be a gpudist_core.TrainStep", "Pass the number of a step to save() and after_step()."),
}


def check(folder: Any, keep: Any, every: Any, signals: Any, timeout: Any, extra: Any) -> None:
    """Refuse arguments that are not valid, except for the parts of the run.

    Args:
        folder: The folder.
        keep: Number of checkpoints to keep.
        every: Save after every this many steps.
        signals: Names of signals.
        timeout: How long to wait for another host, in seconds.
        extra: More to save, by name.

    Raises:
        UsageError: For a value of another type, or outside of its range.
    """
    for name, value in (("keep", keep), ("every", 1 if every is None else every)):
        if not is_whole(value, 1):
            raise UsageError(f"{name} must be a positive integer", **{name: value})
    if not isinstance(folder, (str, Path)) or folder == "":
        raise UsageError("folder must be a path", "All hosts must see it.", folder=folder)
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UsageError("folder must not be a file", "Pass another path.", folder=str(folder))
    if not is_finite(timeout) or timeout <= 0:
        raise UsageError(
            "timeout must be a positive number of seconds", "Leave it out for the default of 600 seconds.", timeout=timeout
        )
    if isinstance(signals, str) or not all(isinstance(name, str) and name in signal.Signals.__members__ for name in signals):
        raise UsageError(
            "signals must be names from Python's signal module", "Use signals=('SIGTERM',) or ('SIGUSR1',).", signals=signals
        )
    if never := _NEVER_CAUGHT.intersection(signals):
        raise UsageError(
            "A signal must be one that Python can catch", "Use another signal, for example SIGTERM.", signals=sorted(never)
        )
    if extra is not None and not isinstance(extra, Mapping):
        raise UsageError("extra must be a dictionary of names and values", 'Write extra={"name": variable}.', extra=extra)


def check_parts(**parts: Any) -> None:
    """Refuse objects that cannot be a part of a run.

    Args:
        **parts: The model, the optimizer, the pipeline and the step; None for those not given.

    Raises:
        UsageError: If one has not the methods it needs.
    """
    for name, value in parts.items():
        needs = _METHODS.get(name, ("variables",))
        if value is not None and (isinstance(value, type) or not all(hasattr(value, method) for method in needs)):
            raise UsageError(*_MEANT[name], **{name: value})
