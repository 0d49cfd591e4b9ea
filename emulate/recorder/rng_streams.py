"""Follow the random streams outside of graphs: which ones a program seeds, with what, and whether it draws in each step.

Hosts that seed a stream alike and draw from it for each batch, each for rows of its own, draw the same numbers.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from emulate.recorder.host_trace import HostTrace
from emulate.trace import digest

_MOST_STREAMS = 32
"""So many streams are followed; a program that makes one for each row makes a few lines' worth of them."""


@dataclass
class _Stream:
    """Hold one generator: its seed, and in how many of the observed steps it had advanced.

    Attributes:
        builds: Whether it was made, and advanced, in a function that makes the dataset of one host.
    """

    seed: str
    state: Callable[[], str]
    last: str = ""
    moved: int = 0
    looks: int = 0
    first: str = ""
    builds: bool = False

    def __post_init__(self) -> None:
        self.first = self.state()

    def look(self) -> None:
        now = self.state()
        self.moved += bool(self.looks) and now != self.last
        self.looks += 1
        self.last = now


class Streams:
    """Follow the generators of Python and NumPy that a program seeds, and write at the end what they have done.

    Args:
        trace: Where they are written.
    """

    def __init__(self, trace: HostTrace) -> None:
        self._known: dict[str, _Stream] = {}
        trace.at_step.append(self.look)
        trace.at_end.append(lambda: trace.write({"event": "streams", "streams": self.found}))

    def seeded(self, generator: str) -> None:
        """Note that the program has seeded Python's or NumPy's global generator."""
        if generator in _GLOBAL:
            name, state = _GLOBAL[generator]
            self._known[name] = _Stream(state(), state)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Note what is made and advances in this block, which makes the dataset of one host."""
        before = [id(stream) for stream in self._known.values()]
        yield
        for stream in self._known.values():
            stream.builds |= id(stream) not in before and stream.state() != stream.first

    def look(self) -> None:
        """Note that a step was made."""
        for stream in list(self._known.values()):
            stream.look()

    @property
    def found(self) -> dict[str, dict[str, Any]]:
        """Return, by stream name, its seed, its count of advances, and whether it makes a host's dataset."""
        return {
            name: {"seed": stream.seed, "moved": stream.moved, "looks": stream.looks - 1, "builds": stream.builds}
            for name, stream in self._known.items()
        }

    def made(self, seed: Any, generator: Any, frame: Any) -> None:
        """Note that the program has made a generator of NumPy in this frame."""
        name = f"numpy.random.default_rng, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        seeds = seed if isinstance(seed, (list, tuple)) else [seed]
        if all(isinstance(number, int) for number in seeds) and name not in self._known and len(self._known) < _MOST_STREAMS:
            self._known[name] = _Stream(repr(seed), lambda: repr(generator.bit_generator.state))


def _numpy_state() -> str:
    import numpy as np

    state = np.random.get_state(legacy=False)["state"]
    return f"{digest(state['key'])}:{state['pos']}"


_GLOBAL: Mapping[str, tuple[str, Callable[[], str]]] = {
    "python": ("random", lambda: str(hash(random.getstate()))),
    "numpy": ("numpy.random", _numpy_state),
}
