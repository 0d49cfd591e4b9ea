"""Save and restore the state of the other callbacks of a `fit`, and name those whose state is unknown."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpudist_core.checkpoints.states import has_state


class Others:
    """Hold the callbacks beside `Checkpoints`, after all have started the training.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        from gpudist_core.upstream.callbacks import attributes_of

        self._named = _named(callbacks)
        self._begun = {
            name: {key: _mark(value) for key, value in attributes_of(callback).items()}
            for name, callback in self._named.items()
        }

    def state(self) -> dict[str, Any]:
        """Return their states by name, and the names of callbacks that have kept something unknown meanwhile."""
        kept = {name: _state_of(callback) for name, callback in self._named.items() if _keeps(callback)}
        unknown = [name for name, callback in self._named.items() if not has_state(callback) and self._has_changed(name)]
        return {"kept": kept, "unknown": unknown}

    def restore(self, state: Mapping[str, Any] | None, checkpoint: str) -> None:
        """Restore their states.

        Args:
            state: The result of `state`, or None.
            checkpoint: The name of the checkpoint, for the message.
        """
        kept = (state or {}).get("kept", {})
        anew = [name for name in (state or {}).get("unknown", ()) if name in self._named]
        for name, callback in self._named.items():
            if name in kept:
                _restore(callback, kept[name])
            elif _keeps(callback):
                anew.append(name)
        if anew:
            warnings.warn(
                f"Only callbacks whose state is in the checkpoint continue. Received: checkpoint={checkpoint!r}, "
                f"start again={sorted(anew)}. Give your own callback state() and restore(state).",
                stacklevel=2,
            )

    def _has_changed(self, name: str) -> bool:
        from gpudist_core.upstream.callbacks import attributes_of

        now, begun = attributes_of(self._named[name]), self._begun[name]
        return any(key not in begun or begun[key] != _mark(value) or _is_mutable(value) for key, value in now.items())


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Name callbacks by class and number, and by the monitored value if they have one."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        name = first = type(callback).__name__ + (f"({monitor})" if isinstance(monitor, str) else "")
        number = 1
        while name in named:
            number += 1
            name = f"{first} {number}"
        named[name] = callback
    return named


def _keeps(callback: Any) -> bool:
    from gpudist_core.upstream.callbacks import kept_by

    return has_state(callback) or bool(kept_by(callback))


def _state_of(callback: Any) -> Any:
    from gpudist_core.upstream.callbacks import kept_by

    if has_state(callback):
        return callback.state()
    return {name: getattr(callback, name) for name in kept_by(callback) if hasattr(callback, name)}


def _restore(callback: Any, state: Any) -> None:
    if has_state(callback):
        callback.restore(state)
        return
    for name, value in state.items():
        is_number = isinstance(value, np.ndarray) and value.ndim == 0
        setattr(callback, name, value.item() if is_number else value)


def _mark(value: Any) -> Any:
    """Return a mark that shows whether an attribute was replaced or has grown."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return id(value), len(value) if isinstance(value, (list, dict, set, tuple)) else 0


def _is_mutable(value: Any) -> bool:
    """Return whether an object may hold other numbers later."""
    return isinstance(value, np.ndarray) or hasattr(value, "assign") or hasattr(value, "update_state")
