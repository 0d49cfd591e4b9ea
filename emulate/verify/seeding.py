"""Seed every generator that a program may use, and observe which of them the program seeds itself."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any, final

from emulate.imports import when_imported
from emulate.probe import upstream

GENERATORS = ("python", "numpy", "tensorflow")
"""Global generators. A program that seeds all of them does not depend on gpudist's seed."""

_LARGEST = 2**31 - 1
"""Modulus of TensorFlow's seeds."""
_HOSTS_APART = 1_000_003
"""Distance between the seeds of neighbouring hosts if each host has its own seed."""


def seed_of_host(seed: int, host: int) -> int:
    """Return the seed of a host if each has its own, as without a common seed; the first host's is `seed`."""
    return (seed + host * _HOSTS_APART) % 2**32


@final
class Seeding:
    """Seed Python, NumPy, TensorFlow and Keras, each as soon as its package is imported.

    Args:
        seed: What they are seeded with.
        precision: Keras's float type.
        host: Python, NumPy and TensorFlow get the seed of this host instead, as where nobody seeds them; None for all alike.
            (Keras keeps `seed`: what it was told is nothing that a host draws from.)
        told: Called with the name of each of `GENERATORS` once the program has seeded it itself before it has drawn from it.
            (Of Python's and TensorFlow's it is not known whether the program has drawn: their imports draw too.)
    """

    def __init__(
        self, seed: int, precision: str = "float32", *, host: int | None = None, told: Callable[[str], None] = lambda _: None
    ) -> None:
        self._seed = seed
        self._own = seed if host is None else seed_of_host(seed, host)
        self._precision = precision
        self._told = told
        self._known: set[str] = set()
        self._is_ours = False

    def install(self) -> None:
        """Seed what is there, and the rest when it comes."""
        import numpy as np

        random.seed(self._own)
        np.random.seed(self._own)  # the legacy generator: what programs use without making one
        untouched = np.random.get_state(legacy=False)
        self._listen(random, "seed", "python")
        self._listen(np.random, "seed", "numpy", lambda: _same_state(np.random.get_state(legacy=False), untouched))
        when_imported("tensorflow", self._seed_tensorflow)
        when_imported("keras", lambda: self._seed_keras("keras"))
        when_imported("tf_keras", lambda: self._seed_keras("tf_keras"))

    def _seed_tensorflow(self) -> None:
        import tensorflow as tf

        tf.random.set_seed(self._own)
        self._listen(tf.random, "set_seed", "tensorflow")
        if self._own != self._seed:
            self._leave_seeded_operations()

    def _leave_seeded_operations(self) -> None:
        """Handle operations with their own seed, which draw the same on all hosts if nobody sets a global one."""
        module = upstream.seed_module()
        original = module.get_seed

        @functools.wraps(original)
        def get_seed(op_seed: Any) -> Any:
            first, second = original(op_seed)
            if op_seed is None or first != self._own % _LARGEST:
                return first, second
            first = self._seed % _LARGEST
            return (0, _LARGEST) if first == 0 and isinstance(second, int) and second == 0 else (first, second)

        module.get_seed = get_seed

    def _seed_keras(self, package: str) -> None:
        import numpy as np
        import tensorflow as tf

        keras = importlib.import_module(package)
        self._is_ours = True
        try:
            keras.utils.set_random_seed(self._seed)
            if self._own != self._seed:
                random.seed(self._own)
                np.random.seed(self._own)
                tf.random.set_seed(self._own)
        finally:
            self._is_ours = False
        if self._precision != "float32":
            keras.backend.set_floatx(self._precision)

    def _listen(self, module: Any, name: str, generator: str, is_untouched: Callable[[], bool] = lambda: True) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> Any:
            is_first = not self._is_ours and generator not in self._known
            tells = is_first and _is_a_seed(*args, *kwargs.values()) and is_untouched()
            result = original(*args, **kwargs)
            if tells:
                self._known.add(generator)
                self._told(generator)
            return result

        setattr(module, name, seed)


def _is_a_seed(value: object = None, *_: object) -> bool:
    """Return whether a generator gets a seed; None stands for the operating system's entropy."""
    return value is not None


def _same_state(one: Any, other: Any) -> bool:
    import numpy as np

    state, before = one["state"], other["state"]
    return bool(state["pos"] == before["pos"] and np.array_equal(state["key"], before["key"]))
