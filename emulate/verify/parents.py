"""Hold the processes that runs are forked from."""

from __future__ import annotations

import threading

from emulate.cluster import Preload


class Parents:
    """Keep one process that has imported TensorFlow, and make others for programs that it does not suit.

    TensorFlow and Keras read some environment variables when they are imported. For a program that sets one of them, later runs
    come from a process in which it is set before the import; for one that sets several, or removes one, from a process that has
    not imported anything.

    Args:
        shared: One that is up already and stays up; one of its own unless given.
        modules: What the processes import besides TensorFlow.
    """

    def __init__(self, shared: Preload | None, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._own: list[Preload] = []
        self._bare: Preload | None = None
        self.first = self._add(Preload(modules=modules)) if shared is None else shared
        self._current = self.first

    @property
    def current(self) -> Preload:
        """Return the one that the program's runs come from."""
        with self._lock:
            return self._current

    @property
    def bare(self) -> Preload:
        """Return one that has not imported TensorFlow."""
        with self._lock:
            if self._bare is None:
                self._bare = self._add(Preload(imports=False))
            return self._bare

    def replace(self, old: Preload, name: str, value: str | None) -> None:
        """Use another one from now on.

        Args:
            old: The one that did not suit; it may have been replaced by another run already.
            name: The variable that the program sets after TensorFlow has read it.
            value: To what; None where it is removed.
        """
        if old is self.first and value is not None:
            with self._lock:
                if self._current is old:
                    self._current = self._add(Preload(environment={name: value}, modules=self._modules))
            return
        bare = self.bare
        with self._lock:
            self._current = bare if self._current is old else self._current

    def close(self) -> None:
        """End those that were made here."""
        for preload in self._own:
            preload.close()

    def _add(self, preload: Preload) -> Preload:
        self._own.append(preload)
        return preload
