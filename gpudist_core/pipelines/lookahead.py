"""Make the next results in background threads before they are requested, and return them in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from threading import Condition, Lock, Thread, current_thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# How long closing waits for a thread that is in the user's code; it ends by itself as soon as that returns.
_PATIENCE = 5.0


class LookAhead(Generic[T]):
    """Iterate over the results of tasks, and make a limited number of them ahead.

    The threads hold only the shared state, not this object. So they end when the object is dropped, when a task fails, when the
    consumer is interrupted while it waits, and when Python exits.

    Args:
        tasks: Functions that make one result each. One thread at a time takes the next as soon as there is room.
        ahead: The largest number of results ahead of the consumer, including unfinished ones; 0 starts no thread.
        workers: Number of threads.
    """

    def __init__(self, tasks: Iterator[Callable[[], T]], ahead: int, workers: int) -> None:
        self._shared: _Shared[T] = _Shared(tasks, ahead)
        self._ahead = ahead
        threads = [
            Thread(target=self._shared.work, name=f"gpudist-lookahead-{i}", daemon=True) for i in range(min(ahead, workers))
        ]
        # Runs when this object is collected, and before Python takes daemon threads down.
        self._finalizer = weakref.finalize(self, _end, self._shared, threads)
        for thread in threads:
            thread.start()

    def __iter__(self) -> LookAhead[T]:
        return self

    def __next__(self) -> T:
        try:
            return self._shared.take() if self._ahead else self._shared.make()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the threads, and drop the results that were made ahead."""
        self._finalizer()


def _end(shared: _Shared[Any], threads: list[Thread]) -> None:
    shared.stop()
    # The collector may run this in one of the threads itself.
    for thread in threads if current_thread() not in threads else ():
        thread.join(_PATIENCE)
    if not threads:
        shared.close_tasks()


def _run(task: Callable[[], T]) -> T:
    try:
        return task()
    except StopIteration as error:
        raise RuntimeError("a function of the pipeline raised StopIteration, which would end the epoch early") from error


class _Shared(Generic[T]):
    """Hold the state that the threads and the iterator share."""

    def __init__(self, tasks: Iterator[Callable[[], T]], ahead: int) -> None:
        self._tasks = tasks
        self._ahead = ahead
        self._taking_task = Lock()
        self._changed = Condition()
        # Guarded by `_changed`. 0 <= issued - taken <= ahead, and the numbers of the results are from taken up to issued.
        self._results: dict[int, tuple[T | None, BaseException | None]] = {}
        self._issued = 0  # -1 once there are no more tasks
        self._taken = 0
        self._stopped = False  # never unset

    def take(self) -> T:
        """Wait for the next result and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken in self._results or self._stopped)
            if self._stopped:
                raise StopIteration
            value, error = self._results.pop(self._taken)
            self._taken += 1
            self._changed.notify_all()
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            # An error that its own traceback refers to would stay until the collector finds it.
            del error

    def make(self) -> T:
        """Make the next result now and return it."""
        if self._stopped:
            raise StopIteration
        return _run(next(self._tasks))

    def work(self) -> None:
        """Make results until there are no more tasks, one fails, or the iterator stops."""
        while (issued := self._next_task()) is not None:
            number, task = issued
            try:
                result = (_run(task), None)
            except BaseException as error:  # handed to the consumer, whatever it is
                result = (None, error)  # type: ignore[assignment]
            del task
            self._publish(number, result)
        self.close_tasks()

    def _next_task(self) -> tuple[int, Callable[[], T]] | None:
        with self._taking_task:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._issued - self._taken < self._ahead)
                if self._stopped or self._issued < 0:
                    return None
                number = self._issued
                self._issued += 1
            try:
                return number, next(self._tasks)
            except BaseException as error:  # StopIteration included: it ends the consumer's loop in its turn
                self._publish(number, (None, error))
                with self._changed:
                    self._issued = -1
                return None

    def _publish(self, number: int, result: tuple[T | None, BaseException | None]) -> None:
        with self._changed:
            self._results[number] = result
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the threads, and drop what they made."""
        with self._changed:
            self._stopped = True
            self._results.clear()
            self._changed.notify_all()

    def close_tasks(self) -> None:
        """Run the `finally` of the generator of tasks now, in this thread."""
        with self._taking_task:
            if hasattr(self._tasks, "close"):
                self._tasks.close()
