"""What `Checkpoints` may be given; looked at when it is made, not hours later when it saves."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpudist_core.errors import WrongUse
from gpudist_core.values import is_finite, is_whole

_NEVER_CAUGHT = {"SIGKILL", "SIGSTOP"}
_METHODS = {"pipeline": ("state", "restore"), "step": ("model",), "optimizer": ("variables",)}
_MEANT = {
    "model": ("A model is a Keras model, or has variables", "Give the model that is trained."),
    "optimizer": ("An optimizer is one of Keras", "Give the optimizer that was made, not its name."),
    "pipeline": ("A pipeline is a gpudist_core.Pipeline, or has state() and restore(state)", "Give the one that was made."),
    "step": ("A step is a gpudist_core.TrainStep", "Give the number of a step to save() and after_step()."),
}


def check(folder: Any, keep: Any, every: Any, signals: Any, timeout: Any, extra: Any) -> None:
    """Refuse what cannot be meant, of all but the parts of the run.

    Args:
        folder: Where.
        keep: How many to leave.
        every: After how many steps to save.
        signals: The names of signals.
        timeout: How long to wait for another host, in seconds.
        extra: More to keep, by names.

    Raises:
        WrongUse: For a value of another type, or none that can be.
    """
    for name, value in (("keep", keep), ("every", 1 if every is None else every)):
        if not is_whole(value, 1):
            raise WrongUse(f"{name} must be a positive whole number", "Give 1 or more.", **{name: value})
    if not isinstance(folder, (str, Path)) or folder == "":
        raise WrongUse("The folder must be a path", "Give one that all hosts see.", folder=folder)
    if Path(folder).exists() and not Path(folder).is_dir():
        raise WrongUse("The folder must be a folder", "Name another path.", folder=str(folder))
    if not is_finite(timeout) or timeout <= 0:
        raise WrongUse("timeout must be a positive number of seconds", "Leave it out for ten minutes.", timeout=timeout)
    if isinstance(signals, str) or not all(isinstance(name, str) and name in signal.Signals.__members__ for name in signals):
        raise WrongUse(
            "Signals are named as in Python's signal module", "Use signals=('SIGTERM',) or ('SIGUSR1',).", signals=signals
        )
    if never := _NEVER_CAUGHT.intersection(signals):
        raise WrongUse("A signal can be caught", "Ask for another, SIGTERM say.", signals=sorted(never))
    if extra is not None and not isinstance(extra, Mapping):
        raise WrongUse("extra gives what to keep by names", 'Write extra={"name": variable}.', extra=extra)


def check_parts(**parts: Any) -> None:
    """Refuse what is no part of a run.

    Args:
        **parts: The model, the optimizer, the pipeline and the step; None for each that is not given.

    Raises:
        WrongUse: For one that cannot be it.
    """
    for name, value in parts.items():
        needs = _METHODS.get(name, ("variables",))
        if value is not None and (isinstance(value, type) or not all(hasattr(value, method) for method in needs)):
            raise WrongUse(*_MEANT[name], **{name: value})
