"""Report an unrecorded host's last step and last collective to the supervisor.

Nothing is added to the program's steps but the counters of collectives; a thread looks at them, and at how many steps the
optimizers say that they have made, a few times a second.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from emulate.imports import when_imported
from emulate.probe import collectives, point, upstream
from emulate.probe.point import around

Send = Callable[[Mapping[str, Any]], None]


class Pulse:
    """Send `progress`, `collective` and `site` events while a program runs.

    Args:
        send: Sends an event to the supervisor.
        several_hosts: Whether collectives between hosts are to be watched.
    """

    def __init__(self, send: Send, *, several_hosts: bool) -> None:
        self._send = send
        self._several_hosts = several_hosts
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self.num_steps = 0

    def install(self) -> None:
        """Watch the collectives and optimizers of TensorFlow, Keras and tf_keras, as soon as they are imported."""
        point.listen(self._failed)
        if self._several_hosts:
            listener = collectives.Listener(self._send, lambda: self.num_steps)
            when_imported("tensorflow", lambda: collectives.install(listener))
        when_imported("keras", lambda: self._see(upstream.keras_optimizers()))
        when_imported("tf_keras", lambda: self._see(upstream.legacy_optimizers()[1:]))

    def _failed(self, at: str, error: Exception) -> None:
        text = f"gpudist itself failed at {at} ({type(error).__name__}: {error}): it cannot tell how far the program is"
        self._send({"event": "note", "code": at, "text": text})

    def _see(self, methods: list[tuple[Any, str]]) -> None:
        for cls, method in methods:
            self._wrap(cls, method)

    def _wrap(self, cls: Any, method: str) -> None:
        @around(cls, method)
        def apply(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._optimizers.add(optimizer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="gpudist-pulse", daemon=True)
                self._thread.start()
            return original(optimizer, *args, **kwargs)

    def _look(self) -> None:
        while True:
            time.sleep(collectives.POLL_SECONDS)
            num_steps = max((upstream.steps_made(optimizer) for optimizer in list(self._optimizers)), default=0)
            if num_steps != self.num_steps:
                self.num_steps = num_steps
                self._send({"event": "progress", "step": num_steps})
