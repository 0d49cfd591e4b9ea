"""Call callbacks in each step: only those with something to do, with logs that are computed on read, as nobody reads most."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from gpudist_core.checkpoints import Checkpoints
from gpudist_core.upstream import trainer


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Show Keras's progress bar, which reads the logs only when it draws them."""

    SECONDS = 0.05
    _drawn = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Draw the bar if it is time to."""
        if self._is_time(batch):
            super().on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Draw the bar if it is time to."""
        if self._is_time(batch):
            super().on_test_batch_end(batch, logs)

    def _is_time(self, batch: int) -> bool:
        self.seen = batch + 1
        now = time.monotonic()
        if self.verbose != 1 or now - self._drawn < self.SECONDS:
            return False
        self._drawn = now
        return True


class Callbacks(keras.callbacks.CallbackList):
    """Call, in each step, the callbacks that have something to do there.

    Keras calls callbacks in threads if it can, and reads all logs in every step. Here a callback gets the logs of this step, in
    the thread of the loop. Logs that it keeps are computed before the next step changes them.

    Args:
        callbacks: Callbacks, in any nested structure, or None.
        history: Whether to add a `History`.
        progress: Whether to add a progress bar.
        model: The model.
        **params: Parameters for callbacks, such as `verbose` and `epochs`.
    """

    def __init__(self, callbacks: Any, *, history: bool, progress: bool, model: Any, **params: Any) -> None:
        super().__init__(callbacks, add_history=history, add_progbar=False, model=model, **params)
        trainer.in_this_thread(self)
        if progress and not any(isinstance(c, keras.callbacks.ProgbarLogger) for c in self.callbacks):
            bar = ProgressBar()
            bar.set_model(model)
            bar.set_params(self.params)
            self.callbacks.append(bar)
        # What others do at the end of an epoch (a learning rate, weights) belongs into its checkpoint.
        self.callbacks.sort(key=lambda callback: isinstance(callback, Checkpoints))
        self._in_steps: dict[str, list[Callable[..., None]]] = {}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks before a call of the train function."""
        self._call("on_train_batch_begin", "on_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks after a call of the train function."""
        self._call("on_train_batch_end", "on_batch_end", batch, logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks before a call of the test function."""
        self._call("on_test_batch_begin", None, batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks after a call of the test function."""
        self._call("on_test_batch_end", None, batch, logs)

    def _call(self, name: str, alias: str | None, batch: int, logs: Any) -> None:
        if name not in self._in_steps:
            self._in_steps[name] = [getattr(c, name) for c in self.callbacks if _does(c, name) or (alias and _does(c, alias))]
        hooks = self._in_steps[name]
        if not hooks:
            return
        given: Any = {} if logs is None else Logs(logs, lambda: dict(logs.items()))
        kept = weakref.ref(given) if isinstance(given, Logs) else None
        for hook in hooks:
            hook(batch, logs=given)
        del given
        still = kept() if kept is not None else None
        if still is not None:
            still.computed()


@contextlib.contextmanager
def closing_checkpoints(callbacks: Any) -> Iterator[None]:
    """Clean up `Checkpoints` if fit ends with an exception, which Keras does not report to callbacks.

    Args:
        callbacks: A `CallbackList`; None if a custom fit takes no callbacks.
    """
    try:
        yield
    except BaseException:
        for callback in getattr(callbacks, "callbacks", ()):
            if isinstance(callback, Checkpoints):
                callback.abandon()
        raise


def _does(callback: Any, name: str) -> bool:
    method = getattr(callback, name)
    return getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, name)


class Logs(dict[str, Any]):
    """Hold the numbers of a step by name. The values are computed when the first one is read.

    Args:
        names: The names.
        read: A function that computes the values.
    """

    def __init__(self, names: Iterable[str], read: Callable[[], dict[str, Any]]) -> None:
        super().__init__(dict.fromkeys(names))
        self._read: Callable[[], dict[str, Any]] | None = read

    def computed(self) -> Logs:
        """Return these logs, with their values."""
        if self._read is not None:
            read, self._read = self._read, None
            super().update({name: as_python(value) for name, value in read().items()})
        return self

    def __iter__(self) -> Iterator[str]:
        # Its own, so that dict(logs) and {**logs} ask for the values.
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


def _of_computed(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def call(self: Logs, *args: Any, **kwargs: Any) -> Any:
        return method(self.computed(), *args, **kwargs)

    return call


_CHANGING = ("__delitem__", "__setitem__", "pop", "popitem", "setdefault", "update")
for _name in ("__getitem__", "__or__", "__repr__", "copy", "get", "items", "values", *_CHANGING):
    setattr(Logs, _name, _of_computed(_name))


def as_python(value: Any) -> Any:
    """Return a number as a Python float, or an array, which some metrics return, as a NumPy array.

    Args:
        value: A tensor or a number.

    Returns:
        The value.
    """
    array = value.numpy() if hasattr(value, "numpy") else value
    return float(array) if getattr(array, "shape", ()) == () and not isinstance(array, str) else array
